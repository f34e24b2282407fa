// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Every instantiation of every kernel, compiled by nvcc. ops/kernels.py holds the same list for NVRTC, and what each
// is launched with; a test compares the two.
#include <cuda_runtime.h>

#include "bf16_to_fp4_row.cuh"
#include "bf16_to_fp8_row.cuh"
#include "bf16_to_fp8_row_and_col.cuh"
#include "fp4_row_to_bf16.cuh"
#include "fp4_row_to_fp8_col.cuh"
#include "fp4_row_to_fp8_row.cuh"
#include "fp8_row_to_bf16.cuh"
#include "fp8_row_to_fp4_row.cuh"
#include "fp8_row_to_fp8_col.cuh"
#include "fp8_row_to_fp8_row.cuh"
#include "kernels.h"
#include "split_weight_gradient.cuh"
#include "weight_to_fp8.cuh"

namespace ds_fp4 {

#define DS_FP4_ROW_KERNEL(kernel)                                                                          \
    DS_FP4_ENTRY(kernel<Bf16, true>), DS_FP4_ENTRY(kernel<Bf16, false>), DS_FP4_ENTRY(kernel<Fp16, true>), \
        DS_FP4_ENTRY(kernel<Fp16, false>), DS_FP4_ENTRY(kernel<Fp32, true>), DS_FP4_ENTRY(kernel<Fp32, false>)
#define DS_FP4_FP4_KERNEL(kernel) DS_FP4_ENTRY(kernel<true>), DS_FP4_ENTRY(kernel<false>)
#define DS_FP4_FP8_TO_FP4_KERNEL(kernel)                                              \
    DS_FP4_ENTRY(kernel<true, 32, true>), DS_FP4_ENTRY(kernel<true, 16, true>),       \
        DS_FP4_ENTRY(kernel<true, 16, false>), DS_FP4_ENTRY(kernel<false, 32, true>), \
        DS_FP4_ENTRY(kernel<false, 16, true>), DS_FP4_ENTRY(kernel<false, 16, false>)
#define DS_FP4_FP8_KERNEL(kernel)                                                                           \
    DS_FP4_ENTRY(kernel<true, true>), DS_FP4_ENTRY(kernel<true, false>), DS_FP4_ENTRY(kernel<false, true>), \
        DS_FP4_ENTRY(kernel<false, false>)
#define DS_FP4_FP8_COL_KERNEL(kernel)                                                      \
    DS_FP4_ENTRY(kernel<true, true, true>), DS_FP4_ENTRY(kernel<true, true, false>),       \
        DS_FP4_ENTRY(kernel<true, false, true>), DS_FP4_ENTRY(kernel<true, false, false>), \
        DS_FP4_ENTRY(kernel<false, true, true>), DS_FP4_ENTRY(kernel<false, true, false>), \
        DS_FP4_ENTRY(kernel<false, false, true>), DS_FP4_ENTRY(kernel<false, false, false>)

const std::vector<KernelEntry>& kernel_table() {
    static const std::vector<KernelEntry> table = [] {
        std::vector<KernelEntry> all = {
            DS_FP4_ROW_KERNEL(bf16_to_fp4_row),        DS_FP4_ROW_KERNEL(fp4_row_to_bf16),
            DS_FP4_ROW_KERNEL(bf16_to_fp8_row),        DS_FP4_ROW_KERNEL(fp8_row_to_bf16),
            DS_FP4_FP4_KERNEL(fp4_row_to_fp8_row),     DS_FP4_FP8_TO_FP4_KERNEL(fp8_row_to_fp4_row),
            DS_FP4_FP8_KERNEL(fp8_row_to_fp8_row),     DS_FP4_FP8_KERNEL(fp4_row_to_fp8_col),
            DS_FP4_FP8_COL_KERNEL(fp8_row_to_fp8_col), DS_FP4_ROW_KERNEL(bf16_to_fp8_row_and_col),
            DS_FP4_ROW_KERNEL(weight_to_fp8),          DS_FP4_ENTRY(split_weight_gradient<>),
        };
        const std::vector<KernelEntry> fused = fused_kernel_table();
        all.insert(all.end(), fused.begin(), fused.end());
        return all;
    }();
    return table;
}

namespace {
std::string describe(cudaError_t error) {
    if (error == cudaSuccess) {
        return {};
    }
    cudaGetLastError();  // what is reported here must not be reported again to whoever asks next
    return std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
}
}  // namespace

std::string load_kernel(const KernelEntry& kernel) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel.function);
    if (error != cudaSuccess || kernel.shared_bytes == 0) {
        return describe(error);
    }
    // More than 48 KiB must be asked for.
    const int bytes = static_cast<int>(kernel.shared_bytes);
    return describe(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

std::string launch_kernel(const KernelEntry& kernel, unsigned grid, unsigned threads, const void* params,
                          void* stream) {
    void* arguments[] = {const_cast<void*>(params)};
    return describe(cudaLaunchKernel(kernel.function, dim3(grid), dim3(threads), arguments, kernel.shared_bytes,
                                     static_cast<cudaStream_t>(stream)));
}

}  // namespace ds_fp4
