// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// FP8 scales in memory: FP32 or UE8M0, row by row or as GEMMs read them.
#pragma once

#include "row_tiles.cuh"
#include "shifted_codes.cuh"

namespace ds_fp4 {

// An FP8 scale as it is stored: FP32 or UE8M0.
template <bool kFp32, bool kOrdered = false>
DS_FP4_DEVICE uint32 load_scale(const char* address) {
    if constexpr (kFp32) {
        return load_one<kOrdered>(reinterpret_cast<const uint32*>(address));
    } else {
        return load_one<kOrdered>(reinterpret_cast<const uint8*>(address));
    }
}

// Where FP8 scales go: row by row (groups side by side) or as GEMMs read them (rows side by side), FP32 or UE8M0.
struct Scales {
    char* base;
    int64 row_stride;    // bytes
    int64 group_stride;  // bytes
    int64 bytes;         // 4: FP32, 1: UE8M0
    int64 lowest;        // biased exponent that scales are not to fall below: -22 (FP32), 0 (UE8M0), 1 (FP32, normal)
};

DS_FP4_DEVICE void store_scale(const Scales& p, int row, int group, int exponent) {
    char* address = row_of(row_of(p.base, row, p.row_stride), group, p.group_stride);
    if (p.bytes == 4) {
        *reinterpret_cast<uint32*>(address) = fp32_power_bits(exponent);
    } else {
        *address = static_cast<char>(exponent);
    }
}

}  // namespace ds_fp4
