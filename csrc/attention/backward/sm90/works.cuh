// flash_attention_backward_sm90.cu: what the kernels leave each other, and which block of keys a
// block's index stands for.
#pragma once

#include <stdint.h>

namespace kernel_hub::attention::backward::sm90 {

// Of numbers that are not negative: half of the instructions of `/`.
__device__ __forceinline__ int over(int a, int b) {
    return static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b));
}

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
// of the sums of dq, of lse in units of log 2 and of delta, a counter, then a turn a block of
// queries of each of the sums.
struct Workspace {
    int64_t num_rows;
    Sums sums;
    float *dq_sums, *lse, *delta;
    int* taken;  // works of the main kernel's blocks after their first ones
    int* turns;  // or null

    __device__ __forceinline__ Workspace(float* memory, int64_t num_rows_, int padded_head_dim,
                                         Sums sums_)
        : num_rows(num_rows_),
          sums(sums_),
          dq_sums(memory),
          lse(memory + sums.num_sums * num_rows * padded_head_dim),
          delta(lse + num_rows),
          taken(reinterpret_cast<int*>(delta + num_rows)),
          turns(sums.has_turns ? taken + 1 : nullptr) {}
};

// A block of keys of a head of dk and dv is a work. Those from `first_parted` on, the last ones,
// are shared by `num_parts` blocks each, where all of them whole would end unevenly.
struct Works {
    int num_blocks;       // of keys, of the longest sequence
    int num_pairs;        // of a sequence and a head of dk
    int pairs_per_group;  // this many run through their blocks of keys together
    int num_heads;        // of dk
    int first_parted, num_parts;

    // How many blocks there is work for.
    __device__ __forceinline__ int count() const {
        const int num_works = num_blocks * num_pairs;
        return first_parted + (num_works - first_parted) * num_parts;
    }
    // Where a part of dk or dv lies, in blocks of keys: those of dv follow those of dk.
    __device__ __forceinline__ int64_t part_of(bool is_dv, int part) const {
        return (is_dv ? count() - first_parted : 0) + part;
    }
    // NOTE: of a pair, lower keys have lower works: what a block waits for begins before it.
    __device__ __forceinline__ void find(int work, int& batch_idx, int& head_idx,
                                         int& key_block) const {
        const int group_blocks = pairs_per_group * num_blocks;
        const int first_pair = over(work, group_blocks) * pairs_per_group;
        const int group_size = min(pairs_per_group, num_pairs - first_pair);
        const int rest = work - first_pair * num_blocks;
        key_block = over(rest, group_size);
        const int pair = first_pair + rest - key_block * group_size;
        batch_idx = over(pair, num_heads);
        head_idx = pair - batch_idx * num_heads;
    }
};

}  // namespace kernel_hub::attention::backward::sm90
