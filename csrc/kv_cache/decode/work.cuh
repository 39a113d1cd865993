// How the caches of a decode step are cut into parts for the blocks, worked out on the device from
// their lengths.
#pragma once

#include <cfloat>

#include "kernel_hub/bounds.cuh"

namespace kernel_hub::kv_cache::decode {

// A longer cache counts as one of so many tokens; no room is larger.
constexpr int kMostTokens = 1 << 30;
// What an item that is a little longer than the others may have more than its parts.
constexpr float kSpare = 0.25f;
// What `Work::splits_of` lets a part be longer, but for rounding.
constexpr float kSlack = 0.12f;
// Rounds of parts of items of one length, and what a part's start takes of `fine_units`.
constexpr int kMostRounds = 4;
constexpr float kStart = 0.0014f;

// How much of its cache a sequence attends to.
struct Extent {
    int length;      // tokens, the new ones included
    int num_tokens;  // of which are in the cache, in case it is too short
    int first_unit, num_units;
    bool is_outside;  // the length is none that the cache has room for
};

// What there is to do, and how it is cut; the attention and the merge read it the same way.
struct Work {
    const int* cache_seqlens;
    int batch_size, seqlen_q, num_new, max_tokens, window_left;
    int unit;   // tokens
    int items;  // of a sequence
    int num_splits, parallel;
    int fine_units, num_sms;  // more units than these, of all items: shares of many sizes

    __device__ __forceinline__ Extent extent_of(int batch_idx) const {
        Extent extent;
        const int given = __ldg(cache_seqlens + batch_idx);
        // Below 0: a finished or padding row, of no tokens, the new ones included.
        extent.length = given < 0 ? 0 : min(given, kMostTokens) + num_new;
        extent.is_outside = extent.length > max_tokens;
        extent.num_tokens = min(extent.length, max_tokens);
        extent.first_unit =
            window_left < 0 ? 0 : max(extent.length - seqlen_q - window_left, 0) / unit;
        const int end = (extent.num_tokens + unit - 1) / unit;
        extent.num_units = max(end - extent.first_unit, 1);
        return extent;
    }
    // Into how many equal shares `units` of all items go. Blocks run side by side at one speed, so
    // that the longest part of a large cache would be waited for: there are as many parts as run at
    // once, or several times as many. But items of one length that are more than multiprocessors
    // and all run at once are best whole.
    // ops/kv_cache/decode_plan.py: `shares_of` is the same.
    // longest: by the mean, which it is hardly above where the items are even.
    __device__ __forceinline__ float shares_of(float units, float longest) const {
        const bool is_even = longest <= 1.125f;
        const float fine = static_cast<float>(fine_units), sms = static_cast<float>(num_sms);
        const float all_items = static_cast<float>(items) * static_cast<float>(batch_size);
        const bool are_whole = is_even && all_items > sms && units <= 24.0f * fine;
        if (units <= fine || are_whole) {
            return static_cast<float>(parallel);
        }
        const float places = 2.0f * sms;
        if (is_even && all_items <= sms && units > 2.0f * fine) {
            // All places are taken, as multiprocessors with one part of two would be waited for, in
            // the rounds whose parts fill them best: so many parts an item, or fewer, or so many in
            // all though each is rounded up.
            const int most = units <= 12.0f * fine ? 1 : units <= 24.0f * fine ? 2 : kMostRounds;
            const float start = __fdividef(kStart * fine * all_items, units);
            float parts = 1.0f, taken = places, least = FLT_MAX;
#pragma unroll 1
            for (int rounds = 1; rounds <= most; ++rounds) {
                const float count = static_cast<float>(rounds);
                const float each = floorf(__fdividef(count * places + 0.5f, all_items));
                const float cost = count * (__fdividef(1.0f, each) + start);
                if (cost < least) {
                    parts = each;
                    taken = count * places;
                    least = cost;
                }
            }
            const float each = fminf(parts - kSpare, __fdividef(parts + kSlack, longest));
            return fmaxf(all_items * each, taken - 0.875f * all_items);
        }
        const float shares = units <= 12.0f * fine   ? fminf(1.5f * sms, places - 0.5f * all_items)
                             : units <= 24.0f * fine ? 3.0f * sms
                                                     : 8.0f * sms;
        // An item of 3/2 of the mean is one share.
        return fmaxf(shares, 2.0f / 3.0f * all_items);
    }
    // Workers a unit, where `units` is the number of units of all sequences, `most` that of the
    // longest.
    __device__ __forceinline__ float workers_per_unit(int units, int most) const {
        const float all = static_cast<float>(units) * static_cast<float>(items);
        const float longest =
            __fdividef(static_cast<float>(most) * static_cast<float>(batch_size), units);
        return __fdividef(shares_of(all, longest), all);
    }
    // Into how many workers' parts the items of a sequence are cut, where num_splits is 0.
    __device__ __forceinline__ int splits_of(int units, float workers) const {
        // An eighth of a share more does not earn a part; many parts take long to merge.
        const int wanted = static_cast<int>(ceilf(fmaf(units, workers, -0.125f)));
        return max(min(wanted, min(units, max(32, units / 2))), 1);
    }
};

// A part of an item, or with kMerge an item that is in parts.
struct Place {
    int batch_idx;  // -1: there is none
    int item, split, num_splits;
    int first_worker;  // of the item; those after it are `items` apart
};

// What worker `index` does; with kMerge, the index-th item that is in parts. Every warp works this
// out for itself, each lane for a run of sequences. Of a sequence come the first parts of all items
// first, so that rows side by side in memory are read at about the same time.
template <bool kMerge>
__device__ __forceinline__ Place find_place(const Work& work, int index) {
    if (work.num_splits > 0) {
        // As many workers for every item, of which a short one leaves some without work.
        const int parts = kMerge ? work.items : work.items * work.num_splits;
        const int batch_idx = index / parts, at = index - batch_idx * parts;
        const int split = at / work.items, item = at - split * work.items;
        const int splits =
            work.num_splits == 1 ? 1 : min(work.num_splits, work.extent_of(batch_idx).num_units);
        const bool is_there = kMerge ? splits > 1 : split < splits;
        const int first_worker = batch_idx * work.items * work.num_splits + item;
        return {is_there ? batch_idx : -1, item, split, splits, first_worker};
    }
    if (work.batch_size == 1) {
        const int units = work.extent_of(0).num_units;
        const int splits = work.splits_of(units, work.workers_per_unit(units, units));
        const bool is_there = index < work.items * (kMerge ? 1 : splits) && (!kMerge || splits > 1);
        const int split = kMerge ? 0 : index / work.items, item = index - split * work.items;
        return {is_there ? 0 : -1, item, split, splits, item};
    }
    const int lane_idx = threadIdx.x & 31;
    const int run = (work.batch_size + 31) / 32;
    const int first = min(lane_idx * run, work.batch_size);
    const int last = min(first + run, work.batch_size);
    int units = 0, most = 0;
#pragma unroll 1
    for (int b = first; b < last; ++b) {
        const int more = work.extent_of(b).num_units;
        units += more;
        most = max(most, more);
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        units += __shfl_xor_sync(~0u, units, mask);
        most = max(most, __shfl_xor_sync(~0u, most, mask));
    }
    const float workers_per_unit = work.workers_per_unit(units, most);

    // Count the workers and the items in parts of each run, and scan them over the lanes.
    int workers = 0, merges = 0;
#pragma unroll 1
    for (int b = first; b < last; ++b) {
        const int splits = work.splits_of(work.extent_of(b).num_units, workers_per_unit);
        workers += splits * work.items;
        merges += splits > 1 ? work.items : 0;
    }
    int workers_scan = workers, merges_scan = merges;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_sync(~0u, workers_scan, lane_idx - distance);
        workers_scan += lane_idx >= distance ? before : 0;
        if (kMerge) {
            const int merges_before = __shfl_sync(~0u, merges_scan, lane_idx - distance);
            merges_scan += lane_idx >= distance ? merges_before : 0;
        }
    }
    const int end = kMerge ? merges_scan : workers_scan;
    int begin = end - (kMerge ? merges : workers);
    const unsigned owners = __ballot_sync(~0u, begin <= index && index < end);
    if (owners == 0) {
        return {-1, 0, 0, 0, 0};
    }

    // The lane that has it looks for the sequence.
    const int owner = __ffs(owners) - 1;
    int batch_idx = first, splits = 1, first_worker = workers_scan - workers;
    if (lane_idx == owner) {
#pragma unroll 1
        for (;; ++batch_idx) {
            splits = work.splits_of(work.extent_of(batch_idx).num_units, workers_per_unit);
            const int parts = splits * work.items;
            const int count = !kMerge ? parts : splits > 1 ? work.items : 0;
            if (index < begin + count) {
                break;
            }
            begin += count;
            first_worker += parts;
        }
    }
    Place place;
    place.batch_idx = __shfl_sync(~0u, batch_idx, owner);
    place.num_splits = __shfl_sync(~0u, splits, owner);
    const int offset = index - __shfl_sync(~0u, begin, owner);
    place.split = kMerge ? 0 : offset / work.items;
    place.item = offset - place.split * work.items;
    place.first_worker = __shfl_sync(~0u, first_worker, owner) + place.item;
    return place;
}

// A run of units of one item.
struct Segment {
    int batch_idx, kv_head, row_block;
    int first_unit, num_units;  // counted from the first token of the cache
    bool is_whole;              // all units of the item
};

}  // namespace kernel_hub::kv_cache::decode
