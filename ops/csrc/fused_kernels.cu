// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Every instantiation of the kernels that fuse an activation, a gather or a sum with conversions, and of those that
// plan the routing. A file of its own, so that it compiles beside kernels.cu.
#include <cuda_runtime.h>

#include "combine_rows.cuh"
#include "gather_gradients.cuh"
#include "gather_rows.cuh"
#include "kernels.h"
#include "pack_routing.cuh"
#include "return_gradients.cuh"
#include "route_count.cuh"
#include "route_receive.cuh"
#include "route_send.cuh"
#include "sum_partials.cuh"
#include "swiglu_backward.cuh"
#include "swiglu_forward.cuh"

namespace ds_fp4 {

#define DS_FP4_SHARED_ENTRY(bytes, ...) entry(#__VA_ARGS__, &__VA_ARGS__, bytes)

#define DS_FP4_FORWARD(activation)                                                                          \
    DS_FP4_ENTRY(swiglu_forward<activation, Mxfp4Rows>), DS_FP4_ENTRY(swiglu_forward<activation, Fp8Rows>), \
        DS_FP4_ENTRY(swiglu_forward<activation, NoRows>)

#define DS_FP4_BACKWARD(activation)                                                            \
    DS_FP4_SHARED_ENTRY(kSwigluBackwardSharedBytes, swiglu_backward<activation, Mxfp4Rows>),   \
        DS_FP4_SHARED_ENTRY(kSwigluBackwardSharedBytes, swiglu_backward<activation, Fp8Rows>), \
        DS_FP4_SHARED_ENTRY(kSwigluBackwardSharedBytes, swiglu_backward<activation, Bf16Rows>)

#define DS_FP4_COMBINE_TO(in, out)                                                                       \
    DS_FP4_ENTRY(combine_rows<in, out, false, true>), DS_FP4_ENTRY(combine_rows<in, out, false, false>), \
        DS_FP4_ENTRY(combine_rows<in, out, true, true>), DS_FP4_ENTRY(combine_rows<in, out, true, false>)
#define DS_FP4_COMBINE(in) \
    DS_FP4_COMBINE_TO(in, Bf16Rows), DS_FP4_COMBINE_TO(in, Mxfp4Rows), DS_FP4_COMBINE_TO(in, Fp8Rows)

std::vector<KernelEntry> fused_kernel_table() {
    return {
        DS_FP4_FORWARD(Swiglu),
        DS_FP4_FORWARD(SwigluClamped),
        DS_FP4_FORWARD(SwigluOai),
        DS_FP4_FORWARD(GegluTanh),
        DS_FP4_BACKWARD(Swiglu),
        DS_FP4_BACKWARD(SwigluClamped),
        DS_FP4_BACKWARD(SwigluOai),
        DS_FP4_BACKWARD(GegluTanh),
        DS_FP4_ENTRY(sum_partials<8>),
        DS_FP4_ENTRY(gather_rows<16>),
        DS_FP4_ENTRY(gather_rows<4>),
        DS_FP4_ENTRY(gather_rows<1>),
        DS_FP4_COMBINE(Bf16Rows),
        DS_FP4_COMBINE(Mxfp4Rows),
        DS_FP4_COMBINE(Fp8Rows),
        DS_FP4_ENTRY(route_count<SendIds4>),
        DS_FP4_ENTRY(route_count<SendIds8>),
        DS_FP4_ENTRY(route_count<ReceivedIds>),
        DS_FP4_ENTRY(route_send<SendIds4>),
        DS_FP4_ENTRY(route_send<SendIds8>),
        DS_FP4_ENTRY(route_receive<128>),
        DS_FP4_ENTRY(pack_routing<SendIds4>),
        DS_FP4_ENTRY(pack_routing<SendIds8>),
        DS_FP4_ENTRY(gather_gradients<1>),
        DS_FP4_ENTRY(return_gradients<SendIds4>),
        DS_FP4_ENTRY(return_gradients<SendIds8>),
    };
}

}  // namespace ds_fp4
