// flash_attention_backward_sm90.cu: what the kernels leave each other, and which block of keys each
// block works on.
#pragma once

#include <cstdint>

namespace kernel_hub::attention::backward::sm90 {

// Of numbers that are not negative: half of the instructions of `/`.
__device__ __forceinline__ int over(int a, int b) {
    return static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b));
}

// What the kernels leave each other, part by part in one piece of memory: `num_rows` rows of the
// sums of dq, of lse in units of log 2 and of delta, a counter, then two turns a block of queries.
struct Workspace {
    float *dq_sums, *lse, *delta;
    int* taken;  // works of blocks that go on; without turns after their first ones
    int* turns;  // or null

    __device__ __forceinline__ Workspace(float* memory, int64_t num_rows, int padded_head_dim,
                                         int team)
        : dq_sums(memory),
          lse(memory + num_rows * padded_head_dim),
          delta(lse + num_rows),
          taken(reinterpret_cast<int*>(delta + num_rows)),
          turns(team != 0 ? taken + 1 : nullptr) {}
};

// A block of keys of a head of dk and dv is a work. Those from `first_parted` on, the last ones,
// are shared by `num_parts` blocks each, where all of them whole would end unevenly.
struct Works {
    int num_blocks;       // of keys, of the longest sequence
    int num_pairs;        // of a sequence and a head of dk
    int pairs_per_group;  // this many run through their blocks of keys together
    int num_heads;        // of dk
    int first_parted, num_parts;
    // How blocks take turns in adding to dq: 0, they do not; -1, after those of higher keys, which
    // are scheduled before them; else `team` neighbours begin at queries that lie apart and pass
    // on to each other what they are through with, and teams follow one another from low keys on.
    // Those of a team must run at the same time, so they are next to each other.
    int team;

    // How many blocks there is work for.
    __device__ __forceinline__ int count() const {
        const int num_works = num_blocks * num_pairs;
        return first_parted + (num_works - first_parted) * num_parts;
    }
    // Where a part of dk or dv lies, in blocks of keys: those of dv follow those of dk.
    __device__ __forceinline__ int64_t part_of(bool is_dv, int part) const {
        return (is_dv ? count() - first_parted : 0) + part;
    }
    // With turns after higher keys, the last ones of a sequence come first: what a block waits for
    // is scheduled before it, and causal blocks wait least.
    __device__ __forceinline__ void find(int work, int& batch_idx, int& head_idx,
                                         int& key_block) const {
        const int group_blocks = pairs_per_group * num_blocks;
        const int first_pair = over(work, group_blocks) * pairs_per_group;
        const int group_size = min(pairs_per_group, num_pairs - first_pair);
        const int most = max(1, team);
        const int rest = work - first_pair * num_blocks;
        const int first = over(rest, group_size * most) * most;  // block of keys of a team
        const int members = min(most, num_blocks - first);
        const int of_team = rest - first * group_size;
        const int nth = first + of_team % members, pair = first_pair + of_team / members;
        batch_idx = pair / num_heads;
        head_idx = pair % num_heads;
        key_block = team < 0 ? num_blocks - 1 - nth : nth;
    }
    // What a block's index stands for; part: where its part of dk and dv lies, -1: there is none;
    // nth_part: which one of the work's.
    __device__ __forceinline__ int work_of(int index, int& part, int& nth_part) const {
        part = index - first_parted;
        nth_part = 0;
        if (part < 0) {
            return index;
        }
        // All members' first parts, then their second ones.
        const int most = max(1, team);
        const int first = over(part, most * num_parts) * most, of_team = part - first * num_parts;
        nth_part = over(of_team, most);
        const int work = first + of_team - nth_part * most;
        part = work * num_parts + nth_part;
        return first_parted + work;
    }
};

}  // namespace kernel_hub::attention::backward::sm90
