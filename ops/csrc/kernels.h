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
};

const std::vector<KernelEntry>& kernel_table();

// Loads the kernel on the current device, which CUDA would otherwise do at its first launch; returns an empty string,
// or CUDA's error, for one if the module has no code for the device.
std::string load_kernel(const KernelEntry& kernel);

// Launches on `stream` of the current device; returns an empty string, or CUDA's error.
std::string launch_kernel(const KernelEntry& kernel, unsigned grid, unsigned threads, const void* params,
                          void* stream);

}  // namespace ds_fp4
