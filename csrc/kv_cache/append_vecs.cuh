// An append by vectors of four: heads are normed and rotated in the registers that they are read
// to.
//
// Parallelisation: threadIdx.x walks a head, its rotation's pairs in one lane: two fours, eight
// elements. blockDim.x is a power of two of at least 4; of 64, two warps share a head. Lanes of
// heads that are not normed share nothing, unless scales of bytes: there it may be any number, so
// that none is idle, and heads lie across warps. threadIdx.y are heads of a token, threadIdx.z
// tokens, blockIdx.y parts of a token's heads: those of queries, then those of keys and values. A
// lane has four heads at a time, four of queries or two keys and their values, so that their sums
// of squares go over the lanes together, and what it works out of its token, and multiplies heads
// by, is for all of them. Few tokens: a warp takes heads of one token; many: of several, and more
// of each (append_plan.py). No shared memory, but for two warps. The same bits for a head whatever
// the launch's shape: they sum in one order.
#pragma once

#include "kernel_hub/access_8.cuh"
#include "kernel_hub/e4m3.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/kv_place.cuh"
#include "kernel_hub/reduce.cuh"
#include "kernel_hub/vec.cuh"
#include "kv_cache/append_rows.cuh"
#include "kv_cache/normed_heads.cuh"

namespace kernel_hub::kv_cache {

constexpr int kSlots = 4;  // heads of a lane at a time

// Four neighbours as they are in memory.
template <typename T>
struct Four {
    uint32_t words[sizeof(T)];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (uint32_t& word : words) {
            word = 0;
        }
    }
    __device__ __forceinline__ void read(const T* address) {
        if constexpr (sizeof(T) == 4) {
            const uint4 bits = ld_global(address);
            words[0] = bits.x, words[1] = bits.y, words[2] = bits.z, words[3] = bits.w;
        } else {
            const uint2 bits = ld_global_8(address);
            words[0] = bits.x, words[1] = bits.y;
        }
    }
    __device__ __forceinline__ void write(void* address) const {
        if constexpr (sizeof(T) == 4) {
            st_global(address, make_uint4(words[0], words[1], words[2], words[3]));
        } else {
            st_global_8(address, make_uint2(words[0], words[1]));
        }
    }
    // NOTE: otherwise the compiler keeps them as floats from the first `unpack` on.
    __device__ __forceinline__ void keep() {
#pragma unroll
        for (uint32_t& word : words) {
            asm volatile("" : "+r"(word));
        }
    }
    __device__ __forceinline__ void unpack(float (&values)[4]) const {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) {
            Word<T>::unpack(words[i], values + i * Word<T>::kElems);
        }
    }
    __device__ __forceinline__ void pack(const float (&values)[4]) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) {
            words[i] = Word<T>::pack(values + i * Word<T>::kElems);
        }
    }
};

// Where the two fours of a lane are in a head: the first, and the second behind it.
template <bool kIsInterleaved>
struct Fours {
    int first, apart;
    bool exist, turn;

    template <typename Args>
    __device__ __forceinline__ Fours(const Args& args, int at) {
        const int half = args.rotary_dim / 2;
        exist = 2 * at < args.head_dim;
        turn = exist && at < half;
        if (at >= half) {
            first = half + at, apart = args.head_dim / 2 - half;
        } else if (kIsInterleaved) {
            first = 2 * at, apart = 4;
        } else {
            first = at, apart = half;
        }
    }
};

// What a lane's elements are multiplied by, and what the other ones of their pairs, before the two
// are added: products of weights and angles.
template <bool kIsInterleaved>
struct Factors {
    float same[2][4], other[2][4];

    // weights: of the elements; where these turn not `same` alone is meant.
    __device__ __forceinline__ void turn(const float (&cos)[4], const float (&sin)[4]) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const Pair at(pair);
            const float a = same[at.a_part][at.a], b = same[at.b_part][at.b];
            same[at.a_part][at.a] = a * cos[pair];
            same[at.b_part][at.b] = b * cos[pair];
            other[at.a_part][at.a] = b * -sin[pair];
            other[at.b_part][at.b] = a * sin[pair];
        }
    }
    __device__ __forceinline__ void apply(float (&values)[2][4]) const {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const Pair at(pair);
            const float a = values[at.a_part][at.a], b = values[at.b_part][at.b];
            values[at.a_part][at.a] =
                fmaf(a, same[at.a_part][at.a], __fmul_rn(b, other[at.a_part][at.a]));
            values[at.b_part][at.b] =
                fmaf(b, same[at.b_part][at.b], __fmul_rn(a, other[at.b_part][at.b]));
        }
    }

  private:
    struct Pair {
        int a_part, a, b_part, b;

        __device__ __forceinline__ explicit Pair(int pair) {
            a_part = kIsInterleaved ? pair / 2 : 0, a = kIsInterleaved ? 2 * pair % 4 : pair;
            b_part = kIsInterleaved ? a_part : 1, b = kIsInterleaved ? a + 1 : pair;
        }
    };
};

// Sums over the `lanes` of a head (a power of two of 4 to 32), one for each slot; a lane is left
// with that of slot lane / (lanes / 4).
__device__ __forceinline__ float add_slots(const float (&sums)[kSlots], int lanes) {
    const bool is_upper = threadIdx.x & (lanes / 2), is_odd = threadIdx.x & (lanes / 4);
    float low = is_upper ? sums[2] : sums[0], high = is_upper ? sums[3] : sums[1];
    low += __shfl_xor_sync(~0u, is_upper ? sums[0] : sums[2], lanes / 2);
    high += __shfl_xor_sync(~0u, is_upper ? sums[1] : sums[3], lanes / 2);
    float sum = is_odd ? high : low;
    sum += __shfl_xor_sync(~0u, is_odd ? low : high, lanes / 4);
#pragma unroll
    for (int mask = kWarpSize / 8; mask > 0; mask /= 2) {
        if (mask < lanes / 4) {
            sum += __shfl_xor_sync(~0u, sum, mask);
        }
    }
    return sum;
}

// The token of a thread, and the part of its heads.
struct HeadsOfLane : TokenOfThread {
    bool is_query;
    int part, num_parts;

    template <typename Args>
    __device__ __forceinline__ explicit HeadsOfLane(const Args& args) : TokenOfThread(args) {
        is_query = static_cast<int>(blockIdx.y) < args.q_threads;
        part = blockIdx.y - (is_query ? 0 : args.q_threads);
        num_parts = is_query ? args.q_threads : gridDim.y - args.q_threads;
    }
};

template <typename T, bool kIsInterleaved, bool kIsBytes>
__device__ __forceinline__ void append_vecs(const AppendArgs<T>& args) {
    const int groups = blockDim.y, at = 4 * threadIdx.x;
    const HeadsOfLane heads(args);
    const bool is_query = heads.is_query;
    const Fours<kIsInterleaved> fours(args, at);
    const void* weights = is_query ? args.q_norm_weight : args.k_norm_weight;
    // Of slots: four query heads, or two keys and behind them their values.
    const int num_heads = is_query ? args.num_heads : args.num_kv_heads;
    const int behind = is_query ? 2 * groups : 0, at_once = (is_query ? 4 : 2) * groups;
    int first_head = at_once * heads.part;  // of all lanes
    const int own_head = first_head + threadIdx.y;
    const auto head_of = [&](int slot) { return slot % 2 * groups + slot / 2 * behind; };
    // NOTE: unsigned: behind as many tokens as there may be an index is below 0.
    bool is_live = static_cast<uint32_t>(heads.token_idx) < static_cast<uint32_t>(args.num_tokens);
    bool is_known = true;
    int left = is_live && fours.exist ? num_heads - own_head : 0;

    const int64_t a_stride = is_query ? args.q.head_stride : args.k.head_stride;
    const int64_t b_stride = is_query ? args.q.head_stride : args.v.head_stride;
    const T* a_from = is_query ? args.q.at(heads.batch_idx, heads.index)
                               : args.k.at(heads.batch_idx, heads.index);
    const T* b_from = is_query ? a_from : args.v.at(heads.batch_idx, heads.index);
    a_from += own_head * a_stride + fours.first;
    b_from += (own_head + behind) * b_stride + fours.first;
    // The lanes of a head in this warp, the first of them, and the slot whose sum is in this lane.
    const int lanes = min(static_cast<int>(blockDim.x), kWarpSize);
    const int lane = threadIdx.x + blockDim.x * (threadIdx.y + groups * threadIdx.z);
    const int first_lane = lane & (kWarpSize - lanes);
    const int own_slot =
        (threadIdx.x & (lanes / 2) ? 2 : 0) + (threadIdx.x & (lanes / kSlots) ? 1 : 0);
    const float* scales = own_slot < 2 ? args.k_scale : args.v_scale;
    const bool is_scaled = kIsBytes && !is_query && scales != nullptr;
    float scale = 1.0f;

    Four<T> bits[kSlots][2];
    const auto load = [&] {
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            bits[slot][0].clear();
            bits[slot][1].clear();
            if (head_of(slot) < left) {
                const T* head = slot < 2 ? a_from + slot * groups * a_stride
                                         : b_from + (slot - 2) * groups * b_stride;
                bits[slot][0].read(head);
                bits[slot][1].read(head + fours.apart);
            }
        }
        const int scale_idx = first_head + threadIdx.y + head_of(own_slot);
        if (is_scaled && scale_idx < num_heads) {
            scale = __ldg(scales + scale_idx);
        }
    };
    // The inverse of the root mean square of this lane's slot.
    const auto find_root = [&] {
        float sums[kSlots];
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            float values[2][4];
            bits[slot][0].unpack(values[0]);
            bits[slot][1].unpack(values[1]);
            sums[slot] = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sums[slot] = fmaf(values[i / 4][i % 4], values[i / 4][i % 4], sums[slot]);
            }
            bits[slot][0].keep();
            bits[slot][1].keep();
        }
        float sum = add_slots(sums, lanes);
        if (blockDim.x > kWarpSize) {
            __shared__ float halves[2 * kWarpSize];
            __syncthreads();
            halves[threadIdx.x] = sum;
            __syncthreads();
            sum += halves[threadIdx.x ^ kWarpSize];
        }
        return rsqrtf(fmaf(sum, reciprocal_approx(static_cast<float>(args.head_dim)), args.eps));
    };
    follow_launch_before();
    load();
    Parameters<T, 4> weight[2], cos, sin;
    if (weights != nullptr && fours.exist) {
        weight[0].load(weights, fours.first, args.is_weight32);
        weight[1].load(weights, fours.first + fours.apart, args.is_weight32);
    }
    // NOTE: after the heads' loads: these wait for one another, and would hold them up.
    const Place place = find_token(args, heads, is_live, is_known);
    if (is_live && fours.turn) {
        const int64_t entry = (is_known ? place.position * args.table_stride : 0) + at;
        cos.load(args.cos, entry, args.is_table32);
        sin.load(args.sin, entry, args.is_table32);
    }
    // NOTE: twice in the code, here and in the loop: told by a flag what is for the first time
    // only, the compiler keeps all of it in registers for every time, 10 more.
    float root = weights == nullptr ? 1.0f : find_root();

    // From here on the tables are waited for. Where heads go, in bytes.
    report_token(args, heads, place, is_live, is_known);
    const bool goes = is_live && (is_query || place.is_stored);
    const int bytes = kIsBytes && !is_query ? 1 : sizeof(T);
    const int64_t a_out = (is_query ? args.out_q.head_stride : args.k_cache.head_stride) * bytes;
    const int64_t b_out = (is_query ? args.out_q.head_stride : args.v_cache.head_stride) * bytes;
    const auto row_of = [&](const CacheRows& cache) {
        return static_cast<char*>(cache.data) +
               (place.page * cache.page_stride + place.row * cache.row_stride) * bytes;
    };
    char* a_to = is_query ? reinterpret_cast<char*>(args.out_q.at(heads.batch_idx, heads.index))
                          : row_of(args.k_cache);
    char* b_to = is_query ? a_to : row_of(args.v_cache);
    a_to += own_head * a_out + fours.first * bytes;
    b_to += (own_head + behind) * b_out + fours.first * bytes;
    T* out_k = nullptr;
    if (is_live && !is_query && args.out_k.data != nullptr) {
        out_k = args.out_k.at(heads.batch_idx, heads.index) + own_head * args.out_k.head_stride +
                fours.first;
    }

    Factors<kIsInterleaved> factors;
    if (weights != nullptr) {
        weight[0].expand(args.is_weight32);
        weight[1].expand(args.is_weight32);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        factors.same[i / 4][i % 4] =
            weights == nullptr ? 1.0f : weight[i / 4].values[i % 4] + args.weight_offset;
    }
    if (fours.turn) {
        cos.expand(args.is_table32);
        sin.expand(args.is_table32);
        if (!is_known) {
            cos.fill(__uint_as_float(0x7fffffff));
            sin.fill(__uint_as_float(0x7fffffff));
        }
        factors.turn(cos.values, sin.values);
    }

#pragma unroll 1
    for (;;) {
        const float inverse_scale = is_scaled ? 1.0f / scale : 1.0f;
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            const int its_lane = first_lane + slot * (lanes / kSlots);
            // NOTE: no shuffle where heads may lie across warps.
            const bool is_apart = !kIsBytes && weights == nullptr;
            const float its_root = is_apart ? 1.0f : __shfl_sync(~0u, root, its_lane);
            const float its_scale = kIsBytes ? __shfl_sync(~0u, inverse_scale, its_lane) : 1.0f;
            if (head_of(slot) >= left) {
                continue;
            }
            float values[2][4];
            bits[slot][0].unpack(values[0]);
            bits[slot][1].unpack(values[1]);
            // What is neither normed nor turned stays the bits it is, a nan's too.
            if ((slot < 2 || is_query) && (fours.turn || weights != nullptr)) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    values[i / 4][i % 4] *= its_root;
                }
                if (!fours.turn) {
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        values[i / 4][i % 4] *= factors.same[i / 4][i % 4];
                    }
                } else {
                    factors.apply(values);
                }
                bits[slot][0].pack(values[0]);
                bits[slot][1].pack(values[1]);
            }
            if (slot < 2 && out_k != nullptr) {
                T* head = out_k + slot * groups * args.out_k.head_stride;
                bits[slot][0].write(head);
                bits[slot][1].write(head + fours.apart);
            }
            if (!goes) {
                continue;
            }
            char* head =
                slot < 2 ? a_to + slot * groups * a_out : b_to + (slot - 2) * groups * b_out;
            if (!kIsBytes || is_query) {
                bits[slot][0].write(head);
                bits[slot][1].write(head + fours.apart * static_cast<int>(sizeof(T)));
            } else {
#pragma unroll
                for (int part = 0; part < 2; ++part) {
#pragma unroll
                    for (float& value : values[part]) {
                        value *= its_scale;
                    }
                    write_e4m3(reinterpret_cast<__nv_fp8_e4m3*>(head) + part * fours.apart,
                               values[part]);
                }
            }
        }
        const int step = at_once * heads.num_parts;
        first_head += step;
        if (first_head >= num_heads) {
            break;
        }
        left -= step;
        a_from += step * a_stride;
        b_from += step * b_stride;
        a_to += step * a_out;
        b_to += step * b_out;
        if (out_k != nullptr) {
            out_k += step * args.out_k.head_stride;
        }
        load();
        root = weights == nullptr ? 1.0f : find_root();
    }
}

}  // namespace kernel_hub::kv_cache
