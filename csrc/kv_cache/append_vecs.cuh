// An append by vectors of four: heads are normed and rotated in the registers that they are read
// to.
//
// Parallelisation: threadIdx.x walks a head, its rotation's pairs in one lane: two fours, eight
// elements. threadIdx.y are heads of a token, threadIdx.z tokens, blockIdx.y parts of a token's
// heads: those of queries, then those of keys and values. A lane has four heads at a time, four of
// queries or two keys and their values, or half as many (few tokens: more warps, each with less to
// do), so that their sums of squares go over the lanes together, and what it works out of its
// token, and multiplies heads by, is for all of them. Of four neighbours, lanes 4 n to 4 n + 3,
// each has the sum, and the scale, of one of the four: blockDim.x is a multiple of four
// (append_plan.py has which), and blocks are whole warps. The sums of all neighbours of a head are
// added by shuffles where heads have 4, 8, 16 or 32 lanes; where they have 12, 24, 48 or 64 they
// may lie across warps, and go by shared memory. Lanes of heads that are not normed, nor go to
// bytes, share nothing: there blockDim.x may be any number, so that none is idle. The same bits for
// a head whatever the launch's shape: they sum in one order.
#pragma once

#include "kernel_hub/e4m3.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/kv_place.cuh"
#include "kv_cache/append_fours.cuh"
#include "kv_cache/append_rows.cuh"
#include "kv_cache/normed_heads.cuh"

namespace kernel_hub::kv_cache {

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
    // Of slots: four query heads, or two keys and behind them their values; half of these where few
    // tokens have work for few warps: num_slots is two then.
    const int num_heads = is_query ? args.num_heads : args.num_kv_heads;
    const int num_slots = args.num_rounds, behind = is_query ? 2 * groups : 0;
    const int at_once = (is_query ? num_slots : num_slots / 2) * groups;
    const bool has_upper = is_query && num_slots > 2;
    int first_head = at_once * heads.part;  // of all lanes
    const int own_head = first_head + threadIdx.y;
    const auto head_of = [&](int slot) { return slot % 2 * groups + slot / 2 * behind; };
    // NOTE: unsigned: behind as many tokens as there may be an index is below 0.
    bool is_live = static_cast<uint32_t>(heads.token_idx) < static_cast<uint32_t>(args.num_tokens);
    bool is_known = true;
    int left = is_live && fours.exist ? num_heads - own_head : 0;
    const auto has_head = [&](int slot) { return head_of(slot) < min(left, at_once); };

    const int64_t a_stride = is_query ? args.q.head_stride : args.k.head_stride;
    const int64_t b_stride = is_query ? args.q.head_stride : args.v.head_stride;
    const T* a_from = is_query ? args.q.at(heads.batch_idx, heads.index)
                               : args.k.at(heads.batch_idx, heads.index);
    const T* b_from = is_query ? a_from : args.v.at(heads.batch_idx, heads.index);
    a_from += own_head * a_stride + fours.first;
    b_from += (own_head + behind) * b_stride + fours.first;
    const HeadSums head_sums;
    float scale = 1.0f;  // of the slot of this lane

    Four<T> bits[kSlots][2];
    const auto load = [&] {
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            bits[slot][0].clear();
            bits[slot][1].clear();
            if (has_head(slot)) {
                const T* head = slot < 2 ? a_from + slot * groups * a_stride
                                         : b_from + (slot - 2) * groups * b_stride;
                bits[slot][0].read(head);
                bits[slot][1].read(head + fours.apart);
            }
        }
        if constexpr (kIsBytes) {
            const int scale_idx = first_head + threadIdx.y + head_of(threadIdx.x % kSlots);
            const float* scales = threadIdx.x % kSlots < 2 ? args.k_scale : args.v_scale;
            scale = 1.0f;
            if (!is_query && scales != nullptr && scale_idx < num_heads) {
                scale = __ldg(scales + scale_idx);
            }
        }
    };
    // NOTE: kept, or it is found anew where the root waits for it.
    uint32_t inverse_size = __float_as_uint(reciprocal_approx(static_cast<float>(args.head_dim)));
    asm volatile("" : "+r"(inverse_size));
    // The inverse of the root mean square of this lane's slot.
    const auto find_root = [&] {
        const float sum = head_sums.add(square_neighbours(bits, has_upper));
        return rsqrtf(fmaf(sum, __uint_as_float(inverse_size), args.eps));
    };
    follow_launch_before();
    load();
    // NOTE: after the heads' loads: these wait for one another, and would hold them up. And each
    // before the next branch, so that it has a scoreboard of its own: what is waited for behind
    // one, as heads, angles and weights are, is waited for with all that is under way.
    TokenPlace place(args, heads, is_live, is_known);
    Parameters<T, 4> weight[2], cos, sin;
    if (is_live && fours.turn) {
        const int64_t entry = (is_known ? place.position * args.table_stride : 0) + at;
        cos.load(args.cos, entry, args.is_table32);
        sin.load(args.sin, entry, args.is_table32);
    }
    if (weights != nullptr && fours.exist) {
        weight[0].load(weights, fours.first, args.is_weight32);
        weight[1].load(weights, fours.first + fours.apart, args.is_weight32);
    }
    if (is_live && !is_query) {
        place.find_row(args.routing);
    }
    report_token(args, place, is_live, is_known, !is_query);

    // Where heads go, in bytes.
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
        const float inverse_scale = kIsBytes && !is_query ? 1.0f / scale : 1.0f;
        // NOTE: all at once: one behind another they would wait for one another.
        float roots[kSlots] = {1.0f, 1.0f, 1.0f, 1.0f};
        // NOTE: no shuffle where heads may lie across warps.
        if (weights != nullptr) {
            const float root = find_root();
#pragma unroll
            for (int slot = 0; slot < kSlots; ++slot) {
                roots[slot] = of_slot(root, slot);
            }
        }
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            const float its_scale = kIsBytes ? of_slot(inverse_scale, slot) : 1.0f;
            if (!has_head(slot)) {
                continue;
            }
            float values[2][4];
            bits[slot][0].unpack(values[0]);
            bits[slot][1].unpack(values[1]);
            // What is neither normed nor turned stays the bits it is, a nan's too.
            if ((slot < 2 || is_query) && (fours.turn || weights != nullptr)) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    values[i / 4][i % 4] *= roots[slot];
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
        if (weights != nullptr) {
            head_sums.wait();
        }
        load();
    }
}

}  // namespace kernel_hub::kv_cache
