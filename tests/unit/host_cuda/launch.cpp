// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The kernel table of ops/csrc/kernels.cu, made for the host by cuda_runtime.h beside this, for ctypes.
#include "kernels.cu"

// Those of fused_kernels.cu run in ../fused_kernels_host.cpp, which has dynamic shared memory.
std::vector<ds_fp4::KernelEntry> ds_fp4::fused_kernel_table() {
    return {};
}

extern "C" {

int host_kernel_count() {
    return static_cast<int>(ds_fp4::kernel_table().size());
}

const char* host_kernel_name(int kernel) {
    return ds_fp4::kernel_table()[kernel].name;
}

void host_set_backwards(int backwards) {
    host_cuda::backwards = backwards;
}

// `params` must be at least sizeof(HostCudaParams) long. Returns the bytes of the kernel's own parameters.
size_t host_launch(int kernel, unsigned grid, unsigned threads, const void* params) {
    const ds_fp4::KernelEntry& entry = ds_fp4::kernel_table()[kernel];
    ds_fp4::launch_kernel(entry, grid, threads, params, nullptr);
    return entry.params_bytes;
}
}
