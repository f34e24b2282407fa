// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Between the CUDA translation unit and the Python binding: a table of kernels by name, and one launch for all.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ds_fp4 {

struct KernelEntry {
    const char* name;      // as NVRTC would be asked for it, "bf16_to_fp4_row<Bf16, true>"
    const void* function;  // host side handle
    size_t params_bytes;
    size_t shared_bytes;  // of dynamic shared memory
};

template <typename Params>
KernelEntry entry(const char* name, void (*kernel)(Params), size_t shared_bytes = 0) {
    return {name, reinterpret_cast<const void*>(kernel), sizeof(Params), shared_bytes};
}

#define DS_FP4_ENTRY(...) entry(#__VA_ARGS__, &__VA_ARGS__)

// All kernels: those of kernels.cu, then those of fused_kernels.cu.
const std::vector<KernelEntry>& kernel_table();
std::vector<KernelEntry> fused_kernel_table();

// Loads the kernel on the current device, which CUDA would otherwise do at its first launch; returns an empty string,
// or CUDA's error, for one if the module has no code for the device.
std::string load_kernel(const KernelEntry& kernel);

// Launches on `stream` of the current device; returns an empty string, or CUDA's error.
std::string launch_kernel(const KernelEntry& kernel, unsigned grid, unsigned threads, const void* params,
                          void* stream);

}  // namespace ds_fp4
