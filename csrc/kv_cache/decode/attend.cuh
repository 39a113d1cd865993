// The body of decode_attention.cu and decode_attention_e4m3.cu, where it is described: a worker's
// units of one item, and its kernels.

#pragma once

#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mma.cuh"
#include "kv_cache/decode/args.cuh"
#include "kv_cache/decode/merge.cuh"
#include "kv_cache/decode/rows.cuh"
#include "kv_cache/decode/tiles.cuh"
#include "kv_cache/decode/tree.cuh"
#include "kv_cache/decode/work.cuh"

namespace kernel_hub::kv_cache::decode {

// The scales of a tile's tokens, a lane's two of every eight. Those of values are parts of the
// largest so far, in units of which sums.out is: probabilities times the scales themselves would
// leave fp16.
template <typename Config>
struct TileScales {
    float2 keys[Config::kTile / 8], values[Config::kTile / 8];
    float largest = 0.0f, shrink = 1.0f;
    int tile = 0;

    __device__ __forceinline__ TileScales() {
#pragma unroll
        for (int j = 0; j < Config::kTile / 8; ++j) {
            values[j] = make_float2(1.0f, 1.0f);
        }
    }
    __device__ __forceinline__ void read(const float* scales, int lane_idx) {
        const float* const from = scales + 2 * Config::kTile * tile + 2 * (lane_idx & 3);
        float found = largest;
#pragma unroll
        for (int j = 0; j < Config::kTile / 8; ++j) {
            keys[j] = *reinterpret_cast<const float2*>(from + 8 * j);
            values[j] = *reinterpret_cast<const float2*>(from + 8 * j + Config::kTile);
            found = fmaxf(found, fmaxf(values[j].x, values[j].y));
        }
        found = fmaxf(found, __shfl_xor_sync(~0u, found, 1));
        found = fmaxf(found, __shfl_xor_sync(~0u, found, 2));
        // Of values that are 0, or as good as.
        const float inverse = found > 1e-30f ? 1.0f / found : 0.0f;
        shrink = found > largest ? largest * inverse : 1.0f;
        largest = found;
#pragma unroll
        for (int j = 0; j < Config::kTile / 8; ++j) {
            values[j].x *= inverse, values[j].y *= inverse;
        }
        tile = tile + 1 == Config::kScaleTiles ? 0 : tile + 1;
    }
    __device__ __forceinline__ void multiply(
        float (&scores)[Config::kRowTiles][Config::kTile / 8][4]) const {
#pragma unroll
        for (int r = 0; r < Config::kRowTiles; ++r) {
#pragma unroll
            for (int j = 0; j < Config::kTile / 8; ++j) {
                scores[r][j][0] *= keys[j].x, scores[r][j][1] *= keys[j].y;
                scores[r][j][2] *= keys[j].x, scores[r][j][3] *= keys[j].y;
            }
        }
    }
    __device__ __forceinline__ void finish(Accumulator<Config>& sums) const {
#pragma unroll
        for (int r = 0; r < Config::kRowTiles; ++r) {
#pragma unroll
            for (int j = 0; j < Config::kHeadDim / 8; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    sums.out[r][j][e] *= largest;
                }
            }
        }
    }
};

template <typename Config, typename Args>
__device__ __forceinline__ void attend(const Args& args, const Segment& segment,
                                       const Extent& extent, uint8_t* shared) {
    using T = typename Config::T;
    using Cache = typename Config::Cache;
    using P = OperandOf<Config>;
    constexpr int kTile = Config::kTile, kSlots = Config::kSlots, kRowTiles = Config::kRowTiles;
    constexpr int kTilesAhead = kSlots / 2;  // whose keys are under way before the loop
    constexpr bool kOdd = kSlots % 2 != 0;
    const int lane_idx = threadIdx.x & 31, warp_idx = threadIdx.x >> 5;
    uint8_t* queries = shared + Config::kAreaBytes;
    const uint32_t ring = shared_address(shared) + warp_idx * (kSlots * Config::kSlotBytes);

    const int first_token = segment.first_unit * Config::kUnit + warp_idx * kTile;
    const int end_token =
        min((segment.first_unit + segment.num_units) * Config::kUnit, extent.num_tokens);
    const int num_tiles =
        first_token < end_token ? (end_token - first_token + Config::kUnit - 1) / Config::kUnit : 0;

    TileLoader<Config, Args> loader = {args};
    loader.head = lane_idx < 16 ? args.k_cache + segment.kv_head * args.k_cache_head_stride
                                : args.v_cache + segment.kv_head * args.v_cache_head_stride;
    loader.batch_idx = segment.batch_idx;
    loader.token = first_token + (lane_idx & 15);
    loader.end_token = end_token;
    loader.ring = ring;
    loader.slot = 0;
    loader.lane_idx = lane_idx;
    loader.is_outside = false;
    loader.pages = Divisor::of(args.page_size);
    [[maybe_unused]] const float* tile_scales = nullptr;  // of this warp
    if constexpr (Config::kTokenScales) {
        uint8_t* const scales =
            queries + Config::kQueryBytes + Config::kRowScaleBytes + warp_idx * Config::kScaleBytes;
        tile_scales = reinterpret_cast<const float*>(scales);
        loader.scales.ring = shared_address(scales);
        loader.scales.tile = 0;
        loader.scales.head = args.k_scale_cache == nullptr ? nullptr
                             : lane_idx < 16
                                 ? args.k_scale_cache + segment.kv_head * args.k_scale_head_stride
                                 : args.v_scale_cache + segment.kv_head * args.v_scale_head_stride;
    }
    loader.look_up();

    // Start the first tiles, and write queries and new tokens: in this order, so that the copies
    // are under way meanwhile, unless they take what is written.
    const int first_new = max(extent.length - args.seqlen_q, segment.first_unit * Config::kUnit);
    const bool is_short = args.k != nullptr && first_new < end_token &&
                          first_new / Config::kUnit - segment.first_unit < kTilesAhead;
#pragma unroll 1
    for (int phase = 0; phase < 2; ++phase) {
        if ((phase == 0) == is_short) {
            prepare_rows<Config>(args, segment, extent, queries);
            __syncthreads();
        } else {
#pragma unroll 1
            for (int i = 0; i < (kSlots - 1) / 2; ++i) {
                loader.advance();
                loader.template issue<false>();
                loader.template issue<true>();
            }
            if constexpr (!kOdd) {
                loader.advance();
                loader.template issue<false>();
            }
        }
    }

    [[maybe_unused]] float row_scales[2 * kRowTiles];
    if constexpr (Config::kRowScales) {
        const float* const scales = reinterpret_cast<const float*>(queries + Config::kQueryBytes);
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; ++i) {
            row_scales[i] = scales[8 * i + (lane_idx >> 2)];
        }
    }
    uint32_t query_tiles[Config::kQueryInRegisters ? Config::kHeadDim / 16 : 1][4];
    if constexpr (Config::kQueryInRegisters) {
#pragma unroll
        for (int k = 0; k < Config::kHeadDim / 16; ++k) {
            load_query<Config>(shared_address(queries), 0, k, lane_idx, query_tiles[k]);
        }
    }
    auto query = [&](int r, int k, uint32_t (&a)[4]) {
        if constexpr (Config::kQueryInRegisters) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[i] = query_tiles[k][i];
            }
        } else {
            load_query<Config>(shared_address(queries), r, k, lane_idx, a);
        }
    };

    // Keys that a row sees: those of its bits; in a window, from its end - window.
    const int window = args.window_left < 0 ? 1 << 30 : args.window_left + 1;
    const int group = args.num_heads / args.num_kv_heads;
    const int lane_row = segment.row_block * Config::kRows + (lane_idx >> 2);
    const NewTokens new_tokens = {min(extent.length - args.seqlen_q, extent.num_tokens),
                                  extent.num_tokens};
    auto seen_by = [&](int i) {
        const int token = min((lane_row + 8 * i) / group, args.seqlen_q - 1);
        return args.seen_by(segment.batch_idx, token);
    };
    // In a window every tile asks for them. NOTE: head_dim 192 took 1.5 % longer with them kept.
    constexpr bool kKeepsBits = Config::kGeneral && Config::kHeadDim != 192;
    [[maybe_unused]] uint32_t kept_bits[2 * kRowTiles];
    if constexpr (kKeepsBits) {
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; ++i) {
            kept_bits[i] = seen_by(i);
        }
    }
    float slope[2] = {0.0f, 0.0f};
    if (Config::kGeneral && args.alibi_slopes != nullptr) {
        const float* slopes = args.alibi_slopes + segment.batch_idx * args.alibi_batch_stride +
                              segment.kv_head * group;
        slope[0] = __ldg(slopes + lane_row % group);
        slope[1] = __ldg(slopes + (lane_row + 8) % group);
    }
    const float k_scale = args.k_scale == nullptr ? 1.0f : __ldg(args.k_scale + segment.kv_head);
    const float score_scale = args.softmax_scale * k_scale;
    // Otherwise the scores of a tile are only scaled, in the exponential. A scale below 0 would
    // turn their order round there.
    const bool is_general =
        Config::kGeneral && (args.window_left >= 0 || args.softcap > 0.0f ||
                             args.alibi_slopes != nullptr || args.softmax_scale <= 0.0f);
    // A k_scale of 0: what is masked is -inf, and 0 times that is a nan.
    const float scale_log2 = is_general            ? 1.0f
                             : score_scale == 0.0f ? 1e-37f
                                                   : score_scale * kLog2e;

    Accumulator<Config> sums;
    sums.clear();
    std::conditional_t<Config::kTokenScales, TileScales<Config>, NoScales> scales;
    // Of int8: nothing that the compiler could put in each instruction anew.
    const uint32_t kilo = 0x64646464u | static_cast<uint32_t>(args.seqlen_q) >> 31;
    int slot = 0, token0 = first_token;
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile, token0 += Config::kUnit) {
        cp_async_wait<kSlots - 2>();
        __syncwarp();
        if constexpr (kOdd) {
            loader.advance();
            loader.template issue<false>();
        } else {
            loader.template issue<true>();
        }
        float scores[kRowTiles][kTile / 8][4] = {};
        multiply_keys<Config>(query, ring + slot * Config::kSlotBytes, lane_idx, scores, kilo);
        slot = slot + 1 == kSlots ? 0 : slot + 1;
        if constexpr (Config::kRowScales) {
#pragma unroll
            for (int i = 0; i < 2 * kRowTiles; ++i) {
#pragma unroll
                for (int j = 0; j < kTile / 8; ++j) {
                    scores[i / 2][j][2 * (i % 2)] *= row_scales[i];
                    scores[i / 2][j][2 * (i % 2) + 1] *= row_scales[i];
                }
            }
        }
        if constexpr (Config::kTokenScales) {
            if (args.k_scale_cache != nullptr) {
                scales.read(tile_scales, lane_idx);
                scales.multiply(scores);
            }
        }

        if (is_general || token0 + kTile > new_tokens.first) {
            const int column = 2 * (lane_idx & 3), key0 = token0 + column;
            const bool has_tree =
                Config::kGeneral && args.tree_mask != nullptr && token0 + kTile > new_tokens.first;
#pragma unroll
            for (int i = 0; i < 2 * kRowTiles; ++i) {
                const uint32_t bits = kKeepsBits ? kept_bits[i] : seen_by(i);
                const uint32_t seen = new_tokens.seen_from(bits, token0) >> column;
                const int end = new_tokens.end_of(bits);
                int distances[kTile / 8][2];
#pragma unroll
                for (int j = 0; j < kTile / 8; ++j) {
                    distances[j][0] = end - 1 - (key0 + 8 * j);
                    distances[j][1] = distances[j][0] - 1;
                }
                if (has_tree) {
#pragma unroll
                    for (int j = 0; j < kTile / 8; ++j) {
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int n = key0 + 8 * j + e - new_tokens.first;
                            if (n >= 0) {
                                distances[j][e] = new_tokens.distance_to(n, bits);
                            }
                        }
                    }
                }
#pragma unroll
                for (int j = 0; j < kTile / 8; ++j) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& score = scores[i / 2][j][2 * (i % 2) + e];
                        const int distance = distances[j][e];
                        if (is_general) {
                            score = capped(score * score_scale, args.softcap) -
                                    slope[i % 2] * static_cast<float>(distance);
                            score = distance < window ? score * kLog2e : -INFINITY;
                        }
                        score = seen >> (8 * j + e) & 1 ? score : -INFINITY;
                    }
                }
            }
        }

        // One step of the running softmax. Sums of bytes are left alone where no maximum grows:
        // their kernels compute as long as they read.
        float shrinks[2 * kRowTiles];
        bool has_grown = false;
        uint32_t probabilities[kRowTiles][kTile / 16][4];
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; ++i) {
            const int r = i / 2, h = i % 2;
            float largest = sums.row_max[i];
#pragma unroll
            for (int j = 0; j < kTile / 8; ++j) {
                largest = fmaxf(largest, fmaxf(scores[r][j][2 * h], scores[r][j][2 * h + 1]));
            }
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            const float base = largest == -INFINITY ? 0.0f : largest * scale_log2;
            shrinks[i] = exp2_approx(sums.row_max[i] * scale_log2 - base);
            if constexpr (Config::kQuantised) {
                const bool is_larger = largest > sums.row_max[i];
                shrinks[i] = is_larger ? shrinks[i] : 1.0f;
                has_grown |= is_larger;
            }
            sums.row_max[i] = largest;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < kTile / 8; ++j) {
                float low = exp2_approx(scores[r][j][2 * h] * scale_log2 - base);
                float high = exp2_approx(scores[r][j][2 * h + 1] * scale_log2 - base);
                sum += low + high;
                if constexpr (Config::kTokenScales) {
                    low *= scales.values[j].x, high *= scales.values[j].y;
                }
                probabilities[r][j / 2][2 * (j % 2) + h] = pack2<P>(low, high);
            }
            sums.row_sum[i] = sums.row_sum[i] * shrinks[i] + sum;
            if constexpr (Config::kTokenScales) {
                shrinks[i] *= scales.shrink;
                has_grown |= scales.shrink != 1.0f;
            }
            if constexpr (!Config::kQuantised) {
                sums.shrink(i, shrinks[i]);
            }
        }
        if (Config::kQuantised && __any_sync(~0u, has_grown)) {
#pragma unroll
            for (int i = 0; i < 2 * kRowTiles; ++i) {
                sums.shrink(i, shrinks[i]);
            }
        }

        cp_async_wait<kSlots - 2>();
        __syncwarp();
        if constexpr (kOdd) {
            loader.template issue<true>();
        } else {
            loader.advance();
            loader.template issue<false>();
        }
        multiply_values<Config, P>(probabilities, ring + slot * Config::kSlotBytes, lane_idx, sums,
                                   kilo);
        slot = slot + 1 == kSlots ? 0 : slot + 1;
    }
    if constexpr (Config::kTokenScales) {
        if (args.k_scale_cache != nullptr) {
            scales.finish(sums);
        }
    }
    cp_async_wait<0>();
    report_if(args.flag, loader.is_outside, kPagesOutside);
    __syncthreads();
    write_segment<Config>(args, segment, sums, scale_log2, reinterpret_cast<float*>(shared));
}

template <typename Config, typename Args>
__device__ __forceinline__ void decode_attention(const Args& args) {
    for_segment<Config>(args, [&](const Segment& segment, const Extent& extent) {
        attend<Config>(args, segment, extent, dynamic_shared());
    });
}

#define EXPORT_DECODE_ATTENTION(DTYPE, T, CACHE, HEAD_DIM, FLAGS, TILE, SLOTS, ROW_TILES,     \
                                MIN_BLOCKS)                                                   \
    DESCRIBED(                                                                                \
        decode_attention_##DTYPE##_hdim##HEAD_DIM##FLAGS,                                     \
        "x: parts of (sequence, kv head, block_m rows) as num_splits and parallel cut them",  \
        (facts_of<DecodeConfig<T, CACHE, HEAD_DIM, TILE, SLOTS, ROW_TILES>>(MIN_BLOCKS)),     \
        extern "C" __global__ void                                                            \
        __launch_bounds__(128, MIN_BLOCKS) decode_attention_##DTYPE##_hdim##HEAD_DIM##FLAGS(  \
            DECODE_PARAMS(T, CACHE)) {                                                        \
            const DecodeArgs<T, CACHE> args = {DECODE_ARGUMENTS};                             \
            decode_attention<DecodeConfig<T, CACHE, HEAD_DIM, TILE, SLOTS, ROW_TILES>>(args); \
        })

// The same of caches whose scales may be a token's, of 16 rows a block.
#define EXPORT_SCALED_DECODE(DTYPE, T, CACHE, HEAD_DIM, FLAGS, TILE, SLOTS)                  \
    DESCRIBED(                                                                               \
        decode_attention_##DTYPE##_hdim##HEAD_DIM##FLAGS,                                    \
        "x: parts of (sequence, kv head, block_m rows) as num_splits and parallel cut them", \
        (facts_of<DecodeConfig<T, CACHE, HEAD_DIM, TILE, SLOTS, 1, true>>(2)),               \
        extern "C" __global__ void                                                           \
        __launch_bounds__(128, 2) decode_attention_##DTYPE##_hdim##HEAD_DIM##FLAGS(          \
            DECODE_PARAMS(T, CACHE), SCALED_PARAMS) {                                        \
            const ScaledArgs<T, CACHE> args = {{DECODE_ARGUMENTS}, SCALED_ARGUMENTS};        \
            decode_attention<DecodeConfig<T, CACHE, HEAD_DIM, TILE, SLOTS, 1, true>>(args);  \
        })

}  // namespace kernel_hub::kv_cache::decode
