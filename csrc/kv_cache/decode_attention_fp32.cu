// Attention of 1 to 16 new tokens a sequence over a key/value cache of fp32.
//
// What decode_attention.cu computes, cut, merged and launched as there; in parts of tf32
// (three_products.cuh), their sums kept outside the tensor cores. Shared memory: for each warp a
// ring of kSlots slots of 8 rows; the queries, the high parts of all and then the low ones. One
// kernel: 16 rows a block, head_dim up to 128 (columns that are not there are not multiplied).
// inf among queries, keys and values gives nan, as it has no parts.
// kernel_hub: not-for: sm89: memory bounds it, and 8.9 has no instructions of its own for it

#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kv_cache/decode/args.cuh"
#include "kv_cache/decode/fp32.cuh"
#include "kv_cache/decode/merge.cuh"
#include "kv_cache/decode/tree.cuh"

namespace kernel_hub::kv_cache::decode {

template <typename Config, typename Args>
__device__ __forceinline__ void attend_fp32(const Args& args, const Segment& segment,
                                            const Extent& extent, uint8_t* shared) {
    constexpr int kTile = Config::kTile, kSlots = Config::kSlots;
    constexpr int kTilesAhead = kSlots / 2;  // whose keys are under way before the loop
    static_assert(kSlots % 2 != 0, "keys are fetched after keys were waited for");
    const int lane_idx = threadIdx.x & 31, warp_idx = threadIdx.x >> 5;
    uint8_t* queries = shared + Config::kAreaBytes;
    uint8_t* ring = shared + warp_idx * (kSlots * Config::kSlotBytes);

    const int first_token = segment.first_unit * Config::kUnit + warp_idx * kTile;
    const int end_token =
        min((segment.first_unit + segment.num_units) * Config::kUnit, extent.num_tokens);
    const int num_tiles =
        first_token < end_token ? (end_token - first_token + Config::kUnit - 1) / Config::kUnit : 0;

    TileLoaderFp32<Config, Args> loader = {args};
    loader.head = lane_idx < kTile ? args.k_cache + segment.kv_head * args.k_cache_head_stride
                                   : args.v_cache + segment.kv_head * args.v_cache_head_stride;
    loader.batch_idx = segment.batch_idx;
    loader.token = first_token + lane_idx % kTile;
    loader.end_token = end_token;
    loader.ring = shared_address(ring);
    loader.slot = 0;
    loader.lane_idx = lane_idx;
    loader.is_outside = false;
    loader.look_up();

    // Start the first tiles, and write queries and new tokens: in this order, so that the copies
    // are under way meanwhile, unless they take what is written.
    const int first_new = max(extent.length - args.seqlen_q, segment.first_unit * Config::kUnit);
    const bool is_short = args.k != nullptr && first_new < end_token &&
                          first_new / Config::kUnit - segment.first_unit < kTilesAhead;
#pragma unroll 1
    for (int phase = 0; phase < 2; ++phase) {
        if ((phase == 0) == is_short) {
            prepare_rows_fp32<Config>(args, segment, extent, queries);
            __syncthreads();
        } else {
#pragma unroll 1
            for (int i = 0; i < kTilesAhead; ++i) {
                loader.advance();
                loader.template issue<false>();
                loader.template issue<true>();
            }
        }
    }

    // Keys that a row sees: those of its bits; in a window, from its end - window.
    const int window = args.window_left < 0 ? 1 << 30 : args.window_left + 1;
    const int group = args.num_heads / args.num_kv_heads;
    const NewTokens new_tokens = {min(extent.length - args.seqlen_q, extent.num_tokens),
                                  extent.num_tokens};
    uint32_t bits[2];
    float slope[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = segment.row_block * Config::kRows + (lane_idx >> 2) + 8 * i;
        const int token = min(row / group, args.seqlen_q - 1);
        bits[i] = args.seen_by(segment.batch_idx, token);
        if (args.alibi_slopes != nullptr) {
            slope[i] = __ldg(args.alibi_slopes + segment.batch_idx * args.alibi_batch_stride +
                             segment.kv_head * group + row % group);
        }
    }
    // Otherwise the scores of a tile are only scaled, in the exponential. A scale below 0 would
    // turn their order round there.
    const bool is_general = args.window_left >= 0 || args.softcap > 0.0f ||
                            args.alibi_slopes != nullptr || args.softmax_scale <= 0.0f;
    const float scale_log2 = is_general ? 1.0f : args.softmax_scale * kLog2e;

    Accumulator<Config> sums;
    sums.clear();
    int slot = 0, token0 = first_token;
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile, token0 += Config::kUnit) {
        cp_async_wait<kSlots - 2>();
        __syncwarp();
        loader.advance();
        loader.template issue<false>();
        float scores[4] = {};
        multiply_keys_fp32<Config>(shared_address(queries),
                                   shared_address(ring) + slot * Config::kSlotBytes, args.head_dim,
                                   lane_idx, scores);
        slot = slot + 1 == kSlots ? 0 : slot + 1;

        if (is_general || token0 + kTile > new_tokens.first) {
            const bool has_tree = args.tree_mask != nullptr && token0 + kTile > new_tokens.first;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int column = 2 * (lane_idx & 3) + e % 2, key = token0 + column;
                const uint32_t seen = new_tokens.seen_from(bits[e / 2], token0) >> column;
                int distance = new_tokens.end_of(bits[e / 2]) - 1 - key;
                if (has_tree && key >= new_tokens.first) {
                    distance = new_tokens.distance_to(key - new_tokens.first, bits[e / 2]);
                }
                if (is_general) {
                    const float score = capped(scores[e] * args.softmax_scale, args.softcap) -
                                        slope[e / 2] * static_cast<float>(distance);
                    scores[e] = distance < window ? score * kLog2e : -INFINITY;
                }
                scores[e] = seen & 1 ? scores[e] : -INFINITY;
            }
        }

        // One step of the running softmax.
        uint32_t words[4];
        float shrink[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float largest = fmaxf(sums.row_max[i], fmaxf(scores[2 * i], scores[2 * i + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            const float base = largest == -INFINITY ? 0.0f : __fmul_rn(largest, scale_log2);
            // Rounded as the base was: of a maximum that stays it is 1, tile after tile.
            shrink[i] = exp2_approx(__fmul_rn(sums.row_max[i], scale_log2) - base);
            sums.row_max[i] = largest;
            const float low = exp2_approx(scores[2 * i] * scale_log2 - base);
            const float high = exp2_approx(scores[2 * i + 1] * scale_log2 - base);
            sums.row_sum[i] = sums.row_sum[i] * shrink[i] + (low + high);
            words[i] = __float_as_uint(low);
            words[i + 2] = __float_as_uint(high);
        }
        Parts<4> weights;
        weights.split(words);

        cp_async_wait<kSlots - 2>();
        __syncwarp();
        loader.template issue<true>();
        multiply_values_fp32<Config>(weights, shrink, ring + slot * Config::kSlotBytes,
                                     args.head_dim, lane_idx, sums);
        slot = slot + 1 == kSlots ? 0 : slot + 1;
    }
    cp_async_wait<0>();
    report_if(args.flag, loader.is_outside, kPagesOutside);
    __syncthreads();
    write_segment<Config>(args, segment, sums, scale_log2, reinterpret_cast<float*>(shared));
}

template <typename Config, typename Args>
__device__ __forceinline__ void decode_attention_fp32(const Args& args) {
    for_segment<Config>(args, [&](const Segment& segment, const Extent& extent) {
        attend_fp32<Config>(args, segment, extent, dynamic_shared());
    });
}

#define EXPORT_DECODE_ATTENTION_FP32(NAME, CONFIG, MIN_BLOCKS)                                     \
    DESCRIBED(                                                                                     \
        NAME, "x: parts of (sequence, kv head, block_m rows) as num_splits and parallel cut them", \
        (facts_of<CONFIG>(MIN_BLOCKS)),                                                            \
        extern "C" __global__ void                                                                 \
        __launch_bounds__(128, MIN_BLOCKS) NAME(DECODE_PARAMS(float, float)) {                     \
            const DecodeArgs<float, float> args = {DECODE_ARGUMENTS};                              \
            decode_attention_fp32<CONFIG>(args);                                                   \
        })

EXPORT_DECODE_ATTENTION_FP32(decode_attention_fp32_hdim128, Fp32Config, 2)
EXPORT_DECODE_MERGE(fp32, float)

}  // namespace kernel_hub::kv_cache::decode
