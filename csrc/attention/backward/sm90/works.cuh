// flash_attention_backward_sm90.cu: what the kernels leave each other, and which block of keys a
// block's index stands for.
#pragma once

#include <stdint.h>

#include "attention/backward/sm90/order.cuh"
#include "kernel_hub/math.cuh"

namespace kernel_hub::attention::backward::sm90 {

// How many sums of dq there are, one after another, and whether blocks of keys take turns in adding
// to them: block i adds to sum i % num_sums, after those of lower keys that add to it.
struct Sums {
    int num_sums;
    bool has_turns;

    // As a launch's number: negative without turns.
    __device__ __forceinline__ explicit Sums(int number)
        : num_sums(max(number, -number)), has_turns(number > 0) {}
};

// What the kernels leave each other, part by part in one piece of memory: `num_rows` rows of each
// of the sums of dq, of lse in units of log 2 and of delta, a counter, the order of ragged
// sequences, then the turns of each block of queries of each of the sums: a consumer's own, whose
// parts of dq have nothing in common with the other's, or those of both.
struct Workspace {
    static constexpr int kTurns = 2;  // of a block

    int64_t num_rows;
    Sums sums;
    float *dq_sums, *lse, *delta;
    int* taken;  // works of the main kernel's blocks after their first ones
    int* order;  // RaggedKeys
    int* turns;  // [sum][block][consumer], or null

    // num_ordered: numbers of the order.
    __device__ __forceinline__ Workspace(float* memory, int64_t num_rows_, int padded_head_dim,
                                         Sums sums_, int num_ordered)
        : num_rows(num_rows_),
          sums(sums_),
          dq_sums(memory),
          lse(memory + sums.num_sums * num_rows * padded_head_dim),
          delta(lse + num_rows),
          taken(reinterpret_cast<int*>(delta + num_rows)),
          order(taken + 1),
          turns(sums.has_turns ? order + num_ordered : nullptr) {}
};

struct Place {
    int batch_idx, head_idx, key_block;
};

// A block of keys of a head of dk and dv is a work. Those from `first_parted` on, the last ones,
// are shared by `num_parts` blocks each, where all of them whole would end unevenly.
struct Works {
    int num_blocks;       // of keys, of the longest sequence
    int num_pairs;        // of a sequence and a head of dk
    int pairs_per_group;  // this many run through their blocks of keys together
    int first_size;       // the first ones that do may be fewer
    int first_half;       // this many of their blocks of keys come first, or all
    int num_heads;        // of dk
    int num_works;        // of ragged sequences no fewer than there are
    int first_parted, num_parts;

    // How many blocks there is work for.
    __device__ __forceinline__ int count() const {
        return first_parted + (num_works - first_parted) * num_parts;
    }
    // Where a part of dk or dv lies, in blocks of keys: those of dv follow those of dk.
    __device__ __forceinline__ int64_t part_of(bool is_dv, int part) const {
        return (is_dv ? count() - first_parted : 0) + part;
    }
    // NOTE: of a pair, lower keys have lower works: what a block waits for begins before it.
    // False: there are not so many. Whole warps, the same work in all lanes.
    __device__ __forceinline__ bool find(int work, const RaggedKeys& keys, Place& place) const {
        if (!keys.cu_seqlens) {
            place = find_alike(work);
            return true;
        }
        // Of so many sequences the first blocks of keys come first, then the second ones.
        const int sequences = max(over(pairs_per_group, num_heads), 1);
        int first = 0, left;
        if (!find_sequences(keys, sequences, work, first, left)) {
            return false;
        }
        if (left > 1) {
            place = find_in_group(keys, work, first, left);
            place.batch_idx = keys.batch(place.batch_idx);
        } else {
            place = find_heads(work, keys.blocks(first));
            place.batch_idx = keys.batch(first);
        }
        return true;
    }
    // Where all pairs have as many blocks of keys. The last half of a group's, of which causal ones
    // have few queries, comes in turn with the first half of the next group's: else they would
    // begin sooner than their turns come. A thread.
    __device__ __forceinline__ Place find_alike(int work) const {
        // Pairs from first_pair on are at their first half, `late` pairs before it at their last.
        int first_pair = 0, late = 0, early = first_size;
        int rest = work - first_half * early;
        if (rest < 0) {
            rest = work;
        } else {
            first_pair = early;
            late = first_half < num_blocks ? early : 0;
            const int next = first_half * pairs_per_group + (num_blocks - first_half) * late;
            if (rest >= next) {
                rest -= next;
                late = first_half < num_blocks ? pairs_per_group : 0;
                const int groups = over(rest, pairs_per_group * num_blocks);
                rest -= groups * pairs_per_group * num_blocks;
                first_pair += (groups + 1) * pairs_per_group;
            }
            early = first_pair < num_pairs ? pairs_per_group : 0;
        }
        const int step = over(rest, early + late);
        rest -= step * (early + late);
        if (step >= num_blocks - first_half) {
            late = 0;
        }
        const int pair = first_pair + rest - late, nth = over(pair, num_heads);
        return {nth, pair - nth * num_heads, rest < late ? first_half + step : step};
    }

  private:
    // Of the heads of one sequence.
    __device__ __forceinline__ Place find_heads(int work, int blocks) const {
        const int heads = min(pairs_per_group, num_heads);
        const int first = over(work, heads * blocks) * heads, size = min(heads, num_heads - first);
        const int rest = work - first * blocks, key_block = over(rest, size);
        return {0, first + rest - key_block * size, key_block};
    }
    // Which `sequences` sequences, or the `left` last ones, have a work, which becomes one of
    // theirs.
    __device__ __forceinline__ bool find_sequences(const RaggedKeys& keys, int sequences, int& work,
                                                   int& first, int& left) const {
        const int lane_idx = threadIdx.x % 32;
        int chunk;
        left = over(num_pairs, num_heads);
        do {
            chunk = over(left + 32 * sequences - 1, 32 * sequences) * sequences;
            const int end = first + min(left, (lane_idx + 1) * chunk);
            const unsigned those = __ballot_sync(kAllLanes, num_heads * keys.end(end) <= work);
            if (those == kAllLanes) {
                return false;
            }
            const int before = __popc(those) * chunk;
            first += before;
            left = min(chunk, left - before);
        } while (chunk > sequences);
        work -= num_heads * keys.end(first);
        return true;
    }
    // Of `count` sequences from `first` on, which run through their blocks of keys together.
    __device__ __forceinline__ Place find_in_group(const RaggedKeys& keys, int work, int first,
                                                   int count) const {
        // The last block of keys before which there is no more work.
        int low = 0, high = num_blocks, before = 0;
#pragma unroll 1
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            int own = 0;
#pragma unroll 1
            for (int i = first + threadIdx.x % 32; i < first + count; i += 32) {
                own += min(keys.blocks(i), middle);
            }
            const int works = num_heads * __reduce_add_sync(kAllLanes, own);
            if (works <= work) {
                low = middle;
                before = works;
            } else {
                high = middle;
            }
        }
        // Those with more blocks come first.
        const int nth = over(work - before, num_heads);
        return {first + nth, work - before - nth * num_heads, low};
    }
};

}  // namespace kernel_hub::attention::backward::sm90
