// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The kernels of fused_kernels.cu as host code (simt.h), launched by name as the backends do.
#include "simt.h"

#include <string>
#include <unordered_map>

#include "combine_rows.cuh"
#include "gather_gradients.cuh"
#include "gather_rows.cuh"
#include "pack_routing.cuh"
#include "return_gradients.cuh"
#include "route_count.cuh"
#include "route_receive.cuh"
#include "route_send.cuh"
#include "sum_partials.cuh"
#include "swiglu_backward.cuh"
#include "swiglu_forward.cuh"

using namespace ds_fp4;

namespace {

using Launch = std::function<int(const void* params, unsigned grid)>;

template <typename Params>
Launch launcher(void (*kernel)(Params), size_t shared_bytes = 0) {
    return [kernel, shared_bytes](const void* bytes, unsigned grid) {
        Params params;
        std::memcpy(&params, bytes, sizeof(Params));
        return static_cast<int>(simt::launch(grid, kThreads, shared_bytes, [=] { kernel(params); }));
    };
}

#define ENTRY(...) {#__VA_ARGS__, launcher(&__VA_ARGS__)}
#define BACKWARD(...) {#__VA_ARGS__, launcher(&__VA_ARGS__, kSwigluBackwardSharedBytes)}
#define COMBINE(in, out)                                                                   \
    ENTRY(combine_rows<in, out, false, true>), ENTRY(combine_rows<in, out, false, false>), \
        ENTRY(combine_rows<in, out, true, true>), ENTRY(combine_rows<in, out, true, false>)

// Not every activation with every format: what these are made of is the same.
const std::unordered_map<std::string, Launch> kLaunches = {
    ENTRY(swiglu_forward<Swiglu, Mxfp4Rows>),
    ENTRY(swiglu_forward<Swiglu, Fp8Rows>),
    ENTRY(swiglu_forward<Swiglu, NoRows>),
    ENTRY(swiglu_forward<SwigluClamped, NoRows>),
    ENTRY(swiglu_forward<SwigluOai, NoRows>),
    ENTRY(swiglu_forward<GegluTanh, NoRows>),
    BACKWARD(swiglu_backward<Swiglu, Mxfp4Rows>),
    BACKWARD(swiglu_backward<Swiglu, Fp8Rows>),
    BACKWARD(swiglu_backward<Swiglu, Bf16Rows>),
    BACKWARD(swiglu_backward<SwigluClamped, Bf16Rows>),
    BACKWARD(swiglu_backward<SwigluOai, Bf16Rows>),
    BACKWARD(swiglu_backward<GegluTanh, Bf16Rows>),
    ENTRY(sum_partials<8>),
    ENTRY(gather_rows<16>),
    ENTRY(gather_rows<4>),
    ENTRY(gather_rows<1>),
    COMBINE(Bf16Rows, Bf16Rows),
    COMBINE(Bf16Rows, Mxfp4Rows),
    COMBINE(Bf16Rows, Fp8Rows),
    COMBINE(Mxfp4Rows, Bf16Rows),
    COMBINE(Mxfp4Rows, Mxfp4Rows),
    COMBINE(Mxfp4Rows, Fp8Rows),
    COMBINE(Fp8Rows, Bf16Rows),
    COMBINE(Fp8Rows, Mxfp4Rows),
    COMBINE(Fp8Rows, Fp8Rows),
    ENTRY(route_count<SendIds4>),
    ENTRY(route_count<SendIds8>),
    ENTRY(route_count<ReceivedIds>),
    ENTRY(route_send<SendIds4>),
    ENTRY(route_send<SendIds8>),
    ENTRY(route_receive<128>),
    ENTRY(pack_routing<SendIds4>),
    ENTRY(pack_routing<SendIds8>),
    ENTRY(gather_gradients<1>),
    ENTRY(return_gradients<SendIds4>),
    ENTRY(return_gradients<SendIds8>),
};

}  // namespace

// 0, or what went wrong: 1 trap, 2 deadlock, 3 no such kernel.
extern "C" int host_launch(const char* name, const void* params, unsigned grid) {
    const auto found = kLaunches.find(name);
    return found == kLaunches.end() ? 3 : found->second(params, grid);
}
