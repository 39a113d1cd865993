// Stand-ins for TensorRT-LLM's fmha_v2 kernels: their structs, names and launch rules, and
// attention computed plainly from what the struct says. A launch against the rules leaves NaN in
// the output. They read the fields that all of TensorRT-LLM's kernels of such a name read, and stop
// themselves where those do.
//
// nl, nl_tiled: a block is (q step, head, sequence); a thread has one row of O. tma_ws: blocks draw
// tiles of two q steps from the counter, and read Q, K and V through the struct's 64-byte TMA
// descriptors. Shared memory: nl none; tma_ws the boxes of Q (128 rows) and of K and V (kv_step).
//
// -DSTRUCT=… names a struct: CURRENT unless it is given; the older ones have kernels of their own.
// -DNAMES_ONLY leaves the attention out, and reads what every kernel of such a name reads of its
// struct: so tests/formats/make_fmha_data.py builds the cubins of tests/formats/data.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "fmha_always.cuh"
#include "fmha_structs.cuh"

__device__ float to_float(__half x) {
    return __half2float(x);
}
__device__ float to_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
__device__ float to_float(__nv_fp8_e4m3 x) {
    return float(x);
}

// One sequence of one head, as the struct describes it.
struct Head {
    int seq, head, kv_head, q_start, k_start, q_len, k_len;
    __device__ Head(const Params& p, int seq, int head)
        : seq(seq), head(head), kv_head(head / p.num_heads_per_kv) {
        q_start = p.cu_seqlens_q[seq], q_len = p.cu_seqlens_q[seq + 1] - q_start;
        k_start = p.cu_seqlens_k[seq], k_len = p.cu_seqlens_k[seq + 1] - k_start;
    }
};

template <typename T, Layout kLayout>
__device__ const T* row_of(const Params& p, const Head& at, char part, int row) {
    const int64_t d = p.head_dim, dv = p.head_dim_v;
    if (part == 'q') {
        const char* base = kLayout == QKV ? p.qkv : p.q;
        const int64_t stride = row_stride(p, kLayout == QKV, 'q');
        return (const T*)(base + (at.q_start + row) * stride) + at.head * d;
    }
    const int64_t stride = row_stride(p, kLayout == QKV, part);
    if (kLayout == Q_PAGED_KV) {
        const int* table = p.paged.block_offsets + at.seq * 2 * p.paged.max_blocks_per_seq;
        if (part == 'v') table += p.paged.max_blocks_per_seq;
        const char* block = p.paged.pool + (int64_t)table[row >> p.paged.tokens_per_block_log2] *
                                               p.paged.bytes_per_block;
        const int in_block = row & (p.paged.tokens_per_block - 1);
        return (const T*)(block + at.kv_head * stride +
                          in_block * (stride / p.paged.tokens_per_block));
    }
    const char* base = kLayout == QKV ? p.qkv : p.kv;
#if !IS_OLD
    if (kLayout == Q_K_V) base = part == 'k' ? p.k : p.v;
#endif
    const T* start = (const T*)(base + (at.k_start + row) * stride);
    if (kLayout == QKV) start += p.num_heads * d;
    if (part == 'v' && kLayout != Q_K_V) start += p.num_kv_heads * d;
    return start + at.kv_head * (part == 'k' ? d : dv);
}

template <Mask kMask>
__device__ bool sees(const Params& p, const Head& at, int row, int col) {
    const int place = row + at.k_len - at.q_len;
    if (kMask == PADDING) return true;
    if (kMask == CUSTOM) {
        const int tiles = p.mask_stride * 8 / 64, in_tile = row % 64, in_col = col % 64;
        const int64_t tile = (int64_t)(p.cu_mask_rows[at.seq] + row) / 64 * tiles + col / 64;
        const int thread = in_tile / 16 * 32 + in_tile % 8 * 4 + in_col % 8 / 2;
        const int bit = in_col / 8 * 4 + in_tile % 16 / 8 * 2 + in_col % 2;
        return p.packed_mask[tile * 128 + thread] >> bit & 1;
    }
    if (col > place) return false;
    if (kMask == CAUSAL) return true;
    if (const int log2 = log2_chunk(p)) return col >= place >> log2 << log2;
    return (int64_t)col > (int64_t)place - p.window - IS_512;  // 0.16 sees one key more
}

__device__ float factor(uint32_t bits, const uint32_t* on_device, bool half_bits) {
    if (on_device) bits = *on_device;
    if (!half_bits) return __uint_as_float(bits);
    if (bits >> 16 != (bits & 0xffff)) return NAN;  // a half2 of two equal halves
    return __half2float(__ushort_as_half((unsigned short)bits));
}

__device__ float slope_of(const Alibi& alibi, int head) {
    const int i = head + alibi.head_idx_offset, pow2 = alibi.num_heads_pow2;
    const int exponent = i < pow2 ? 2 * (i + 1) : 2 * (i - pow2) + 1;
    return exp2f(alibi.neg4_div_num_heads * exponent) * alibi.scale_after_alibi;
}

template <typename T, Mask kMask, bool kHalf, bool kBase2, bool kAlibi, bool kSoftcap>
struct Row {
    float m = -INFINITY, sum = 0.f, scale, slope = 0.f, cap = 0.f;

    __device__ Row(const Params& p, int head) {
        scale = factor(p.scale_bmm1, p.scale_bmm1_d, kHalf && !kBase2) * (kBase2 ? logf(2.f) : 1.f);
        if (factor(p.scale_softmax, nullptr, kHalf) != 1.f) scale = NAN;
        if (kAlibi || p.has_alibi) slope = slope_of(p.alibi, head);
        if (kSoftcap) cap = (float)p.softcap;  // an integer, as in the real ones
    }
    // The factor for what was summed before; `weight` is that of the new column.
    __device__ float add(float dot, int col, float& weight) {
        float score = dot * scale;
        if (kSoftcap) score = cap * tanhf(score);
        score += slope * col;
        const float before = m;
        m = fmaxf(m, score);
        const float shrink = expf(before - m);
        weight = expf(score - m);
        sum = sum * shrink + weight;
        return shrink;
    }
};

__device__ unsigned dynamic_shared_bytes() {
    unsigned bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

__device__ void store(__half* to, float x) {
    *to = __float2half(x);
}
__device__ void store(__nv_bfloat16* to, float x) {
    *to = __float2bfloat16(x);
}
__device__ void store(__nv_fp8_e4m3* to, float x) {
    *to = __nv_fp8_e4m3(x);
}

template <typename T, bool kSinks, bool kStats>
__device__ void write_row(const Params& p, const Head& at, int row, const float* acc, float m,
                          float sum, float last) {
#if STRUCT == CURRENT
    if (kSinks && p.sinks) sum += expf(p.sinks[at.head] - m);
#endif
    T* out = (T*)(p.out + (at.q_start + row) * p.out_stride) + at.head * p.head_dim_v;
    for (int i = 0; i < p.head_dim_v; ++i) store(out + i, acc[i] / sum * last);
#if !IS_512
    if (kStats && p.stats) {
        float* stats = (float*)((char*)p.stats + (at.q_start + row) * p.stats_stride);
        stats[at.head * 2] = m, stats[at.head * 2 + 1] = sum;
    }
#endif
}

template <typename T, Layout kLayout, Mask kMask, Variant kVariant, int kQStep, bool kHalf,
          int kShared, bool kAlibi, bool kSoftcap>
__device__ void plain(const Params& p) {
    const int v_blocks = kVariant == NL_TILED ? (p.head_dim_v + 255) / 256 : 1;
    const Head at(p, blockIdx.z, blockIdx.y);
    const int row = blockIdx.x / v_blocks * kQStep + threadIdx.x;
    if (threadIdx.x >= kQStep || row >= at.q_len || blockIdx.x % v_blocks) return;
    check_heads<kLayout>(p);
    Row<T, kMask, kHalf, false, kAlibi, kSoftcap> state(p, at.head);
    const bool rules = blockDim.x == 128 && gridDim.y == p.num_heads && gridDim.z == p.batch_size &&
                       gridDim.x == (p.max_seqlen_q + kQStep - 1) / kQStep * v_blocks &&
                       dynamic_shared_bytes() == kShared && !p.is_padded && ungrouped(p);
    float acc[256] = {};
    const T* q = row_of<T, kLayout>(p, at, 'q', row);
    for (int col = 0; col < at.k_len; ++col) {
        if (!sees<kMask>(p, at, row, col)) continue;
        const T* k = row_of<T, kLayout>(p, at, 'k', col);
        const T* v = row_of<T, kLayout>(p, at, 'v', col);
        float dot = 0.f, weight;
        for (int i = 0; i < p.head_dim; ++i) dot += to_float(q[i]) * to_float(k[i]);
        const float shrink = state.add(dot, col, weight);
        for (int i = 0; i < p.head_dim_v; ++i) acc[i] = acc[i] * shrink + weight * to_float(v[i]);
    }
    const float last = rules ? factor(p.scale_bmm2, p.scale_bmm2_d, kHalf) : NAN;
    write_row<T, false, true>(p, at, row, acc, state.m, state.sum, last);
}

#if !IS_OLD
__device__ void copy_box(void* to, const Descriptor* map, uint64_t* barrier, int rank, int x, int y,
                         int z, int w) {
    const uint32_t shared = (uint32_t)__cvta_generic_to_shared(to);
    const uint32_t bar = (uint32_t)__cvta_generic_to_shared(barrier);
    if (rank == 3)
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared),
            "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
            "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w)
            : "memory");
}

// An element of a tile whose rows of `bytes` a row were swizzled by that span.
template <typename T>
__device__ float swizzled(const char* tile, int row, int col, int bytes) {
    const int at = row * bytes + col * (int)sizeof(T);
    const int mask = bytes == 128 ? 7 : bytes == 64 ? 3 : 1;
    return to_float(*(const T*)(tile + (at ^ (at >> 7 & mask) << 4)));
}

template <typename T, Layout kLayout, Mask kMask, int kQStep, int kKvStep, int kHeadDim,
          int kHeadDimV, bool kHalf, bool kAlibi, bool kSoftcap, bool kSoftmax>
__device__ void through_tma(const Params& p) {
    constexpr int kColumns = 128 / sizeof(T) < kHeadDim ? 128 / sizeof(T) : kHeadDim;
    constexpr int kBytes = kColumns * sizeof(T);
    constexpr int kGroups = (kHeadDim + kColumns - 1) / kColumns;
    constexpr int kGroupsV = (kHeadDimV + kColumns - 1) / kColumns;
    extern __shared__ __align__(1024) char shared[];
    char* q_tiles = shared;
    char* k_tiles = q_tiles + 2 * kGroups * kQStep * kBytes;
    char* v_tiles = k_tiles + kGroups * kKvStep * kBytes;
    __shared__ uint64_t barrier;
    __shared__ uint32_t tile_now;
    const uint32_t bar = (uint32_t)__cvta_generic_to_shared(&barrier);
    uint32_t phase = 0;
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar) : "memory");
    __syncthreads();
    const auto wait = [&] {
        asm volatile(
            "{ .reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;"
            " @!done bra again; }" ::"r"(bar),
            "r"(phase)
            : "memory");
        phase ^= 1;
    };
    const auto expect = [&](uint32_t bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                     : "memory");
    };
    const uint32_t needed = v_tiles - shared + kGroupsV * kKvStep * kBytes;
    const int tiles_per_head = (p.max_seqlen_q + 2 * kQStep - 1) / (2 * kQStep);
    const bool rules = blockDim.x == 384 && gridDim.x == 1 && gridDim.z == 1 && !p.is_padded &&
                       dynamic_shared_bytes() >= needed && gridDim.y <= p.num_tiles &&
                       p.num_tiles_per_head == tiles_per_head &&
                       p.num_tiles == p.num_tiles_per_head * p.num_heads * p.batch_size;
    while (true) {
        __syncthreads();
        if (threadIdx.x == 0) tile_now = atomicAdd(p.tile_counter, 1);
        __syncthreads();
        uint32_t tile = tile_now;
        if (tile >= p.num_tiles) return;
        const uint32_t heads = p.num_heads * p.batch_size;
        int seq, head, step;
        if (p.balanced) {  // the longest rows of all heads first
            step = p.num_tiles_per_head - 1 - tile / heads, tile %= heads;
            head = tile / p.batch_size, seq = tile % p.batch_size;
        } else {
            step = tile % p.num_tiles_per_head, tile /= p.num_tiles_per_head;
            head = tile % p.num_heads, seq = tile / p.num_heads;
        }
        const Head at(p, seq, head);
        const int first = step * 2 * kQStep, row = first + threadIdx.x;
        if (first >= at.q_len) continue;
        if (threadIdx.x == 0) {
            expect(2 * kGroups * kQStep * kBytes);
            for (int half = 0; half < 2; ++half)
                for (int g = 0; g < kGroups; ++g)
                    copy_box(q_tiles + (half * kGroups + g) * kQStep * kBytes, &p.tma_q, &barrier,
                             3, g * kColumns, head, at.q_start + first + half * kQStep, 0);
        }
        wait();
        Row<T, kMask, kHalf, !(kAlibi || kSoftcap), kAlibi, kSoftcap> state(p, head);
        const bool mine = threadIdx.x < 2 * kQStep && row < at.q_len;
        const char* q_tile = q_tiles + threadIdx.x / kQStep * kGroups * kQStep * kBytes;
        float acc[kHeadDimV] = {};
        for (int start = 0; start < at.k_len; start += kKvStep) {
            __syncthreads();
            if (threadIdx.x == 0) {
                expect((kGroups + kGroupsV) * kKvStep * kBytes);
                for (int part = 0; part < 2; ++part)
                    for (int g = 0; g < (part ? kGroupsV : kGroups); ++g) {
                        char* to = (part ? v_tiles : k_tiles) + g * kKvStep * kBytes;
                        const Descriptor* map = part ? &p.tma_v : &p.tma_k;
                        if (kLayout != Q_PAGED_KV) {
                            copy_box(to, map, &barrier, 3, g * kColumns, at.kv_head,
                                     at.k_start + start, 0);
                            continue;
                        }
                        const int page = p.paged.tokens_per_block, last = (at.k_len - 1) / page;
                        const int* table =
                            p.paged.block_offsets + (2 * seq + part) * p.paged.max_blocks_per_seq;
                        for (int i = 0; i < p.blocks_per_tma_load; ++i)
                            copy_box(to + i * (kKvStep >> p.blocks_per_tma_load_log2) * kBytes, map,
                                     &barrier, 4, g * kColumns, start % page, at.kv_head,
                                     table[min(start / page + i, last)]);
                    }
            }
            wait();
            for (int col = start; mine && col < min(start + kKvStep, at.k_len); ++col) {
                if (!sees<kMask>(p, at, row, col)) continue;
                float dot = 0.f, weight;
                for (int i = 0; i < kHeadDim; ++i)
                    dot += swizzled<T>(q_tile + i / kColumns * kQStep * kBytes,
                                       threadIdx.x % kQStep, i % kColumns, kBytes) *
                           swizzled<T>(k_tiles + i / kColumns * kKvStep * kBytes, col - start,
                                       i % kColumns, kBytes);
                const float shrink = state.add(dot, col, weight);
                for (int i = 0; i < kHeadDimV; ++i)
                    acc[i] = acc[i] * shrink +
                             weight * swizzled<T>(v_tiles + i / kColumns * kKvStep * kBytes,
                                                  col - start, i % kColumns, kBytes);
            }
        }
        const float last = rules ? factor(p.scale_bmm2, p.scale_bmm2_d, kHalf) : NAN;
        if (mine) write_row<T, true, kSoftmax>(p, at, row, acc, state.m, state.sum, last);
    }
}

#endif

#ifdef NAMES_ONLY
#define BODY(LAYOUT, MASK, SOFTCAP, TMA, ALIBI, SOFTMAX, ...) \
    read_always<LAYOUT, MASK, SOFTCAP, TMA, ALIBI, SOFTMAX>(p)
#else
#define BODY(LAYOUT, MASK, SOFTCAP, TMA, ALIBI, SOFTMAX, ...) __VA_ARGS__
#endif
#define NL_KERNEL(SYMBOL, T, LAYOUT, MASK, VARIANT, Q_STEP, HALF, SHARED, SOFTCAP)               \
    extern "C" __global__ void __launch_bounds__(128) SYMBOL(const __grid_constant__ Params p) { \
        BODY(LAYOUT, MASK, SOFTCAP, false, false, false,                                         \
             plain<T, LAYOUT, MASK, VARIANT, Q_STEP, HALF, SHARED, false, SOFTCAP>(p));          \
    }
#define WS_KERNEL(SYMBOL, T, LAYOUT, MASK, KV_STEP, D, DV, HALF, ALIBI, SOFTCAP, SOFTMAX)     \
    extern "C" __global__ void __launch_bounds__(384, 1) SYMBOL(const                         \
                                                                __grid_constant__ Params p) { \
        BODY(LAYOUT, MASK, SOFTCAP, true, ALIBI, SOFTMAX,                                     \
             through_tma<T, LAYOUT, MASK, 64, KV_STEP, D, DV, HALF, ALIBI, SOFTCAP, SOFTMAX>( \
                 p));                                                                         \
    }
#define FLASH(REST) fmha_v2_flash_attention_##REST

#if !IS_OLD
NL_KERNEL(FLASH(fp16_64_32_S_qkv_128_sm90_kernel_nl), __half, QKV, PADDING, NL, 64, true, 32768,
          false)
NL_KERNEL(FLASH(fp16_64_32_S_qkv_128_causal_sm90_kernel_nl), __half, QKV, CAUSAL, NL, 64, true,
          32768, false)
NL_KERNEL(FLASH(fp16_fp32_64_32_S_qkv_64_sliding_or_chunked_causal_sm90_kernel_nl), __half, QKV,
          SLIDING, NL, 64, false, 16384, false)
NL_KERNEL(FLASH(bf16_64_32_S_q_kv_40_custom_mask_sm90_kernel_nl), __nv_bfloat16, Q_KV, CUSTOM, NL,
          64, false, 16384, false)
NL_KERNEL(FLASH(bf16_64_128_S_q_paged_kv_128_causal_softcapping_sm90_kernel_nl_tiled),
          __nv_bfloat16, Q_PAGED_KV, CAUSAL, NL_TILED, 64, false, 81920, true)
NL_KERNEL(FLASH(bf16_64_128_S_q_k_v_192x128_causal_sm90_kernel_nl_tiled), __nv_bfloat16, Q_K_V,
          CAUSAL, NL_TILED, 64, false, 81920, false)
NL_KERNEL(FLASH(bf16_64_128_S_qkv_192x128_causal_sm90_kernel_nl_tiled), __nv_bfloat16, QKV, CAUSAL,
          NL_TILED, 64, false, 81920, false)
WS_KERNEL(FLASH(fp16_64_128_S_qkv_128_causal_tma_ws_sm90_kernel), __half, QKV, CAUSAL, 128, 128,
          128, true, false, false, false)
WS_KERNEL(FLASH(bf16_64_256_S_q_kv_32_sliding_or_chunked_causal_softmax_tma_ws_sm90_kernel),
          __nv_bfloat16, Q_KV, SLIDING, 256, 32, 32, false, false, false, true)
WS_KERNEL(FLASH(bf16_64_128_S_q_paged_kv_128_tma_ws_sm90_kernel), __nv_bfloat16, Q_PAGED_KV,
          PADDING, 128, 128, 128, false, false, false, false)
WS_KERNEL(FLASH(bf16_64_128_S_q_k_v_192x128_causal_alibi_tma_ws_sm90_kernel), __nv_bfloat16, Q_K_V,
          CAUSAL, 128, 192, 128, false, true, false, false)
WS_KERNEL(FLASH(e4m3_64_256_S_qkv_64_custom_mask_tma_ws_sm90_kernel), __nv_fp8_e4m3, QKV, CUSTOM,
          256, 64, 64, false, false, false, false)
#else
NL_KERNEL(FLASH(fp16_64_32_S_qkv_128_causal_sm90_kernel_nl), __half, QKV, CAUSAL, NL, 64, true,
          32768, false)
NL_KERNEL(FLASH(bf16_64_128_S_qkv_192x128_sliding_window_causal_sm90_kernel_nl_tiled),
          __nv_bfloat16, QKV, SLIDING, NL_TILED, 64, false, 81920, false)
NL_KERNEL(FLASH(bf16_64_128_S_qkv_128_custom_mask_sm90_kernel_nl_tiled), __nv_bfloat16, QKV, CUSTOM,
          NL_TILED, 64, false, 81920, false)
NL_KERNEL(FLASH(bf16_64_128_S_q_paged_kv_128_causal_softcapping_sm90_kernel_nl_tiled),
          __nv_bfloat16, Q_PAGED_KV, CAUSAL, NL_TILED, 64, false, 81920, true)
NL_KERNEL(FLASH(bf16_64_32_S_q_paged_kv_64_sliding_window_causal_sm90_kernel_nl), __nv_bfloat16,
          Q_PAGED_KV, SLIDING, NL, 64, false, 16384, false)
NL_KERNEL(FLASH(bf16_64_32_S_q_kv_64_sm90_kernel_nl), __nv_bfloat16, Q_KV, PADDING, NL, 64, false,
          16384, false)
#endif
