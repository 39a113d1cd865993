// flash_attention_sm90.cu: which tile comes when.
#pragma once

#include "attention/sm90/plan.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/reduce.cuh"

namespace kernel_hub::attention::sm90 {

template <class C>
__device__ __forceinline__ int count_rows(int seqlen_q) {
    return (seqlen_q + C::kBlockM - 1) / C::kBlockM;
}

// Row blocks of a sequence that are worked on: no more than the longest may have, so that their
// number stays an int whatever cu_seqlens say.
template <class C>
__device__ __forceinline__ int count_rows(const Parameters& p, int seqlen_q) {
    return count_rows<C>(min(seqlen_q, p.seqlen_q));
}

__device__ __forceinline__ bool has_lengths(const Parameters& p) {
    return p.cu_seqlens_q || p.cu_seqlens_k || p.cache_seqlens;
}

__device__ __forceinline__ bool has_order(const Parameters& p) {
    return has_lengths(p) && p.batch_size <= Order::kMost;
}

// Of as many keys and tiles each, at most.
__device__ __forceinline__ int sequences_a_group(const Parameters& p) {
    return max(1, min(Order::kMostAlike, p.heads_per_group / p.num_heads));
}

// Tiles of a sequence; none where there are no keys.
template <class C>
__device__ __forceinline__ int count_tiles(const Parameters& p, int batch) {
    const int rows = count_rows<C>(p, find_queries(p, batch).count);
    return find_keys(p, batch).count > 0 ? rows * p.num_heads : 0;
}

// Sorts the sequences by their keys, and finds those that are alike. Every thread of the block;
// ends with a barrier.
template <class C>
__device__ __forceinline__ void make_order(const Parameters& p, Order& order) {
    const int batch = threadIdx.x;
    const bool is_one = batch < p.batch_size;
    int keys = 0, tiles = 0, rank = 0;
    bool follows = false;
    if (is_one) {
        tiles = count_tiles<C>(p, batch);
        keys = tiles > 0 ? find_keys(p, batch).count : 0;
    }
    if (batch < Order::kMost) {
        order.end[batch] = is_one ? keys : -1;
    }
    __syncthreads();
    if (is_one) {
        rank = rank_among(order.end, p.batch_size, batch, keys);
    }
    __syncthreads();
    if (is_one) {
        order.end[rank] = keys;
    }
    __syncthreads();
    if (is_one) {
        follows = rank % 32 % sequences_a_group(p) != 0 && order.end[rank - 1] == keys;
    }
    __syncthreads();
    if (is_one) {
        order.end[rank] = follows ? ~tiles : tiles;
        order.batch[rank] = batch;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        int sum = 0;
#pragma unroll 1
        for (int first = 0; first < p.batch_size; first += 32) {
            const int i = first + threadIdx.x, found = i < p.batch_size ? order.end[i] : 0;
            const int own = max(found, ~found), left = __shfl_up_sync(kAllLanes, own, 1);
            const unsigned begins = __ballot_sync(kAllLanes, found >= 0 || own != left);
            const int end = sum + warp_scan(own, threadIdx.x % 32);
            const int begin =
                __shfl_sync(kAllLanes, end - own, 31 - __clz(begins & (2u << threadIdx.x) - 1));
            if (i < p.batch_size) {
                order.end[i] = threadIdx.x == 31 || begins >> threadIdx.x & 2 ? end : begin;
            }
            sum = __shfl_sync(kAllLanes, end, 31);
        }
        order.count = sum;
    }
    __syncthreads();
}

// The tile of row block `row` of a head: its lengths and the blocks of keys that it sees.
template <class C>
__device__ __forceinline__ Tile describe(const Parameters& p, int row, int batch, int head) {
    Tile tile;
    tile.row_begin = row * C::kBlockM;
    tile.batch = batch;
    tile.head = head;
    const RowRange queries = find_queries(p, batch);
    tile.q_begin = queries.start;
    tile.seqlen_q = queries.count;
    tile.seqlen_k = find_keys(p, batch).count;
    int key_begin = 0, key_end = tile.seqlen_k;
    if (C::kMask != Mask::kFull && p.window_right >= 0) {
        const int row_end = min(tile.row_begin + C::kBlockM, tile.seqlen_q);
        key_end = min(key_end, row_end + tile.offset() + p.window_right);
    }
    if (C::kMask == Mask::kWindow && p.window_left >= 0) {
        key_begin = max(0, tile.row_begin + tile.offset() - p.window_left);
    }
    tile.block_begin = key_begin / C::kBlockN;
    tile.block_end = key_end > key_begin ? (key_end + C::kBlockN - 1) / C::kBlockN : 0;
    return tile;
}

// Whether the first tiles of a sequence see the fewest keys.
template <class C>
__device__ __forceinline__ bool grows_downwards(const Parameters& p) {
    return C::kMask == Mask::kCausal || (C::kMask == Mask::kWindow && p.window_right >= 0);
}

// The last block to come here leaves the counter as it found it. One thread of each.
__device__ __forceinline__ void give_back(int* tile_counter) {
    __threadfence();
    const unsigned last = gridDim.x - 1;
    if (atomicInc(reinterpret_cast<unsigned*>(tile_counter + 1), last) == last) {
        atomicExch(tile_counter, 0);
    }
}

// Walks through the schedule. Where the first tiles see the fewest keys, they come last, within
// groups of heads whose keys and values stay in the L2.
template <class C>
struct Schedule {
    const Parameters& p;
    Order& order;
    int cursor = 0;  // in `order`; without one, the sequence

    // Tile number `index`, which must not fall from call to call; of a whole warp. False after the
    // last one; row_begin is beyond seqlen_q where there is no such tile.
    __device__ __forceinline__ bool find(int index, Tile& tile) {
        int batch = -1, alike = 1;
        if (has_order(p)) {
            if (index >= order.count) {
                return false;
            }
            unsigned before = kAllLanes;
#pragma unroll 1
            while (before == kAllLanes) {
                const int i = cursor + threadIdx.x % 32;
                before = __ballot_sync(kAllLanes, i < p.batch_size && order.end[i] <= index);
                cursor += __popc(before);
            }
            const int begin = cursor == 0 ? 0 : order.end[cursor - 1];
            const int back = cursor - 1 - threadIdx.x % 32;
            const unsigned others = __ballot_sync(kAllLanes, back < 0 || order.end[back] != begin);
            // The last of those before a group ends where it begins.
            alike = __ffs(others) - 1 + (begin == 0);
            index -= begin;
            batch = order.batch[cursor];
        } else if (has_lengths(p)) {
            int count = order.count, before = 32;
#pragma unroll 1
            while (before == 32 && cursor < p.batch_size) {
                const int own = cursor + threadIdx.x % 32;
                const int tiles = own < p.batch_size ? count_tiles<C>(p, own) : 0;
                const int end = count + warp_scan(tiles, threadIdx.x % 32);
                before = __popc(__ballot_sync(kAllLanes, end <= index));
                count = before == 0 ? count : __shfl_sync(kAllLanes, end, before - 1);
                cursor += before;
            }
            if (cursor >= p.batch_size) {
                return false;
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) {
                order.count = count;
            }
            __syncwarp();
            batch = cursor;
            index -= count;
        }
        const int num_heads = fresh(p.num_heads);
        int num_rows = fresh(count_rows<C>(p.seqlen_q)), num_pairs = p.batch_size * num_heads;
        int heads_per_group = C::kMask == Mask::kFull ? p.heads_per_group : abs(p.heads_per_group);
        if (batch >= 0) {
            num_rows = count_rows<C>(p, find_queries(p, batch).count);
            num_pairs = alike * num_heads;
            heads_per_group = min(num_pairs, heads_per_group);
        } else if (index >= num_rows * num_pairs) {
            return false;
        }
        int row, pair;
        if (grows_downwards<C>(p)) {
            const int group = index / (heads_per_group * num_rows);
            const int first = group * heads_per_group;
            const int size = min(heads_per_group, num_pairs - first);
            const int rest = index - first * num_rows;
            row = num_rows - 1 - rest / size;
            pair = first + rest % size;
        } else {
            row = index % num_rows;
            pair = index / num_rows;
        }
        const int sequence = pair / num_heads;
        if (batch < 0) {
            batch = sequence;
        } else if (alike > 1) {
            batch = order.batch[cursor - alike + 1 + sequence];
        }
        tile = describe<C>(p, row, batch, pair - sequence * num_heads);
        return true;
    }
};

}  // namespace kernel_hub::attention::sm90
