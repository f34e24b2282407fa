// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// How a warp walks over rows, and its loads and stores.
//
// A thread works on units of eight consecutive values. A warp takes tiles: kSteps x 32 units of one row. A thread
// loads its kSteps units of a tile before it uses the first, which keeps enough bytes in flight:
//
//     step 0:  | lane 0: values 0..7     | lane 1: values 8..15    | ... | lane 31: values 248..255 |
//     step 1:  | lane 0: values 256..263 | lane 1: values 264..271 | ...
//
// so that each step is one contiguous access of the warp, an MXFP4 block lies in 4 neighboring lanes and an FP8 group
// in 16. Lanes past the row's end idle. The row is the same for all lanes, so that gathering costs a warp one index
// load a tile.
#pragma once

#include "pairs.cuh"

namespace ds_fp4 {

constexpr int kThreads = 256;
// Blocks a multiprocessor shall hold. With no such bound ptxas saves registers for full occupancy by moving each load
// to its first use, and a warp waits for memory once a step instead of once a tile.
constexpr int kMinBlocks = 4;
constexpr int kLanes = 32;
constexpr int kUnit = 8;
constexpr int kSteps = 4;
constexpr int kStepValues = kLanes * kUnit;
constexpr int kTileValues = kStepValues * kSteps;
constexpr uint32 kAllLanes = 0xFFFFFFFFu;

// Parameters of every row kernel. Every field is 64 bits wide, here and in the kernels' own: the host packs them as
// such. Rows, values a row and strides are below 2^31 (the host sees to it), so that 32-bit arithmetic does; products
// are not.
struct Rows {
    int64 rows;         // output rows
    int64 width;        // values a row, K
    int64 input_rows;   // rows that `index` may name
    const int* index;   // input row of each output row, -1 for a zero row; null: the same row
    int64 tiles_a_row;  // ceil(K / values of a tile): kTileValues, or those of a quad (row_quads.cuh)
};

// The tiles of one warp, by grid strides, and this lane's place in the current one.
struct Tile {
    int row;        // output row
    int input_row;  // -1: zeros
    int first;      // this lane's first value in the row; its unit of step s is s * kStepValues further on
    int left;       // values from there to the row's end

    DS_FP4_DEVICE explicit Tile(const Rows& p) {
        const uint32 warp = blockIdx.x * (kThreads / kLanes) + __shfl_sync(kAllLanes, threadIdx.x / kLanes, 0);
        const uint32 tiles_a_row = static_cast<uint32>(p.tiles_a_row), warps = gridDim.x * (kThreads / kLanes);
        row = static_cast<int>(warp / tiles_a_row);
        number = static_cast<int>(warp % tiles_a_row);
        stride_rows = static_cast<int>(warps / tiles_a_row);
        stride_tiles = static_cast<int>(warps % tiles_a_row);
        place(p);
    }

    // Unsigned, since the last stride may lead beyond 2^31.
    DS_FP4_DEVICE bool inside(const Rows& p) const { return static_cast<uint32>(row) < static_cast<uint32>(p.rows); }

    DS_FP4_DEVICE void advance(const Rows& p) {
        row = static_cast<int>(static_cast<uint32>(row) + static_cast<uint32>(stride_rows));
        number += stride_tiles;
        if (number >= static_cast<int>(p.tiles_a_row)) {
            number -= static_cast<int>(p.tiles_a_row);
            ++row;
        }
        place(p);
    }

    DS_FP4_DEVICE bool has_unit(int step) const { return step * kStepValues < left; }
    DS_FP4_DEVICE bool has_input(int step) const { return has_unit(step) && input_row >= 0; }

    // Values in a unit that exists; fewer than kUnit at the end of a row of FP8.
    DS_FP4_DEVICE int valid(int step) const { return min(left - step * kStepValues, kUnit); }

  private:
    int number;  // of the tile within the row
    int stride_rows, stride_tiles;

    DS_FP4_DEVICE void place(const Rows& p) {
        first = number * kTileValues + static_cast<int>(threadIdx.x) % kLanes * kUnit;
        left = static_cast<int>(p.width) - first;
        input_row = row;
        if (p.index != nullptr && inside(p)) {
            input_row = __ldg(p.index + row);
            if (input_row >= static_cast<int>(p.input_rows)) {
                __trap();  // reading there would be worse than stopping
            }
        }
    }
};

// ---- memory ----

// Row `row` of a matrix whose rows are `stride` bytes apart: one multiply-add.
template <typename Byte>
DS_FP4_DEVICE Byte* row_of(Byte* base, int row, int64 stride) {
    static_assert(sizeof(Byte) == 1, "strides are in bytes");
#if DS_FP4_ARCH
    // In PTX, because the compiler would take apart the sum that `base` is and add it up again for every row.
    Byte* result;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(result) : "r"(row), "r"(static_cast<uint32>(stride)), "l"(base));
    __builtin_assume(__isGlobal(result));
    return result;
#else
    return base + static_cast<unsigned long long>(static_cast<uint32>(row)) * static_cast<uint32>(stride);
#endif
}

// kOrdered: through ordinary loads, which the compiler leaves on their side of a barrier. Others it may move across,
// to where their results are used; then a thread waits for each of them in turn.
template <bool kOrdered, typename T>
DS_FP4_DEVICE T load_one(const T* address) {
    return kOrdered ? *address : __ldg(address);
}

template <bool kOrdered = false, int kCount>
DS_FP4_DEVICE void load_words(const void* address, uint32 (&word)[kCount]) {
    static_assert(kCount == 1 || kCount == 2 || kCount % 4 == 0, "accesses of 4, 8 or 16 bytes");
    if constexpr (kCount == 1) {
        word[0] = load_one<kOrdered>(static_cast<const uint32*>(address));
    } else if constexpr (kCount == 2) {
        const uint2 loaded = load_one<kOrdered>(static_cast<const uint2*>(address));
        word[0] = loaded.x;
        word[1] = loaded.y;
    } else {
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
            const uint4 loaded = load_one<kOrdered>(static_cast<const uint4*>(address) + i);
            word[4 * i] = loaded.x;
            word[4 * i + 1] = loaded.y;
            word[4 * i + 2] = loaded.z;
            word[4 * i + 3] = loaded.w;
        }
    }
}

template <int kCount>
DS_FP4_DEVICE void store_words(void* address, const uint32 (&word)[kCount]) {
    static_assert(kCount == 1 || kCount == 2 || kCount % 4 == 0, "accesses of 4, 8 or 16 bytes");
    if constexpr (kCount == 1) {
        *static_cast<uint32*>(address) = word[0];
    } else if constexpr (kCount == 2) {
        *static_cast<uint2*>(address) = make_uint2(word[0], word[1]);
    } else {
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
            static_cast<uint4*>(address)[i] =
                make_uint4(word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]);
        }
    }
}

// `valid` elements of Element (uint8, uint16 or uint32) one by one; the words' other elements become 0.
template <typename Element, int kCount>
DS_FP4_DEVICE void load_elements(const void* address, int valid, uint32 (&word)[kCount]) {
    constexpr int kBytes = sizeof(Element), kPerWord = 4 / kBytes;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        word[i] = 0;
#pragma unroll
        for (int j = 0; j < kPerWord; ++j) {
            const int element = i * kPerWord + j;
            if (element < valid) {
                word[i] |= static_cast<uint32>(__ldg(static_cast<const Element*>(address) + element))
                           << (8 * kBytes * j);
            }
        }
    }
}

template <typename Element, int kCount>
DS_FP4_DEVICE void store_elements(void* address, int valid, const uint32 (&word)[kCount]) {
    constexpr int kBytes = sizeof(Element), kPerWord = 4 / kBytes;
#pragma unroll
    for (int element = 0; element < kCount * kPerWord; ++element) {
        if (element < valid) {
            const uint32 shifted = word[element / kPerWord] >> (8 * kBytes * (element % kPerWord));
            static_cast<Element*>(address)[element] = static_cast<Element>(shifted);
        }
    }
}

// A unit of `kCount` words that exists: `valid` counts its elements.
template <bool kVector, typename Element, bool kOrdered = false, int kCount>
DS_FP4_DEVICE void load_unit(const void* address, int valid, uint32 (&word)[kCount]) {
    if constexpr (kVector) {
        load_words<kOrdered>(address, word);
    } else {
        load_elements<Element>(address, valid, word);
    }
}

template <bool kVector, typename Element, int kCount>
DS_FP4_DEVICE void store_unit(void* address, int valid, const uint32 (&word)[kCount]) {
    if constexpr (kVector) {
        store_words(address, word);
    } else {
        store_elements<Element>(address, valid, word);
    }
}

// All units of a tile of values; zeros where there is no input.
template <bool kVector, typename T>
DS_FP4_DEVICE void load_values(const char* base, int64 row_stride, const Tile& tile, Values8<T> (&values)[kSteps]) {
    const char* address = row_of(base, tile.input_row, row_stride) + static_cast<int64>(tile.first) * T::kBytes;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < T::kWords; ++i) {
            values[step].word[i] = 0;
        }
        if (tile.has_input(step)) {
            const char* unit = address + step * (kStepValues * T::kBytes);
            load_unit<kVector, typename T::Element>(unit, tile.valid(step), values[step].word);
        }
    }
}

template <bool kVector, typename T>
DS_FP4_DEVICE void store_values(char* base, int64 row_stride, const Tile& tile, int step, const Values8<T>& values) {
    char* address =
        row_of(base, tile.row, row_stride) + static_cast<int64>(tile.first + step * kStepValues) * T::kBytes;
    if (tile.has_unit(step)) {
        store_unit<kVector, typename T::Element>(address, tile.valid(step), values.word);
    }
}

// Largest of `value` over the neighboring lanes that share a block or group. Every lane of the warp must call.
template <int kNeighbors>
DS_FP4_DEVICE uint32 max_over_lanes(uint32 value) {
#pragma unroll
    for (int distance = 1; distance < kNeighbors; distance *= 2) {
        value = larger(value, __shfl_xor_sync(kAllLanes, value, distance));
    }
    return value;
}

}  // namespace ds_fp4
