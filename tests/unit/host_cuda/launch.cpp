// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The table of all kernels in ops/csrc, made for the host by cuda_runtime.h beside this, for ctypes.
#include "cuda_runtime.h"
#include "kernels.h"

extern "C" {

int host_kernel_count() {
    return static_cast<int>(ds_fp4::kernel_table().size());
}

const char* host_kernel_name(int kernel) {
    return ds_fp4::kernel_table()[kernel].name;
}

size_t host_kernel_params_bytes(int kernel) {
    return ds_fp4::kernel_table()[kernel].params_bytes;
}

void host_set_backwards(int backwards) {
    host_cuda::backwards = backwards;
}

// `params` must be at least sizeof(HostCudaParams) long. Returns an empty string, or what ended the launch.
const char* host_launch(int kernel, unsigned grid, unsigned threads, const void* params) {
    static std::string error;
    error = ds_fp4::launch_kernel(ds_fp4::kernel_table()[kernel], grid, threads, params, nullptr);
    return error.c_str();
}
}
