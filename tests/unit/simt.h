// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Runs CUDA kernels as host code, for tests on machines without a GPU: every thread of a block is a fiber, blocks run
// one after the other. What it knows of CUDA is what the kernels in ops/csrc use. Include it before any of their
// headers.
//
// A shuffle, a vote or a barrier waits until all threads of the warp or block have come to it; if they cannot, because
// one has left or waits elsewhere, the launch fails instead of hanging. Shared memory is poisoned before each block.
// Races between barriers are not found: fibers switch only at those calls.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // one block at a time
#define DS_FP4_DEVICE inline

struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) {
    return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}

struct Dim {
    unsigned x;
};
inline Dim threadIdx, blockIdx, gridDim;

namespace simt {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 256 << 10;

enum Result { kOk = 0, kTrap = 1, kDeadlock = 2 };

// Where threads meet: `generation` moves on when the last of them has come.
struct Meeting {
    int expected = 0, arrived = 0;
    uint64_t generation = 0;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(kStackBytes);
    bool done = false;
    const Meeting* waits_at = nullptr;
    uint64_t waits_for = 0;
};

inline std::vector<Fiber> fibers;
inline std::vector<Meeting> warps;
inline std::vector<std::vector<uint64_t>> slots;  // [warp][lane]
inline Meeting block;
inline ucontext_t scheduler;
inline unsigned current;
inline std::function<void()> body;
inline std::vector<unsigned char> shared_memory;
inline Result result;

inline void yield() {
    swapcontext(&fibers[current].context, &scheduler);
}

inline void meet(Meeting& meeting) {
    if (++meeting.arrived == meeting.expected) {
        meeting.arrived = 0;
        ++meeting.generation;
        return;
    }
    fibers[current].waits_at = &meeting;
    fibers[current].waits_for = meeting.generation + 1;
    yield();
}

// What lane `source` of this warp passed.
template <typename T>
T exchange(T value, int source) {
    const unsigned warp = current / kWarp, lane = current % kWarp;
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    slots[warp][lane] = bits;
    meet(warps[warp]);
    bits = slots[warp][source];
    meet(warps[warp]);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

inline void run_fiber() {
    body();
    fibers[current].done = true;
    yield();
}

[[noreturn]] inline void fail(Result why) {
    result = why;
    setcontext(&scheduler);
    __builtin_unreachable();
}

inline void run_block(unsigned threads) {
    block = {static_cast<int>(threads), 0, 0};
    warps.assign(threads / kWarp, {kWarp, 0, 0});
    slots.assign(threads / kWarp, std::vector<uint64_t>(kWarp));
    fibers.resize(threads);
    std::memset(shared_memory.data(), 0xCD, shared_memory.size());
    for (unsigned thread = 0; thread < threads; ++thread) {
        Fiber& fiber = fibers[thread];
        fiber.done = false;
        fiber.waits_at = nullptr;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = kStackBytes;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run_fiber, 0);
    }
    for (bool progress = true; progress && result == kOk;) {
        progress = false;
        bool all_done = true;
        for (unsigned thread = 0; thread < threads && result == kOk; ++thread) {
            Fiber& fiber = fibers[thread];
            if (fiber.done) {
                continue;
            }
            all_done = false;
            if (fiber.waits_at != nullptr && fiber.waits_at->generation < fiber.waits_for) {
                continue;
            }
            fiber.waits_at = nullptr;
            progress = true;
            current = thread;
            threadIdx.x = thread;
            swapcontext(&scheduler, &fiber.context);
        }
        if (all_done) {
            return;
        }
    }
    if (result == kOk) {
        result = kDeadlock;
    }
}

inline Result launch(unsigned grid, unsigned threads, size_t shared_bytes, std::function<void()> kernel) {
    body = std::move(kernel);
    shared_memory.resize(shared_bytes + 16);
    result = kOk;
    gridDim.x = grid;
    for (unsigned number = 0; number < grid && result == kOk; ++number) {
        blockIdx.x = number;
        run_block(threads);
    }
    return result;
}

}  // namespace simt

inline void __trap() {
    simt::fail(simt::kTrap);
}
inline void __syncthreads() {
    simt::meet(simt::block);
}
inline void __syncwarp(unsigned = 0xFFFFFFFFu) {
    simt::meet(simt::warps[simt::current / simt::kWarp]);
}

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
    return simt::exchange(value, lane & 31);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return simt::exchange(value, static_cast<int>(simt::current % simt::kWarp) ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int distance) {
    const int lane = static_cast<int>(simt::current % simt::kWarp);
    return simt::exchange(value, lane >= distance ? lane - distance : lane);
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
    unsigned votes = 0;
    const unsigned warp = simt::current / simt::kWarp, lane = simt::current % simt::kWarp;
    simt::slots[warp][lane] = predicate;
    simt::meet(simt::warps[warp]);
    for (int i = 0; i < simt::kWarp; ++i) {
        votes |= static_cast<unsigned>(simt::slots[warp][i]) << i;
    }
    simt::meet(simt::warps[warp]);
    return votes;
}

inline unsigned __match_any_sync(unsigned, unsigned value) {
    unsigned peers = 0;
    const unsigned warp = simt::current / simt::kWarp, lane = simt::current % simt::kWarp;
    simt::slots[warp][lane] = value;
    simt::meet(simt::warps[warp]);
    for (int i = 0; i < simt::kWarp; ++i) {
        peers |= static_cast<unsigned>(simt::slots[warp][i] == value) << i;
    }
    simt::meet(simt::warps[warp]);
    return peers;
}
inline unsigned atomicAdd(unsigned* address, unsigned value) {
    const unsigned before = *address;
    *address += value;
    return before;
}

template <typename T>
T __ldg(const T* address) {
    return *address;
}
inline int __ffs(int value) {
    return __builtin_ffs(value);
}
inline int __clz(int value) {
    return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value));
}
inline int __popc(unsigned value) {
    return __builtin_popcount(value);
}
template <typename T>
T min(T a, T b) {
    return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
    return a < b ? b : a;
}

namespace ds_fp4 {
template <typename T>
T& dynamic_shared() {
    const auto address = reinterpret_cast<uintptr_t>(simt::shared_memory.data());
    return *reinterpret_cast<T*>((address + 15) / 16 * 16);
}
}  // namespace ds_fp4
