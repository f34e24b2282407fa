// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The kernels themselves on the host, for test_kernel_sources_warp.py: every lane of a warp is a coroutine that runs
// to the next shuffle and waits there for the others. Slow, and all there is of a GPU in CI: it checks addresses, row
// ends, gathering and unaligned access, over the same launch parameters that a GPU would get.
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#define DS_FP4_DEVICE inline
#define __global__
#define __launch_bounds__(...)

struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx, gridDim;

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

static uint2 make_uint2(unsigned x, unsigned y) {
    return {x, y};
}
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}

[[noreturn]] static void __trap() {
    std::fprintf(stderr, "a kernel trapped\n");
    std::abort();
}

// A GPU faults on accesses that are not aligned to their size. Loads are checked here, stores by -fsanitize=alignment.
static void check_alignment(const void* address, size_t size) {
    if (reinterpret_cast<size_t>(address) % size != 0) {
        std::fprintf(stderr, "an access of %zu bytes is not aligned\n", size);
        std::abort();
    }
}

template <typename T>
static T __ldg(const T* address) {
    check_alignment(address, sizeof(T));
    T value;
    std::memcpy(&value, address, sizeof(T));
    return value;
}

template <typename T>
static T min(T a, T b) {
    return a < b ? a : b;
}

// ---- one warp ----

constexpr int kWarp = 32;
static unsigned given[kWarp], taken[kWarp];  // by shuffles
static ucontext_t scheduler, lane_context[kWarp];
static std::vector<char> lane_stack[kWarp];
static bool finished[kWarp];
static int running;
static std::function<void()> lane_body;

static void lane_main() {
    lane_body();
    finished[running] = true;
}

static void run_warp(unsigned first_thread) {
    for (int lane = 0; lane < kWarp; ++lane) {
        lane_stack[lane].resize(1 << 17);
        getcontext(&lane_context[lane]);
        lane_context[lane].uc_stack.ss_sp = lane_stack[lane].data();
        lane_context[lane].uc_stack.ss_size = lane_stack[lane].size();
        lane_context[lane].uc_link = &scheduler;
        makecontext(&lane_context[lane], lane_main, 0);
        finished[lane] = false;
    }
    while (!finished[0]) {
        for (running = 0; running < kWarp; ++running) {
            if (finished[running]) {
                std::fprintf(stderr, "lanes of a warp disagree on a shuffle\n");
                std::abort();
            }
            threadIdx.x = first_thread + running;
            swapcontext(&scheduler, &lane_context[running]);
        }
        std::memcpy(taken, given, sizeof(taken));
    }
}

static unsigned shuffle(unsigned value, int source) {
    const int lane = running;
    given[lane] = value;
    swapcontext(&lane_context[lane], &scheduler);
    return taken[source];
}

static unsigned __shfl_sync(unsigned, unsigned value, int source) {
    return shuffle(value, source);
}
static unsigned __shfl_xor_sync(unsigned, unsigned value, int mask) {
    return shuffle(value, running ^ mask);
}

// ---- the kernels ----

#include "bf16_to_fp4_row.cuh"
#include "bf16_to_fp8_row.cuh"
#include "fp4_row_to_bf16.cuh"
#include "fp8_row_to_bf16.cuh"

using Launch = std::function<void(const void*)>;

template <typename Params>
static Launch entry(void (*kernel)(Params)) {
    return [kernel](const void* bytes) {
        Params params;
        std::memcpy(&params, bytes, sizeof(params));
        lane_body = [kernel, params] { kernel(params); };
    };
}

namespace ds_fp4 {
#define ENTRY(...) {#__VA_ARGS__, entry(&__VA_ARGS__)}
#define ROW_KERNEL(kernel)                                                                                        \
    ENTRY(kernel<Bf16, true>), ENTRY(kernel<Bf16, false>), ENTRY(kernel<Fp16, true>), ENTRY(kernel<Fp16, false>), \
        ENTRY(kernel<Fp32, true>), ENTRY(kernel<Fp32, false>)

static const std::map<std::string, Launch> kTable = {ROW_KERNEL(bf16_to_fp4_row), ROW_KERNEL(fp4_row_to_bf16),
                                                     ROW_KERNEL(bf16_to_fp8_row), ROW_KERNEL(fp8_row_to_bf16)};
}  // namespace ds_fp4

extern "C" void launch(const char* name, unsigned grid, unsigned threads, const void* params) {
    ds_fp4::kTable.at(name)(params);
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
        for (unsigned thread = 0; thread < threads; thread += kWarp) {
            run_warp(thread);
        }
    }
}
