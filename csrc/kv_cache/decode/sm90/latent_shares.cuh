// mla_decode_sm90.cu: the cut where there is no line, of lengths that are held.
#pragma once

#include "kv_cache/decode/latent.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

constexpr int kSplitUnit = 64;  // tokens at whose multiples caches are cut where there is no line

// What `find_place` of decode/work.cuh finds, and the merge behind: each lane has a sequence, whose
// length it reads once, so that parts may be found while lengths may still be written; they stand
// if `is_true` afterwards. By all lanes of a warp.
//
// Where args.num_splits is given nothing is held: a part is found of its own length. Else there are
// no more sequences than lanes (ops/kv_cache/mla_plan.py).
template <typename T>
class LatentShares {
  public:
    __device__ __forceinline__ LatentShares(const LatentArgs<T>& args, int item_rows)
        : args_(args),
          items_((args.seqlen_q * args.num_heads + item_rows - 1) / item_rows),
          item_rows_(item_rows) {}

    __device__ __forceinline__ bool is_held() const { return args_.num_splits == 0; }

    // Reads the lengths, and counts the workers of each.
    __device__ __forceinline__ void find() {
        const bool is_there = lane() < args_.batch_size;
        held_ = is_there ? read(lane()) : 0;
        int units = is_there ? extent_of(held_).num_units : 0, most = units;
        splits_ = units;
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
            units += __shfl_xor_sync(~0u, units, mask);
            most = max(most, __shfl_xor_sync(~0u, most, mask));
        }
        const Work work = {.batch_size = args_.batch_size,
                           .items = items_,
                           .parallel = args_.parallel,
                           .fine_units = 1 << 30,
                           .num_sms = 1};
        splits_ = work.splits_of(splits_, work.workers_per_unit(units, most));
        const int workers = is_there ? items_ * splits_ : 0;
        end_ = workers;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int before = __shfl_sync(~0u, end_, lane() - distance);
            end_ += lane() >= distance ? before : 0;
        }
        begin_ = end_ - workers;
    }

    // Whether the lengths that are held are those in memory.
    __device__ __forceinline__ bool is_true() const {
        return __all_sync(~0u, lane() >= args_.batch_size || read(lane()) == held_);
    }

    // What worker `index` does; batch_idx -1: nothing.
    __device__ __forceinline__ LatentPart part(int index) const {
        LatentPart part = {};
        part.batch_idx = -1;
        int owner, offset, splits, length;
        if (is_held()) {
            const unsigned owners = __ballot_sync(~0u, begin_ <= index && index < end_);
            if (owners == 0) {
                return part;
            }
            owner = __ffs(owners) - 1;
            offset = index - __shfl_sync(~0u, begin_, owner);
            splits = __shfl_sync(~0u, splits_, owner);
            length = __shfl_sync(~0u, held_, owner);
        } else {
            const int workers = items_ * args_.num_splits;
            owner = index / workers;
            offset = index - owner * workers;
            length = read(owner);
            splits = min(args_.num_splits, extent_of(length).num_units);
        }
        const Extent extent = extent_of(length);
        const int split = offset / items_, item = offset - split * items_;
        if (split >= splits) {
            return part;
        }
        const int count = extent.num_units / splits, rest = extent.num_units % splits;
        const int first = split * count + min(split, rest);
        const int end = first + count + (split < rest ? 1 : 0);
        part.batch_idx = owner;
        part.first_row = item * item_rows_;
        part.num_rows = min(args_.seqlen_q * args_.num_heads - part.first_row, item_rows_);
        part.slot = index * item_rows_;
        part.first_token = first * kSplitUnit;
        part.end_token = min(end * kSplitUnit, extent.num_tokens);
        part.length = extent.length;
        part.is_whole = splits == 1;
        part.is_outside = extent.is_outside;
        return part;
    }

  private:
    static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }
    // NOTE: past the L1, which may keep what was there before the launch before had ended.
    __device__ __forceinline__ int read(int batch_idx) const {
        return *static_cast<const volatile int*>(args_.cache_seqlens + batch_idx);
    }
    __device__ __forceinline__ Extent extent_of(int length) const {
        return latent_extent<kSplitUnit>(args_, length);
    }

    const LatentArgs<T>& args_;
    const int items_, item_rows_;  // items of a sequence
    int held_, splits_;            // of the lane's sequence
    int begin_, end_;              // its workers
};

}  // namespace kernel_hub::kv_cache::decode::sm90
