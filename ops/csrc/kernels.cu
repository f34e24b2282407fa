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
namespace {

template <typename Params>
KernelEntry entry(const char* name, void (*kernel)(Params)) {
    return {name, reinterpret_cast<const void*>(kernel), sizeof(Params)};
}

#define DS_FP4_ENTRY(...) entry(#__VA_ARGS__, &__VA_ARGS__)
#define DS_FP4_ROW_KERNEL(kernel)                                                                          \
    DS_FP4_ENTRY(kernel<Bf16, true>), DS_FP4_ENTRY(kernel<Bf16, false>), DS_FP4_ENTRY(kernel<Fp16, true>), \
        DS_FP4_ENTRY(kernel<Fp16, false>), DS_FP4_ENTRY(kernel<Fp32, true>), DS_FP4_ENTRY(kernel<Fp32, false>)
#define DS_FP4_FP4_KERNEL(kernel) DS_FP4_ENTRY(kernel<true>), DS_FP4_ENTRY(kernel<false>)
#define DS_FP4_FP8_KERNEL(kernel)                                                                           \
    DS_FP4_ENTRY(kernel<true, true>), DS_FP4_ENTRY(kernel<true, false>), DS_FP4_ENTRY(kernel<false, true>), \
        DS_FP4_ENTRY(kernel<false, false>)

}  // namespace

const std::vector<KernelEntry>& kernel_table() {
    static const std::vector<KernelEntry> table = {
        DS_FP4_ROW_KERNEL(bf16_to_fp4_row),    DS_FP4_ROW_KERNEL(fp4_row_to_bf16),
        DS_FP4_ROW_KERNEL(bf16_to_fp8_row),    DS_FP4_ROW_KERNEL(fp8_row_to_bf16),
        DS_FP4_FP4_KERNEL(fp4_row_to_fp8_row), DS_FP4_FP8_KERNEL(fp8_row_to_fp4_row),
        DS_FP4_FP8_KERNEL(fp8_row_to_fp8_row), DS_FP4_FP4_KERNEL(fp4_row_to_fp8_col),
        DS_FP4_FP8_KERNEL(fp8_row_to_fp8_col), DS_FP4_ROW_KERNEL(bf16_to_fp8_row_and_col),
        DS_FP4_ROW_KERNEL(weight_to_fp8),      DS_FP4_ENTRY(split_weight_gradient<>),
    };
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
    return describe(cudaFuncGetAttributes(&attributes, kernel.function));
}

std::string launch_kernel(const KernelEntry& kernel, unsigned grid, unsigned threads, const void* params,
                          void* stream) {
    void* arguments[] = {const_cast<void*>(params)};
    return describe(
        cudaLaunchKernel(kernel.function, dim3(grid), dim3(threads), arguments, 0, static_cast<cudaStream_t>(stream)));
}

}  // namespace ds_fp4
