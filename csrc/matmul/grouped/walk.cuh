// The tiles of many products in one launch: which rows of a, which matrix of b a tile is of.
#pragma once

#include "kernel_hub/bounds.cuh"

namespace kernel_hub::matmul::grouped {

// A tile of out, or a pair of neighbouring ones. Rows are counted in the whole of a for grouped
// products, in one matrix of it for batched ones.
struct Place {
    int first_row, end_row;  // of the product this tile is part of
    int tile_row, tile_column;
    int matrix;         // of b
    bool is_one_below;  // of a pair: the other tile is the next row's, else the next column's
};

// The tiles of one product: rows x columns, walked in groups of `group` rows, column by column in
// a group, so that what is fetched stays in the L2.
// kPairs: two tiles at a time, one below the other, so that they share rows of b; where the number
// of rows is odd, those of the last row side by side, so that they share rows of a.
template <bool kPairs>
struct ProductTiles {
    int columns, group;

    __device__ __forceinline__ int count(int rows) const {
        return kPairs ? rows / 2 * columns + rows % 2 * ((columns + 1) / 2) : rows * columns;
    }

    __device__ __forceinline__ void place(int tile, int rows, Place& place) const {
        const int units = kPairs ? rows / 2 : rows;
        place.is_one_below = !kPairs || tile < units * columns;
        if (!place.is_one_below) {
            place.tile_row = rows - 1;
            place.tile_column = 2 * (tile - units * columns);
            return;
        }
        if (units == 1) {  // without the divisions below
            place.tile_row = 0;
            place.tile_column = tile;
            return;
        }
        const int of_group = group * columns;
        const int first = tile / of_group * group;
        const int here = min(group, units - first);
        const int in_group = tile % of_group;
        place.tile_row = (first + in_group % here) * (kPairs ? 2 : 1);
        place.tile_column = in_group / here;
    }
};

// Product e is rows offsets[e] to offsets[e + 1] - 1 of a times matrix e of b. A lane holds the
// offsets of kPerLane products; a warp looks at 32 kPerLane at a time. No offset is read before it
// is needed, none twice: tiles are asked for in ascending order.
// NOTE: offsets are cut to 0 .. num_rows and a product of fewer than no rows is none, so that wrong
// ones reach no memory outside; counts are cut to most_, which offsets in order do not pass, so
// that they stay ints (kernel_hub/ops/matmul/grouped_plan.py refuses more).
template <bool kPairs>
class GroupedWalk {
  public:
    __device__ __forceinline__ GroupedWalk(const int* offsets, int* flag, int num_products,
                                           int num_rows, int rows_per_tile, int columns, int group)
        : tiles_{columns, group},
          offsets_(offsets),
          flag_(flag),
          num_products_(num_products),
          num_rows_(num_rows),
          rows_per_tile_(rows_per_tile),
          most_((num_rows / rows_per_tile + num_products) * columns) {
        look_at(0, 0);
    }

    // All tiles; more than any number of them where that is not known at once.
    __device__ __forceinline__ int total() const {
        return num_products_ <= kChunk ? to_ : kUnknown;
    }

    // Finds a tile, counted over all products; false where there are fewer. Whole warps.
    __device__ __forceinline__ bool find(int tile, Place& place) {
        while (tile >= to_) {
            if (chunk_ + kChunk >= num_products_ || tile >= most_) {
                return false;
            }
            look_at(chunk_ + kChunk, to_);
        }
        const int owner = __ffs(static_cast<int>(__ballot_sync(~0u, tile < lane_to_))) - 1;
        int before = lane_from_, product = 0, first = bounds_[0], end = bounds_[1];
#pragma unroll
        for (int i = 1; i < kPerLane; ++i) {
            const int next = before + tiles_.count(rows_of(first, end));
            if (product == i - 1 && tile >= next) {
                before = next;
                product = i;
                first = bounds_[i];
                end = bounds_[i + 1];
            }
        }
        before = __shfl_sync(~0u, before, owner);
        place.first_row = __shfl_sync(~0u, first, owner);
        place.end_row = __shfl_sync(~0u, end, owner);
        place.matrix = chunk_ + owner * kPerLane + __shfl_sync(~0u, product, owner);
        tiles_.place(tile - before, rows_of(place.first_row, place.end_row), place);
        return true;
    }

  private:
    static constexpr int kPerLane = 4, kChunk = 32 * kPerLane, kUnknown = 0x40000000;

    // Rows of tiles.
    __device__ __forceinline__ int rows_of(int first, int end) const {
        return end > first ? (end - first + rows_per_tile_ - 1) / rows_per_tile_ : 0;
    }

    // Takes products from `chunk` on, before which there are `before` tiles.
    __device__ __forceinline__ void look_at(int chunk, int before) {
        const int lane = threadIdx.x % 32;
        chunk_ = chunk;
        bool is_outside = false;
#pragma unroll
        for (int i = 0; i <= kPerLane; ++i) {
            const int at = min(chunk + lane * kPerLane + i, num_products_);
            const int given = __ldg(offsets_ + at);
            bounds_[i] = min(max(given, 0), num_rows_);
            is_outside |= given != bounds_[i] || bounds_[i] < bounds_[max(i - 1, 0)];
        }
        report_if(flag_, is_outside, kOffsetsOutside);
        int mine = 0;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            mine = min(mine + tiles_.count(rows_of(bounds_[i], bounds_[i + 1])), most_);
        }
        int to = mine;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int lower = __shfl_sync(~0u, to, max(lane - distance, 0));
            to = lane >= distance ? min(to + lower, most_) : to;
        }
        lane_from_ = before + to - mine;
        lane_to_ = min(before + to, most_);
        to_ = __shfl_sync(~0u, lane_to_, 31);
    }

    ProductTiles<kPairs> tiles_;
    const int* offsets_;  // (num_products + 1)
    int* flag_;           // what offsets led outside (bounds.cuh), or null
    int num_products_, num_rows_, rows_per_tile_;
    int most_;                  // tiles that offsets in order can make
    int chunk_;                 // the first product looked at
    int bounds_[kPerLane + 1];  // of this lane's products
    int lane_from_, lane_to_;   // tiles before and up to the end of this lane's products
    int to_;                    // tiles up to the end of all that are looked at
};

// Product i is matrix i of a times matrix i of b, all of num_rows rows.
template <bool kPairs>
class BatchedWalk {
  public:
    __device__ __forceinline__ BatchedWalk(int num_products, int num_rows, int rows_per_tile,
                                           int columns, int group)
        : tiles_{columns, group},
          num_products_(num_products),
          num_rows_(num_rows),
          rows_((num_rows + rows_per_tile - 1) / rows_per_tile),
          count_(tiles_.count(rows_)) {}

    __device__ __forceinline__ int total() const { return num_products_ * count_; }

    __device__ __forceinline__ bool find(int tile, Place& place) const {
        place.matrix = tile / count_;
        place.first_row = 0;
        place.end_row = num_rows_;
        tiles_.place(tile % count_, rows_, place);
        return place.matrix < num_products_;
    }

  private:
    ProductTiles<kPairs> tiles_;
    int num_products_, num_rows_, rows_, count_;
};

}  // namespace kernel_hub::matmul::grouped
