// mla_decode_sm90.cu: the line, a cut of all items into equal places whatever their lengths.
#pragma once

#include "kv_cache/decode/latent.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

// Items lie one after the other, each of what a part takes besides (kPartUnits) and its units of
// kUnit tokens, and equal places are cut from that: a block has the beginning of an item, whole
// ones, and the end of another, and takes them in this order, from the right to the left, so that
// what it merges with its last part has long been written by the block before. Where lengths are
// nearly the same, every item counts as the longest, so that as many places as items, or twice as
// many, cut none of them at an odd end.
// args.parallel: places where lengths are nearly the same; args.num_workers: else.
template <int kUnit, typename T>
class LatentLine {
  public:
    __device__ __forceinline__ LatentLine(const LatentArgs<T>& args, int item_rows)
        : args_(args),
          items_((args.seqlen_q * args.num_heads + item_rows - 1) / item_rows),
          item_rows_(item_rows),
          run_((args.batch_size + 31) / 32) {}

    // Whether `find` reads each length once and keeps it: then it and `next` may be called while
    // lengths may still be written, and what they found stands if `is_true` afterwards.
    __device__ __forceinline__ bool is_held() const { return run_ <= kHeld; }

    // Reads the lengths. By all lanes of a warp, as is all below; each adds a run of sequences.
    __device__ __forceinline__ void find() {
        const LatentArgs<T>& args = args_;
        const int lane_idx = threadIdx.x & 31;
        const int first = run_first(), last = min(first + run_, args.batch_size);
        int units = 0, most = 0;
        place_ = -1, at_ = 0, begin_ = 0;
        if (is_held()) {
#pragma unroll
            for (int i = 0; i < kHeld; ++i) {
                held_[i] = first + i < last ? read(first + i) : 0;
            }
#pragma unroll
            for (int i = 0; i < kHeld; ++i) {
                const int more = first + i < last ? extent_from(held_[i]).num_units : 0;
                units += more;
                most = max(most, more);
            }
        } else {
#pragma unroll 1
            for (int b = first; b < last; ++b) {
                const int more = extent_from(__ldg(args.cache_seqlens + b)).num_units;
                units += more;
                most = max(most, more);
            }
        }
        const int mine = units;
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
            units += __shfl_xor_sync(~0u, units, mask);
            most = max(most, __shfl_xor_sync(~0u, most, mask));
        }
        const bool is_even =
            static_cast<int64_t>(most) * 8 * args.batch_size <= static_cast<int64_t>(units) * 9;
        even_units_ = is_even ? most : 0;
        const int count = last - first;
        const int length = (is_even ? most * count : mine + kPartUnits * count) * items_;
        run_end_ = length;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int before = __shfl_sync(~0u, run_end_, lane_idx - distance);
            run_end_ += lane_idx >= distance ? before : 0;
        }
        run_begin_ = run_end_ - length;
        length_ = __shfl_sync(~0u, run_end_, 31);
        // No place is without a unit.
        places_ = min(is_even ? args.parallel : args.num_workers, length_);
    }

    // Whether the lengths that are held are those in memory.
    __device__ __forceinline__ bool is_true() const {
        const int first = run_first(), last = min(first + run_, args_.batch_size);
        bool is_same = true;
#pragma unroll
        for (int i = 0; i < kHeld && is_held(); ++i) {
            is_same &= first + i >= last || read(first + i) == held_[i];
        }
        return __all_sync(~0u, is_same);
    }

    // The next part of the block, which is one of `num_blocks`; false: there is none.
    __device__ __forceinline__ bool next(LatentPart& part, int block_idx, int num_blocks) {
        while (true) {
            if (at_ <= begin_) {
                place_ = place_ < 0 ? block_idx : place_ + num_blocks;
                if (place_ >= places_) {
                    return false;
                }
                enter();
            } else {
                if (--item_ < 0) {
                    item_ = items_ - 1;
                    --batch_idx_;
                }
                at_ -= stride_of(extent_of(batch_idx_));
            }
            const Extent extent = extent_of(batch_idx_);
            const int first = unit_at(begin_ - at_, extent), last = unit_at(end_ - at_, extent);
            if (first < last) {
                part = part_of(extent, at_, first, last);
                return true;
            }
        }
    }

  private:
    static constexpr int kPartUnits = kUnit == 64 ? 4 : 3;
    static constexpr int kHeld = 4;  // lengths a lane

    // NOTE: past the L1, which may keep what was there before the launch before had ended.
    __device__ __forceinline__ int read(int batch_idx) const {
        return *static_cast<const volatile int*>(args_.cache_seqlens + batch_idx);
    }
    __device__ __forceinline__ int run_first() const {
        return min(static_cast<int>(threadIdx.x & 31) * run_, args_.batch_size);
    }
    // Of a sequence, the same in all lanes.
    __device__ __forceinline__ Extent extent_of(int batch_idx) const {
        if (!is_held()) {
            return extent_from(__ldg(args_.cache_seqlens + batch_idx));
        }
        const int owner = batch_idx / run_, i = batch_idx - owner * run_;
        int length = held_[0];
#pragma unroll
        for (int k = 1; k < kHeld; ++k) {
            length = i == k ? held_[k] : length;
        }
        return extent_from(__shfl_sync(~0u, length, owner));
    }
    __device__ __forceinline__ Extent extent_from(int length) const {
        return latent_extent<kUnit>(args_, length);
    }
    __device__ __forceinline__ int besides() const { return even_units_ > 0 ? 0 : kPartUnits; }
    __device__ __forceinline__ int stride_of(const Extent& extent) const {
        return even_units_ > 0 ? even_units_ : extent.num_units + kPartUnits;
    }
    // Finds the last item of a place.
    __device__ __forceinline__ void enter() {
        begin_ = begin_of(place_);
        end_ = begin_of(place_ + 1);
        const int last = end_ - 1;
        const int owner = __ffs(__ballot_sync(~0u, run_begin_ <= last && last < run_end_)) - 1;
        batch_idx_ = owner * run_;
        at_ = __shfl_sync(~0u, run_begin_, owner);
        int stride = stride_of(extent_of(batch_idx_));
        while (at_ + stride * items_ <= last) {
            at_ += stride * items_;
            stride = stride_of(extent_of(++batch_idx_));
        }
        item_ = (last - at_) / stride;
        at_ += item_ * stride;
    }
    // floor(place length / places)
    __device__ __forceinline__ int begin_of(int place) const {
        return place * (length_ / places_) + place * (length_ % places_) / places_;
    }
    // The units of an item before a point of the line, counted from its beginning.
    __device__ __forceinline__ int unit_at(int point, const Extent& extent) const {
        return max(min(point - besides(), extent.num_units), 0);
    }
    // The place that has the unit before a point.
    __device__ __forceinline__ int place_before(int point) const {
        return static_cast<int>((static_cast<int64_t>(point) * places_ + length_ - 1) / length_) -
               1;
    }
    __device__ __forceinline__ LatentPart part_of(const Extent& extent, int at, int first,
                                                  int last) const {
        LatentPart part = {};
        part.batch_idx = batch_idx_;
        part.first_row = item_ * item_rows_;
        part.num_rows = min(args_.seqlen_q * args_.num_heads - part.first_row, item_rows_);
        part.first_token = first * kUnit;
        part.end_token = min(last * kUnit, extent.num_tokens);
        part.length = extent.length;
        part.is_whole = first == 0 && last == extent.num_units;
        part.is_outside = extent.is_outside;
        part.item_rows = item_rows_;
        if (!part.is_whole) {
            part.first_place = place_before(at + besides() + 1);
            part.num_parts = place_before(at + besides() + extent.num_units) - part.first_place + 1;
            part.index = place_ - part.first_place;
            part.slot = (2 * place_ + (part.index == 0)) * item_rows_;
        }
        return part;
    }

    const LatentArgs<T>& args_;
    const int items_, item_rows_;  // items of a sequence
    const int run_;                // sequences of a lane
    int places_;
    int held_[kHeld];
    int even_units_;  // what every item counts as; 0: as what it is
    int length_;
    int run_begin_, run_end_;
    int place_ = -1, batch_idx_ = 0, item_ = 0;
    int at_ = 0, begin_ = 0, end_ = 0;  // of the item, of the place
};

}  // namespace kernel_hub::kv_cache::decode::sm90
