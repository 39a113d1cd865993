// How attention forward brings keys and values to shared memory: evenly spaced ones, or by pages.
#pragma once

#include "attention/forward/problem.cuh"

namespace kernel_hub::attention::forward {

// Where a key lies: first its page and the row in it, then (paged) the offset in elements. Page or
// offset below zero: on a page that is not there.
union KeyPlace {
    int2 page_and_row;
    int64_t offset;
};
// An offset that keeps addresses aligned.
constexpr int64_t kNowhere = -8;
static_assert(sizeof(KeyPlace) == 8, "the launch reckons with 8 bytes a key");

// Copies blocks of kBlockN keys and values, blocks counted from the sequence's first key.
template <typename T, int kHeadDim, int kBlockN, int kNumThreads, int kStages, Variant kVariant>
struct KeyLoader {
    using Shape = LoadShape<kHeadDim, kNumThreads>;
    static constexpr int kTileBytes = kBlockN * kHeadDim * 2;

    const AttentionParams<T>& params;
    uint8_t* k_tiles;
    uint8_t* v_tiles;
    const WarpPlace* warp_places;
    KeyPlace* key_places;  // four blocks of them, unless plain
    const T* v;            // this thread's first row and chunk of the next block where plain,
    const T* k;            // else its first chunk of the first page
    int k_start, seqlen_k, block_begin, num_k_cols;
    bool is_paged;

    // Starts to fetch where key `threadIdx.x` of block n lies: (page, row in the page).
    __device__ __forceinline__ void look_up(int n) const {
        const int thread = recomputed(threadIdx.x);
        const int key = n * kBlockN + thread;
        if (n < block_begin || thread >= kBlockN) {
            return;
        }
        int2& place = key_places[(n & 3) * kBlockN + thread].page_and_row;
        if (is_paged) {
            const bool is_key = key < seqlen_k;
            const int page = is_key ? key / params.page_size : 0;
            cp_async_4(shared_address(&place.x),
                       params.block_table + warp_places[thread / 32].table_offset + page, is_key);
            place.y = is_key ? key - page * params.page_size : 0;
        } else {
            place = make_int2(0, k_start + key);
        }
    }

    // Finds out whether the page that this thread has fetched is there, and (paged) turns it into
    // an offset, for K and V alike.
    __device__ __forceinline__ void reckon(int n) const {
        const int thread = recomputed(threadIdx.x);
        if (n < block_begin || thread >= kBlockN) {
            return;
        }
        KeyPlace& place = key_places[(n & 3) * kBlockN + thread];
        const int2 page_and_row = place.page_and_row;
        const bool is_there = is_index(page_and_row.x, params.num_pages);
        report_if(params.flag, !is_there, kPagesOutside);
        if constexpr (kVariant == Variant::kPaged) {
            const int64_t offset =
                page_and_row.x * params.k_strides.batch + page_and_row.y * params.k_strides.token;
            place.offset = is_there ? offset : kNowhere;
        } else if (!is_there) {
            place.page_and_row.x = -1;
        }
    }

    // Starts the copy of block n of K or V; blocks are asked for one after the other, downwards.
    __device__ __forceinline__ void load(uint8_t* target, const T*& base, int64_t page_stride,
                                         int64_t token_stride, int num_cols, int n) {
        const T* source = base;
        load_tile<T, kHeadDim, kBlockN, kNumThreads, kVariant == Variant::kGeneral>(
            target, seqlen_k - n * kBlockN - recomputed(threadIdx.x) / Shape::kLanes, num_cols,
            params.is_aligned, [&](int row) {
                if constexpr (kVariant == Variant::kPaged) {
                    const int64_t offset = key_places[(n & 3) * kBlockN + row].offset;
                    return RowPlace<T>{base + offset, offset >= 0};
                } else if constexpr (kVariant == Variant::kGeneral) {
                    const int2 place = key_places[(n & 3) * kBlockN + row].page_and_row;
                    return RowPlace<T>{base + place.x * page_stride + place.y * token_stride,
                                       place.x >= 0};
                } else {
                    const T* here = source;
                    source += Shape::kRowStep * token_stride;
                    return RowPlace<T>{here, true};
                }
            });
        if constexpr (kVariant == Variant::kPlain) {
            base -= kBlockN * token_stride;
        }
    }

    __device__ __forceinline__ void load_k(int n) {
        load(k_tiles + (n % kStages) * kTileBytes, k, params.k_strides.batch,
             params.k_strides.token, num_k_cols, n);
    }
    __device__ __forceinline__ void load_v(int n) {
        const int num_cols = params.head_dim_v - recomputed(threadIdx.x) % Shape::kLanes * 8;
        load(v_tiles + (n % kStages) * kTileBytes, v, params.v_strides.batch,
             params.v_strides.token, num_cols, n);
    }
};

}  // namespace kernel_hub::attention::forward
