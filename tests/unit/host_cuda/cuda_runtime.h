// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Stands in for CUDA's header of this name, so that a host's compiler makes host code of ops/csrc: one block after the
// other, each thread of a block a fiber that yields where threads meet (barriers, shuffles, votes, reductions). What it
// cannot show is a missing barrier, what a GPU's own instructions round, or speed. It does show wrong indices, wrong
// bits, threads that do not meet, and lanes that meet in different places: these, and traps, end a launch with an error.
// Dynamic shared memory is poisoned before each block.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define DS_FP4_DEVICE inline

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) longlong2 {
    long long x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3() = default;
    dim3(unsigned x_) : x(x_) {}
};
inline uint2 make_uint2(unsigned x, unsigned y) {
    return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}

namespace host_cuda {

constexpr int kWarp = 32;

struct Thread {
    ucontext_t context;
    bool done = true;
    long warp_meetings = 0, block_meetings = 0;
};

struct Block {
    std::vector<Thread> threads;
    std::vector<std::unique_ptr<char[]>> stacks;
    ucontext_t scheduler;
    unsigned current = 0;
    // By warp, parity of the meeting, and lane: what each lane brings, and which kind of meeting it came to.
    std::vector<std::uint64_t> brought;
    std::vector<int> kind;
    void (*entry)(void*) = nullptr;
    void* argument = nullptr;
    // Of the launch: why it ended early.
    const char* error = nullptr;
    // Threads that came to a meeting or their end; where a round of all brings none, they wait for each other.
    long steps = 0;
};

inline Block block;
// Whether blocks and threads run from the last to the first: what depends on their order comes out differently.
inline bool backwards = false;
inline dim3 thread_index, block_index, block_size, grid_size;
inline std::vector<unsigned char> dynamic_shared;

// Ends the launch: no fiber is run again.
[[noreturn]] inline void fail(const char* what) {
    block.error = what;
    setcontext(&block.scheduler);
    __builtin_unreachable();
}

inline void yield() {
    swapcontext(&block.threads[block.current].context, &block.scheduler);
}

inline void run_thread() {
    block.entry(block.argument);
    block.threads[block.current].done = true;
    ++block.steps;
    swapcontext(&block.threads[block.current].context, &block.scheduler);
}

// Comes to a warp's meeting with `value`; returns where the values of all lanes lie.
inline const std::uint64_t* meet_in_warp(int kind, std::uint64_t value) {
    const unsigned own = block.current, warp = own / kWarp, lane = own % kWarp;
    const long meeting = ++block.threads[own].warp_meetings;
    ++block.steps;
    const size_t base = (warp * 2 + meeting % 2) * kWarp;
    block.brought[base + lane] = value;
    block.kind[base + lane] = kind;
    for (unsigned i = 0; i < kWarp; ++i) {
        while (block.threads[warp * kWarp + i].warp_meetings < meeting) {
            if (block.threads[warp * kWarp + i].done) {
                fail("a lane has left that others wait for");
            }
            yield();
        }
        if (block.threads[warp * kWarp + i].warp_meetings == meeting && block.kind[base + i] != kind) {
            fail("lanes of a warp meet in different calls");
        }
    }
    return &block.brought[base];
}

inline void meet_in_block() {
    const long meeting = ++block.threads[block.current].block_meetings;
    ++block.steps;
    for (Thread& other : block.threads) {
        while (other.block_meetings < meeting && !other.done) {
            yield();
        }
    }
}

inline void run_block(void (*entry)(void*), void* argument, unsigned threads) {
    constexpr size_t kStack = 256 << 10;
    block.entry = entry;
    block.argument = argument;
    if (block.threads.size() != threads) {
        block.threads = std::vector<Thread>(threads);
        block.stacks.clear();
        for (unsigned i = 0; i < threads; ++i) {
            block.stacks.emplace_back(new char[kStack]);
        }
        block.brought.assign(threads * 2, 0);
        block.kind.assign(threads * 2, 0);
    }
    for (unsigned i = 0; i < threads; ++i) {
        Thread& thread = block.threads[i];
        thread.done = false;
        thread.warp_meetings = thread.block_meetings = 0;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = block.stacks[i].get();
        thread.context.uc_stack.ss_size = kStack;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, run_thread, 0);
    }
    std::memset(dynamic_shared.data(), 0xCD, dynamic_shared.size());
    for (bool busy = true; busy;) {
        busy = false;
        const long before = block.steps;
        for (unsigned n = 0; n < threads; ++n) {
            const unsigned i = backwards ? threads - 1 - n : n;
            if (!block.threads[i].done) {
                busy = true;
                block.current = i;
                thread_index.x = i;
                swapcontext(&block.scheduler, &block.threads[i].context);
                if (block.error != nullptr) {
                    return;
                }
            }
        }
        if (busy && block.steps == before) {
            block.error = "threads wait for each other";
            return;
        }
    }
}

template <typename T>
std::uint64_t bits(T value) {
    std::uint64_t result = 0;
    std::memcpy(&result, &value, sizeof(value));
    return result;
}

template <typename T>
T value(std::uint64_t bits) {
    T result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
}

inline unsigned lane() {
    return block.current % kWarp;
}

}  // namespace host_cuda

#define threadIdx host_cuda::thread_index
#define blockIdx host_cuda::block_index
#define blockDim host_cuda::block_size
#define gridDim host_cuda::grid_size

inline void __trap() {
    host_cuda::fail("trap");
}
inline void __syncthreads() {
    host_cuda::meet_in_block();
}
inline void __syncwarp(unsigned = 0xFFFFFFFFu) {
    host_cuda::meet_in_warp(1, 0);
}
inline int __ffs(unsigned value) {
    return __builtin_ffs(static_cast<int>(value));
}
inline int __clz(int value) {
    return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value));
}
inline int __popc(unsigned value) {
    return __builtin_popcount(value);
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

template <typename T>
T __shfl_sync(unsigned, T value, int source) {
    return host_cuda::value<T>(host_cuda::meet_in_warp(2, host_cuda::bits(value))[source % host_cuda::kWarp]);
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int distance) {
    return host_cuda::value<T>(host_cuda::meet_in_warp(3, host_cuda::bits(value))[host_cuda::lane() ^ distance]);
}

template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned distance) {
    const std::uint64_t* all = host_cuda::meet_in_warp(4, host_cuda::bits(value));
    return host_cuda::lane() < distance ? value : host_cuda::value<T>(all[host_cuda::lane() - distance]);
}

template <typename T>
T __shfl_down_sync(unsigned, T value, unsigned distance) {
    const std::uint64_t* all = host_cuda::meet_in_warp(5, host_cuda::bits(value));
    const unsigned source = host_cuda::lane() + distance;
    return source >= host_cuda::kWarp ? value : host_cuda::value<T>(all[source]);
}

inline unsigned __ballot_sync(unsigned, bool predicate) {
    const std::uint64_t* all = host_cuda::meet_in_warp(6, predicate);
    unsigned result = 0;
    for (int i = 0; i < host_cuda::kWarp; ++i) {
        result |= static_cast<unsigned>(all[i]) << i;
    }
    return result;
}

inline bool __any_sync(unsigned mask, bool predicate) {
    return __ballot_sync(mask, predicate) != 0;
}
inline bool __all_sync(unsigned mask, bool predicate) {
    return __ballot_sync(mask, predicate) == 0xFFFFFFFFu;
}

template <typename T>
T __reduce_max_sync(unsigned, T value) {
    const std::uint64_t* all = host_cuda::meet_in_warp(7, host_cuda::bits(value));
    T result = host_cuda::value<T>(all[0]);
    for (int i = 1; i < host_cuda::kWarp; ++i) {
        const T other = host_cuda::value<T>(all[i]);
        result = other > result ? other : result;
    }
    return result;
}

template <typename T>
T __reduce_add_sync(unsigned, T value) {
    const std::uint64_t* all = host_cuda::meet_in_warp(8, host_cuda::bits(value));
    T result = 0;
    for (int i = 0; i < host_cuda::kWarp; ++i) {
        result += host_cuda::value<T>(all[i]);
    }
    return result;
}

inline unsigned __match_any_sync(unsigned, unsigned value) {
    const std::uint64_t* all = host_cuda::meet_in_warp(9, value);
    unsigned result = 0;
    for (int i = 0; i < host_cuda::kWarp; ++i) {
        result |= static_cast<unsigned>(all[i] == value) << i;
    }
    return result;
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
    const auto address = reinterpret_cast<std::uintptr_t>(host_cuda::dynamic_shared.data());
    return *reinterpret_cast<T*>((address + 15) / 16 * 16);
}
}  // namespace ds_fp4

// ---- the runtime's calls ----

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0, cudaErrorLaunchFailure = 719;
struct cudaFuncAttributes {};

inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) {
    return cudaSuccess;
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
    return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
inline const char* cudaGetErrorName(cudaError_t) {
    return "cudaErrorLaunchFailure";
}
inline const char* cudaGetErrorString(cudaError_t) {
    return host_cuda::block.error;
}

// Parameters are one struct, passed by value. Its type is not known here, but a larger struct is passed the same way.
struct HostCudaParams {
    char bytes[1024];
};

inline cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 threads, void** arguments,
                                    size_t shared_bytes, cudaStream_t) {
    struct Call {
        void (*function)(HostCudaParams);
        HostCudaParams params;
    } call = {reinterpret_cast<void (*)(HostCudaParams)>(const_cast<void*>(function)), {}};
    std::memcpy(&call.params, arguments[0], sizeof(HostCudaParams));
    gridDim = grid;
    blockDim = threads;
    host_cuda::dynamic_shared.resize(shared_bytes + 16);
    host_cuda::block.error = nullptr;
    for (unsigned i = 0; i < grid.x; ++i) {
        blockIdx = dim3(host_cuda::backwards ? grid.x - 1 - i : i);
        host_cuda::run_block([](void* c) { static_cast<Call*>(c)->function(static_cast<Call*>(c)->params); }, &call,
                             threads.x);
        if (host_cuda::block.error != nullptr) {
            return cudaErrorLaunchFailure;
        }
    }
    return cudaSuccess;
}
