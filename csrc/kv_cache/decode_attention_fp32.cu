// Attention of 1 to 16 new tokens a sequence over a key/value cache of fp32.
//
// What decode_attention.cu computes, cut, merged and launched as there; in parts of tf32
// (three_products.cuh), their sums kept outside the tensor cores. Shared memory: for each warp a
// ring of kSlots slots of 8 rows; the queries, the high parts of all and then the low ones. One
// kernel: 16 rows a block, head_dim up to 128 (columns that are not there are not multiplied).
// inf among queries, keys and values gives nan, as it has no parts.

#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kv_cache/decode/args.cuh"
#include "kv_cache/decode/fp32.cuh"
#include "kv_cache/decode/merge.cuh"

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

    // Keys that a row sees: those below its end; in a window, from its end - window.
    const int window = args.window_left < 0 ? 1 << 30 : args.window_left + 1;
    const int group = args.num_heads / args.num_kv_heads;
    int end[2];
    float slope[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = segment.row_block * Config::kRows + (lane_idx >> 2) + 8 * i;
        const int token = min(row / group, args.seqlen_q - 1);
        end[i] = min(extent.length - args.seqlen_q + token + 1, extent.num_tokens);
        if (args.alibi_slopes != nullptr) {
            slope[i] = __ldg(args.alibi_slopes + segment.batch_idx * args.alibi_batch_stride +
                             segment.kv_head * group + row % group);
        }
    }
    const int common_end = min(extent.length - args.seqlen_q + 1, extent.num_tokens);
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

        if (is_general || token0 + kTile > common_end) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int distance = end[e / 2] - 1 - (token0 + 2 * (lane_idx & 3) + e % 2);
                if (is_general) {
                    const float score = capped(scores[e] * args.softmax_scale, args.softcap) -
                                        slope[e / 2] * static_cast<float>(distance);
                    scores[e] = distance < window ? score * kLog2e : -INFINITY;
                }
                scores[e] = distance >= 0 ? scores[e] : -INFINITY;
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
            const float base = largest == -INFINITY ? 0.0f : largest * scale_log2;
            shrink[i] = exp2_approx(sums.row_max[i] * scale_log2 - base);
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
    // NOTE: in this order: what may start next reads cache_seqlens before it waits.
    wait_for_launch_before();
    allow_next_launch();
    uint8_t* shared = dynamic_shared();
    const Work work = args.template work<Config>();
    const Place place = find_place<false>(work, blockIdx.x);
    if (place.batch_idx < 0) {
        return;
    }
    const int row_blocks = (args.rows() + Config::kRows - 1) / Config::kRows;
    const Extent extent = work.extent_of(place.batch_idx);
    const bool has_no_angle = args.cos != nullptr && extent.length > args.max_position;
    report_if(args.flag, (extent.is_outside || has_no_angle) && threadIdx.x == 0, kLengthsOutside);
    const int count = extent.num_units / place.num_splits;
    const int rest = extent.num_units % place.num_splits;
    Segment segment;
    segment.batch_idx = place.batch_idx;
    segment.kv_head = place.item / row_blocks;
    segment.row_block = place.item % row_blocks;
    segment.first_unit = extent.first_unit + place.split * count + min(place.split, rest);
    segment.num_units = count + (place.split < rest ? 1 : 0);
    segment.is_whole = place.num_splits == 1;
    attend_fp32<Config>(args, segment, extent, shared);
}

// clang-format off: it would give each of the parameters a line.
#define EXPORT_DECODE_ATTENTION_FP32(NAME, CONFIG, MIN_BLOCKS)                                     \
    DESCRIBED(NAME,                                                                                \
    "x: parts of (sequence, kv head, block_m rows) as num_splits and parallel cut them",           \
    (facts_of<CONFIG>(MIN_BLOCKS)),                                                                \
    extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS) NAME(                            \
        float* out, float* lse, float* partial_out, float* partial_lse, int* flag,                 \
        float* k_cache, float* v_cache, const float* q, const float* k, const float* v,            \
        const int* cache_seqlens, const int* block_table, const void* cos, const void* sin,        \
        const float* qkv_bias, const float* k_scale, const float* v_scale,                         \
        const float* alibi_slopes, const void* sinks, int64_t out_batch_stride,                    \
        int64_t out_token_stride, int64_t out_head_stride, int64_t q_batch_stride,                 \
        int64_t q_token_stride, int64_t q_head_stride, int64_t k_batch_stride,                     \
        int64_t k_token_stride, int64_t k_head_stride, int64_t v_batch_stride,                     \
        int64_t v_token_stride, int64_t v_head_stride, int64_t k_cache_page_stride,                \
        int64_t k_cache_token_stride, int64_t k_cache_head_stride, int64_t v_cache_page_stride,    \
        int64_t v_cache_token_stride, int64_t v_cache_head_stride, int64_t block_table_stride,     \
        int64_t table_stride, int64_t alibi_batch_stride, int batch_size, int seqlen_q,            \
        int num_heads, int num_kv_heads, int head_dim, int num_pages, int page_size,               \
        int max_tokens, int rotary_dim, int max_position, int table_bytes, int is_interleaved,     \
        int is_vectorised, int num_splits, int parallel, int fine_units, int num_sms,              \
        int window_left, int sink_type, float softmax_scale, float softcap) {                      \
        const DecodeArgs<float, float> args = {                                                    \
            .out = out, .lse = lse, .partial_out = partial_out, .partial_lse = partial_lse,        \
            .flag = flag, .k_cache = k_cache, .v_cache = v_cache, .q = q, .k = k, .v = v,          \
            .cache_seqlens = cache_seqlens, .block_table = block_table, .cos = cos, .sin = sin,    \
            .qkv_bias = qkv_bias, .k_scale = k_scale, .v_scale = v_scale,                          \
            .alibi_slopes = alibi_slopes, .sinks = sinks, .out_batch_stride = out_batch_stride,    \
            .out_token_stride = out_token_stride, .out_head_stride = out_head_stride,              \
            .q_batch_stride = q_batch_stride, .q_token_stride = q_token_stride,                    \
            .q_head_stride = q_head_stride, .k_batch_stride = k_batch_stride,                      \
            .k_token_stride = k_token_stride, .k_head_stride = k_head_stride,                      \
            .v_batch_stride = v_batch_stride, .v_token_stride = v_token_stride,                    \
            .v_head_stride = v_head_stride, .k_cache_page_stride = k_cache_page_stride,            \
            .k_cache_token_stride = k_cache_token_stride,                                          \
            .k_cache_head_stride = k_cache_head_stride,                                            \
            .v_cache_page_stride = v_cache_page_stride,                                            \
            .v_cache_token_stride = v_cache_token_stride,                                          \
            .v_cache_head_stride = v_cache_head_stride,                                            \
            .block_table_stride = block_table_stride, .table_stride = table_stride,                \
            .alibi_batch_stride = alibi_batch_stride, .batch_size = batch_size,                    \
            .seqlen_q = seqlen_q, .num_heads = num_heads, .num_kv_heads = num_kv_heads,            \
            .head_dim = head_dim, .num_pages = num_pages, .page_size = page_size,                  \
            .max_tokens = max_tokens, .rotary_dim = rotary_dim, .max_position = max_position,      \
            .table_bytes = table_bytes, .is_interleaved = is_interleaved,                          \
            .is_vectorised = is_vectorised, .num_splits = num_splits, .parallel = parallel,        \
            .fine_units = fine_units, .num_sms = num_sms, .window_left = window_left,              \
            .sink_type = sink_type, .softmax_scale = softmax_scale, .softcap = softcap};                                                                                             \
        decode_attention_fp32<CONFIG>(args);                                                       \
    })
// clang-format on

#define EXPORT_MERGE(DTYPE, T)                                                                 \
    DESCRIBED(                                                                                 \
        decode_attention_##DTYPE##_merge,                                                      \
        "x: items in more than one part, y: their rows and blocks of 128 columns",             \
        (.threads = 128, .shared_bytes = 0, .blocks_per_sm = 8, .warps = 4),                   \
        extern "C" __global__ void __launch_bounds__(128, 8) decode_attention_##DTYPE##_merge( \
            T* out, float* lse, const float* partial_out, const float* partial_lse,            \
            const int* cache_seqlens, const void* sinks, int64_t out_batch_stride,             \
            int64_t out_token_stride, int64_t out_head_stride, int batch_size, int seqlen_q,   \
            int num_new, int max_tokens, int window_left, int unit, int items, int num_splits, \
            int parallel, int fine_units, int num_sms, int num_heads, int num_kv_heads,        \
            int head_dim, int block_rows, int sink_type) {                                     \
            const Work work = {.cache_seqlens = cache_seqlens,                                 \
                               .batch_size = batch_size,                                       \
                               .seqlen_q = seqlen_q,                                           \
                               .num_new = num_new,                                             \
                               .max_tokens = max_tokens,                                       \
                               .window_left = window_left,                                     \
                               .unit = unit,                                                   \
                               .items = items,                                                 \
                               .num_splits = num_splits,                                       \
                               .parallel = parallel,                                           \
                               .fine_units = fine_units,                                       \
                               .num_sms = num_sms};                                            \
            merge_decode_splits(out, lse, partial_out, partial_lse, work,                      \
                                {sinks, sink_type, cache_seqlens}, out_batch_stride,           \
                                out_token_stride, out_head_stride, num_heads, num_kv_heads,    \
                                head_dim, block_rows);                                         \
        })

EXPORT_DECODE_ATTENTION_FP32(decode_attention_fp32_hdim128, Fp32Config, 2)
EXPORT_MERGE(fp32, float)

}  // namespace kernel_hub::kv_cache::decode
