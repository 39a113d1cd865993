// The figures of a decode kernel, and its products of tiles: queries x keys, probabilities x
// values.
#pragma once

#include "kernel_hub/bounds.cuh"
#include "kernel_hub/divisor.cuh"
#include "kernel_hub/e4m3.cuh"
#include "kernel_hub/int8.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/narrow_copy.cuh"

namespace kernel_hub::kv_cache::decode {

template <typename T_, typename Cache_, int kHeadDim_, int kTile_, int kSlots_, int kRowTiles_,
          bool kTokenScales_ = false>
struct DecodeConfig {
    using T = T_;
    using Cache = Cache_;
    static constexpr int kHeadDim = kHeadDim_, kTile = kTile_, kSlots = kSlots_;
    static constexpr int kRowTiles = kRowTiles_;
    static constexpr bool kQuantised = sizeof(Cache) == 1;
    // Whether there may be a scale a token: those of the keys, then of the values, of each tile
    // that is under way.
    static constexpr bool kTokenScales = kTokenScales_;
    static constexpr int kScaleTiles = (kSlots + 1) / 2;
    // Whether window, softcap and alibi are known here.
    static constexpr bool kGeneral = kRowTiles == 1;
    static constexpr int kWarps = 4, kThreads = 32 * kWarps, kUnit = kWarps * kTile;
    static constexpr int kRows = 16 * kRowTiles;
    static constexpr int kRowBytes = kHeadDim * sizeof(Cache), kChunks = kRowBytes / 16;
    static constexpr int kSlotBytes = kTile * kRowBytes;
    static constexpr int kRingBytes = kWarps * kSlots * kSlotBytes;
    // + 8: the eight rows of an accumulator fall on different banks.
    static constexpr int kMergeStride = kHeadDim + 8;
    static constexpr int kMergeBytes = kWarps * kRows * (kMergeStride + 2) * 4;
    static constexpr int kAreaBytes = kRingBytes > kMergeBytes ? kRingBytes : kMergeBytes;
    static constexpr int kQueryChunks = kHeadDim / 8;
    static constexpr int kQueryBytes = kRows * kHeadDim * 2;
    static constexpr int kScaleBytes = kTokenScales ? kScaleTiles * 2 * kTile * 4 : 0;  // of a warp
    // Of bytes queries are fp16, which of bf16 are scaled by rows (rows.cuh).
    static constexpr bool kRowScales = kQuantised && std::is_same_v<T, __nv_bfloat16>;
    static constexpr int kRowScaleBytes = kQuantised ? kRows * 4 : 0;  // as many of either dtype
    static constexpr int kSharedBytes =
        kAreaBytes + kQueryBytes + kRowScaleBytes + kWarps * kScaleBytes;
    static constexpr bool kQueryInRegisters = kRowTiles == 1 && kHeadDim <= 128;
    static_assert(kTile % 16 == 0, "the tokens of a tile are the k side of m16n8k16");
    static_assert(!kTokenScales || kSlots % 2 != 0,
                  "keys and scales of a tile are asked for as one");
    static_assert(kHeadDim % 64 == 0, "the swizzles cover rows of 64 bytes and more");
    static_assert(kSharedBytes <= (kHeadDim == 256 && kSlots == 3 ? 113 : 99) << 10,
                  "a block of sm_89 has 99 KiB of shared memory, each of two of sm_90 113");
};

template <typename C>
constexpr LaunchFacts facts_of(int blocks_per_sm) {
    return {.threads = C::kThreads,
            .shared_bytes = C::kSharedBytes,
            .blocks_per_sm = blocks_per_sm,
            .head_dim = C::kHeadDim,
            .element_bytes = C::kRowBytes / C::kHeadDim,
            .block_m = C::kRows,
            .block_n = C::kTile,
            .warps = C::kWarps,
            .slots = C::kSlots};
}

// Byte offset of a 16-byte chunk in rows of kChunks: eight rows of one column, which ldmatrix reads
// together, fall on different banks.
template <int kChunks>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
    static_assert(kChunks % 2 == 0, "chunks change places within a row");
    const int mask = kChunks % 8 == 0   ? row & 7
                     : kChunks % 4 == 0 ? (row >> 1) & 3
                                        : (row >> 2) & 1;
    return static_cast<uint32_t>(row * kChunks + (chunk ^ mask)) * 16;
}

// softcap tanh(score / softcap).
__device__ __forceinline__ float capped(float score, float softcap) {
    if (softcap > 0.0f) {
        const float twice = exp2_approx(score * __fdividef(2.0f * kLog2e, softcap));
        score = softcap - __fdividef(2.0f * softcap, 1.0f + twice);
    }
    return score;
}

// The running softmax of a warp: row lane / 4 + 8 h of row tile r has its maximum in
// row_max[2r + h] and this lane's part of the sum in row_sum[2r + h].
template <typename Config>
struct Accumulator {
    float out[Config::kRowTiles][Config::kHeadDim / 8][4];
    float row_max[2 * Config::kRowTiles], row_sum[2 * Config::kRowTiles];

    // Of row i of a lane.
    __device__ __forceinline__ void shrink(int i, float factor) {
#pragma unroll
        for (int j = 0; j < Config::kHeadDim / 8; ++j) {
            out[i / 2][j][2 * (i % 2)] *= factor;
            out[i / 2][j][2 * (i % 2) + 1] *= factor;
        }
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 2 * Config::kRowTiles; ++i) {
            row_max[i] = -INFINITY;
            row_sum[i] = 0.0f;
        }
#pragma unroll
        for (int r = 0; r < Config::kRowTiles; ++r) {
#pragma unroll
            for (int j = 0; j < Config::kHeadDim / 8; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    out[r][j][e] = 0.0f;
                }
            }
        }
    }
};

// The A fragment of row tile `r`, columns 16 k .. 16 k + 15.
template <typename Config>
__device__ __forceinline__ void load_query(uint32_t queries, int r, int k, int lane_idx,
                                           uint32_t (&a)[4]) {
    ldmatrix_x4(a, queries + swizzled<Config::kQueryChunks>(16 * r + (lane_idx & 15),
                                                            2 * k + (lane_idx >> 4)));
}

// What the tensor cores multiply: bytes become fp16 in fewer instructions than bf16.
template <typename Config>
using OperandOf = std::conditional_t<Config::kQuantised, __half, typename Config::T>;

// Two bytes of a word of a cache as two of fp16. Exact.
template <typename Cache, int kFirst, int kSecond>
__device__ __forceinline__ uint32_t bytes_to_half2(uint32_t word, uint32_t kilo) {
    if constexpr (std::is_same_v<Cache, int8_t>) {
        return int8x2_to_half2<kFirst, kSecond>(word, kilo);
    } else if constexpr (kSecond == kFirst + 1) {
        uint16_t halves[2];
        memcpy(halves, &word, sizeof(word));
        return e4m3x2_to_half2(halves[kFirst / 2]);
    } else {
        return e4m3x2_to_half2(__byte_perm(word, 0, 0x4400 | kSecond << 4 | kFirst));
    }
}

// scores = queries x keys of a slot.
template <typename Config, typename Queries>
__device__ __forceinline__ void multiply_keys(
    Queries&& query, uint32_t slot, int lane_idx,
    float (&scores)[Config::kRowTiles][Config::kTile / 8][4], uint32_t kilo = 0) {
    using T = OperandOf<Config>;
    constexpr int kColumns = Config::kQuantised ? 32 : 16;  // of two chunks
#pragma unroll
    for (int k = 0; k < Config::kHeadDim / kColumns; ++k) {
#pragma unroll
        for (int group = 0; group < Config::kTile / 16; ++group) {
            uint32_t keys[4];
            ldmatrix_x4(keys, slot + swizzled<Config::kChunks>(
                                         16 * group + (lane_idx & 7) + ((lane_idx >> 4) << 3),
                                         2 * k + ((lane_idx >> 3) & 1)));
            if constexpr (Config::kQuantised) {
                using Cache = typename Config::Cache;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    // keys[i]: tokens 8 (i / 2) .., columns 16 (2k + i % 2) + 4 (lane % 4) ..
                    const uint32_t low = bytes_to_half2<Cache, 0, 1>(keys[i], kilo);
                    const uint32_t high = bytes_to_half2<Cache, 2, 3>(keys[i], kilo);
#pragma unroll
                    for (int r = 0; r < Config::kRowTiles; ++r) {
                        uint32_t a[4];
                        query(r, 2 * k + i % 2, a);
                        mma_m16n8k16<T>(scores[r][2 * group + i / 2], a, low, high);
                    }
                }
            } else {
#pragma unroll
                for (int r = 0; r < Config::kRowTiles; ++r) {
                    uint32_t a[4];
                    query(r, k, a);
                    mma_m16n8k16<T>(scores[r][2 * group], a, keys[0], keys[1]);
                    mma_m16n8k16<T>(scores[r][2 * group + 1], a, keys[2], keys[3]);
                }
            }
        }
    }
}

// out += probabilities x values of a slot. For bytes, out[2c], out[2c + 1] are the even and the odd
// columns of chunk c.
template <typename Config, typename P>
__device__ __forceinline__ void multiply_values(
    const uint32_t (&probabilities)[Config::kRowTiles][Config::kTile / 16][4], uint32_t slot,
    int lane_idx, Accumulator<Config>& sums, uint32_t kilo = 0) {
#pragma unroll
    for (int group = 0; group < Config::kTile / 16; ++group) {
#pragma unroll
        for (int c = 0; c < Config::kChunks; c += 2) {
            uint32_t values[4];
            ldmatrix_x4_trans(values, slot + swizzled<Config::kChunks>(16 * group + (lane_idx & 15),
                                                                       c + (lane_idx >> 4)));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t low = values[2 * i], high = values[2 * i + 1];
#pragma unroll
                for (int r = 0; r < Config::kRowTiles; ++r) {
                    if constexpr (Config::kQuantised) {
                        using Cache = typename Config::Cache;
                        float (&even)[4] = sums.out[r][2 * (c + i)];
                        float (&odd)[4] = sums.out[r][2 * (c + i) + 1];
                        mma_m16n8k16<P>(even, probabilities[r][group],
                                        bytes_to_half2<Cache, 0, 2>(low, kilo),
                                        bytes_to_half2<Cache, 0, 2>(high, kilo));
                        mma_m16n8k16<P>(odd, probabilities[r][group],
                                        bytes_to_half2<Cache, 1, 3>(low, kilo),
                                        bytes_to_half2<Cache, 1, 3>(high, kilo));
                    } else {
                        mma_m16n8k16<P>(sums.out[r][c + i], probabilities[r][group], low, high);
                    }
                }
            }
        }
    }
}

// Starts the copy of 16 bytes of a row that is read once. Rows of up to kRowBytes may begin or end
// within a line: those of head_dim 80, 96 and 224.
template <int kRowBytes>
__device__ __forceinline__ void copy_of_row(uint32_t target, const void* source, bool is_inside) {
    if constexpr (kRowBytes > 128) {
        cp_async_16_narrow(target, source, is_inside, read_once_policy());
    } else {
        cp_async_16(target, source, is_inside, read_once_policy());
    }
}

// The same of the scales of a tile's rows: null where there are none; and where they go.
template <int kRows>
struct ScaleLoader {
    const float* head;
    const float* row[kRows];
    uint32_t ring;
    int tile;
};
struct NoScales {};

// Fills the ring of one warp, keys and values in turn, a tile ahead of the page table. Lanes 0 ..
// 15 know where the rows of keys lie, the others those of values.
template <typename Config, typename Args>
struct TileLoader {
    using Cache = typename Config::Cache;
    const Args& args;
    const Cache* head;
    int batch_idx;
    int token, end_token;  // of this lane's row in the next tile; where the segment ends
    int next_page[Config::kTile / 16];
    const Cache* row[Config::kTile / 16];  // this lane's; null: no such row
    uint32_t ring;
    int slot, lane_idx;
    Divisor pages;    // of bytes alone
    bool is_outside;  // some page so far
    std::conditional_t<Config::kTokenScales, ScaleLoader<Config::kTile / 16>, NoScales> scales;

    // Divisions are a tenth of what the kernels of bytes do.
    __device__ __forceinline__ int page_of(int at) const {
        return Config::kQuantised ? pages.quotient(at) : at / args.page_size;
    }
    __device__ __forceinline__ int place_in_page(int at) const {
        return Config::kQuantised ? pages.remainder(at) : at % args.page_size;
    }

    // Look up the pages of the tile that starts at this lane's token.
    __device__ __forceinline__ void look_up() {
#pragma unroll
        for (int i = 0; i < Config::kTile / 16; ++i) {
            const int at = token + 16 * i;
            next_page[i] = batch_idx;
            if (args.block_table != nullptr && at < end_token) {
                next_page[i] =
                    __ldg(args.block_table + batch_idx * args.block_table_stride + page_of(at));
            }
        }
    }

    // Go on to the next tile, whose pages have been looked up. Rows of pages that are not there
    // become zeros.
    __device__ __forceinline__ void advance() {
        const bool is_key = lane_idx < 16;
        const int64_t page_stride = is_key ? args.k_cache_page_stride : args.v_cache_page_stride;
        const int64_t token_stride = is_key ? args.k_cache_token_stride : args.v_cache_token_stride;
#pragma unroll
        for (int i = 0; i < Config::kTile / 16; ++i) {
            const int at = token + 16 * i;
            const int in_page = args.block_table == nullptr ? at : place_in_page(at);
            const bool is_there = is_index(next_page[i], args.num_pages);
            is_outside |= at < end_token && !is_there;
            row[i] = at < end_token && is_there
                         ? head + next_page[i] * page_stride + in_page * token_stride
                         : nullptr;
            if constexpr (Config::kTokenScales) {
                if (scales.head != nullptr) {
                    const int64_t offset =
                        next_page[i] *
                            (is_key ? args.k_scale_page_stride : args.v_scale_page_stride) +
                        in_page * (is_key ? args.k_scale_token_stride : args.v_scale_token_stride);
                    scales.row[i] = row[i] != nullptr ? scales.head + offset : nullptr;
                }
            }
        }
        token += Config::kUnit;
        look_up();
    }

    // Start the copies of this tile's keys (or values) into the next slot.
    template <bool kValues>
    __device__ __forceinline__ void issue() {
        // Lanes go on where those before end: with 24 chunks every third time at a row's first.
        constexpr int kChunks = Config::kChunks;
        constexpr int kTimes = kChunks % 3 == 0 ? 3 : 1, kRowsAtOnce = 32 * kTimes / kChunks;
        const int num_chunks = args.head_dim * static_cast<int>(sizeof(Cache)) / 16;
        const uint32_t target = ring + slot * Config::kSlotBytes;
#pragma unroll
        for (int n = 0; n < Config::kTile * kChunks / 32; ++n) {
            const int i = n / kTimes * kRowsAtOnce, flat = n % kTimes * 32 + lane_idx;
            const int chunk = flat % kChunks, first_row = flat / kChunks;
            const int from = (i + first_row) % 16 + (kValues ? 16 : 0);
            const uint64_t source = __shfl_sync(~0u, reinterpret_cast<uint64_t>(row[i / 16]), from);
            const uint32_t place = target + swizzled<kChunks>(i + first_row, chunk);
            const void* const bytes = reinterpret_cast<const void*>(source + chunk * 16);
            const bool is_inside = source != 0 && chunk < num_chunks;
            copy_of_row<Config::kRowBytes>(place, bytes, is_inside);
        }
        // Keys first: their group has the scales of both.
        if constexpr (Config::kTokenScales && !kValues) {
            if (scales.head != nullptr) {
                const int kind = lane_idx < 16 ? 0 : Config::kTile;
#pragma unroll
                for (int i = 0; i < Config::kTile / 16; ++i) {
                    const int at =
                        2 * Config::kTile * scales.tile + kind + 16 * i + (lane_idx & 15);
                    cp_async_4(scales.ring + 4 * at, scales.row[i], scales.row[i] != nullptr);
                }
            }
            scales.tile = scales.tile + 1 == Config::kScaleTiles ? 0 : scales.tile + 1;
        }
        cp_async_commit();
        slot = slot + 1 == Config::kSlots ? 0 : slot + 1;
    }
};

}  // namespace kernel_hub::kv_cache::decode
