// flash_attention_backward_sm90.cu: what is done row by row, before (delta) and after (convert) the
// main kernel.
#pragma once

#include "attention/backward/sm90/plan.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub::attention::backward::sm90 {

constexpr int kRowThreads = 128, kMostHeadDim = 256;
constexpr int kSumsAStep = 4 * kRowThreads / kTileRows;  // of 16 rows, cleared at a time

// How the workspace is laid out, and where the rows lie in the tensors.
struct RowBlocks {
    const int* cu_seqlens_q;
    int64_t num_blocks_q;  // of a head
    int batch_size;
    int num_tiles;  // of 16 rows, of the longest sequence
    int seqlen_q, total_q, head_dim;
    int padded, block_m;  // head_dim and kBlockM of the main kernel
};

// Where a fragment lies in a block's sums: panels of block_m x 64, the last one maybe narrower.
__device__ __forceinline__ int fragment_at(const RowBlocks& p, int row16, int col8) {
    const int width8 = min(p.padded / 8 - col8 / 8 * 8, 8);
    return col8 / 8 * (p.block_m / 2) + row16 * width8 + col8 % 8;
}

// Which 16 rows of a head a block works on.
struct RowTile {
    int batch_idx, head_idx, first_query, seqlen;
    int first;          // row of its block in the workspace
    int64_t first_row;  // in the workspace
    int64_t token;      // of query 0, in the tensors

    // Whole warps.
    __device__ __forceinline__ explicit RowTile(const RowBlocks& p, int nth) {
        head_idx = blockIdx.y;
        if (p.cu_seqlens_q) {
            find_ragged(p, nth);
            return;
        }
        batch_idx = nth / p.num_tiles;
        first_query = nth % p.num_tiles * kTileRows;
        first = first_query % p.block_m;
        seqlen = p.seqlen_q;
        token = 0;
        const int first_block = batch_idx * ceil_div(p.seqlen_q, p.block_m);
        first_row = (head_idx * p.num_blocks_q + first_block) * p.block_m + first_query;
    }

    // Of the blocks of the workspace, one after another.
    __device__ __forceinline__ void find_ragged(const RowBlocks& p, int nth_tile) {
        const int tiles_a_block = p.block_m / kTileRows, block = nth_tile / tiles_a_block;
        batch_idx = p.batch_size <= RaggedKeys::kMost ? find_owner(p, block) : find_last(p, block);
        const Sequence queries(p.cu_seqlens_q, batch_idx, p.seqlen_q, p.total_q);
        token = queries.first_row;
        const int nth_block = block - (queries.first_row / p.block_m + batch_idx);
        // A block of no sequence ends before any row.
        seqlen = nth_block >= 0 && queries.seqlen > 0 ? queries.seqlen : INT32_MIN;
        first = nth_tile % tiles_a_block * kTileRows;
        first_query = nth_block * p.block_m + first;
        first_row = (head_idx * p.num_blocks_q + block) * p.block_m + first;
    }

    // The sequence that the block is of, whatever the bounds of others say; 0 if there is none.
    __device__ __forceinline__ static int find_owner(const RowBlocks& p, int block) {
        for (int start = 0; start < p.batch_size; start += 32) {
            const int own = start + threadIdx.x % 32;
            bool is_owner = false;
            if (own < p.batch_size) {
                const Sequence queries(p.cu_seqlens_q, own, p.seqlen_q, p.total_q);
                const int nth = block - (queries.first_row / p.block_m + own);
                is_owner = nth >= 0 && nth < ceil_div(queries.seqlen, p.block_m);
            }
            const unsigned owners = __ballot_sync(kAllLanes, is_owner);
            if (owners) {
                return start + __ffs(owners) - 1;
            }
        }
        return 0;
    }

    // Of many sequences: the last that begins in this block or before it.
    // NOTE: bounds that fall hide others' blocks, whose gradients are then wrong, inside the
    // tensors.
    __device__ __forceinline__ static int find_last(const RowBlocks& p, int block) {
        int found = 0, left = p.batch_size, chunk;
        do {
            chunk = ceil_div(left, 32);
            const int lane = threadIdx.x % 32 * chunk, own = found + lane;
            const bool begins = lane < left && p.cu_seqlens_q[own] / p.block_m + own <= block;
            const int nth = max(__popc(__ballot_sync(kAllLanes, begins)), 1) - 1;
            found += nth * chunk;
            left = min(chunk, left - nth * chunk);
        } while (chunk > 1);
        return found;
    }
};

// delta, lse in units of log 2 and 0 for the turns, also in the rows that fill up a sequence's last
// block of block_m; zeros for the sums of dq of the sequence's rows. Eight threads a
// row of up to kPanels panels.
template <typename T, int kPanels>
__device__ __forceinline__ void attention_delta_sm90(const Workspace& workspace,
                                                     const Heads<const T>& out,
                                                     const Heads<const T>& dout, const float* lse,
                                                     int64_t lse_batch_stride,
                                                     int64_t lse_head_stride, const RowBlocks& p,
                                                     RaggedKeys keys) {
    follow_launch_before();
    if (blockIdx.x + blockIdx.y + threadIdx.x == 0) {
        *workspace.taken = 0;
    }
    int nth = blockIdx.x;
    if (keys.cu_seqlens) {
        if (nth == 0) {
            if (blockIdx.y == 0) {
                keys.order = workspace.order;
                make_order(keys);
            }
            return;
        }
        --nth;
    }
    const RowTile tile(p, nth);
    // Of all blocks, whatever cu_seqlens_q say: who waits for a turn must not do so for ever.
    const int nth_sum = threadIdx.x / Workspace::kTurns;
    if (workspace.turns && nth_sum < workspace.sums.num_sums && tile.first == 0) {
        const int64_t block = (nth_sum * workspace.num_rows + tile.first_row) / p.block_m;
        workspace.turns[Workspace::kTurns * block + threadIdx.x % Workspace::kTurns] = 0;
    }
    if (tile.first_query - tile.first >= tile.seqlen) {
        return;
    }
    const int row_idx = threadIdx.x / 8, query = tile.first_query + row_idx;
    const bool is_inside = query < tile.seqlen;
    const T* out_row = out.at(tile.batch_idx, tile.token + query, tile.head_idx);
    const T* dout_row = dout.at(tile.batch_idx, tile.token + query, tile.head_idx);
    uint4 out_bits[kPanels], dout_bits[kPanels];
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
        const int column = kPanelColumns * i + threadIdx.x % 8 * 8;
        const bool is_there = is_inside && column < p.head_dim;
        out_bits[i] = is_there ? ld_global(out_row + column) : make_uint4(0, 0, 0, 0);
        dout_bits[i] = is_there ? ld_global(dout_row + column) : make_uint4(0, 0, 0, 0);
    }
    float* sums = workspace.dq_sums + (tile.first_row - tile.first) * p.padded;
    const auto clear = [&](float* block) {
#pragma unroll
        for (int i = 0; i < kPanels * kPanelColumns / kSumsAStep; ++i) {
            const int col8 = i * (kSumsAStep / 8) + threadIdx.x / 32;
            if (8 * col8 < p.head_dim) {
                const int place = fragment_at(p, tile.first / kTileRows, col8);
                st_global(block + place * kFragment + threadIdx.x % 32 * 4, make_uint4(0, 0, 0, 0));
            }
        }
    };
    if (tile.first_query < tile.seqlen) {
        clear(sums);
#pragma unroll 1
        for (int nth = 1; nth < workspace.sums.num_sums; ++nth) {
            clear(sums + nth * workspace.num_rows * p.padded);
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
        float a[8], b[8];
        unpack<T>(out_bits[i], a);
        unpack<T>(dout_bits[i], b);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            sum += a[e] * b[e];
        }
    }
#pragma unroll
    for (int mask = 4; mask > 0; mask /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, mask);
    }
    if (threadIdx.x % 8 == 0) {
        // p = exp2(s - inf) = 0 past the sequence's end, and in rows that see no key.
        float row_lse = INFINITY;
        if (is_inside) {
            const float value = lse[tile.batch_idx * lse_batch_stride +
                                    tile.head_idx * lse_head_stride + tile.token + query];
            row_lse = value == -INFINITY ? INFINITY : value * kLog2e;
        }
        workspace.delta[tile.first_row + row_idx] = sum;
        workspace.lse[tile.first_row + row_idx] = row_lse;
    }
}

// dk and dv of works of which the main kernel made parts.
template <typename T>
struct Parts {
    Heads<T> dk, dv;
    const T* parts;  // as in BackwardParameters
    Works works;
    RaggedKeys keys;
};

// 16 rows of dk or dv: tile `nth` of those that were made in parts.
template <typename T>
__device__ __forceinline__ void add_parts(const Parts<T>& p, int nth, int head_dim) {
    const bool is_dv = nth % 2;
    const int block_n = p.keys.block_n;
    const int row_in_block = nth / 2 % (block_n / kTileRows) * kTileRows + threadIdx.x / 8;
    const int parted = nth / 2 / (block_n / kTileRows);
    const Works& works = p.works;
    Place place;
    if (works.first_parted + parted >= works.num_works ||
        !works.find(works.first_parted + parted, p.keys, place)) {
        return;
    }
    const Sequence keys(p.keys.cu_seqlens, place.batch_idx, p.keys.longest, p.keys.total);
    const int key = place.key_block * block_n + row_in_block;
    if (key >= keys.seqlen) {
        return;
    }
    const int64_t first = works.part_of(is_dv, parted * works.num_parts);
    const T* parts = p.parts + (first * block_n + row_in_block) * head_dim;
    T* to = (is_dv ? p.dv : p.dk).at(place.batch_idx, keys.first_row + key, place.head_idx);
#pragma unroll 1
    for (int column = threadIdx.x % 8 * 8; column < head_dim; column += kPanelColumns) {
        float sums[8] = {};
#pragma unroll 4
        for (int i = 0; i < works.num_parts; ++i) {
            float values[8];
            unpack<T>(ld_global(parts + static_cast<int64_t>(i) * block_n * head_dim + column),
                      values);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                sums[e] += values[e];
            }
        }
        st_global(to + column, pack<T>(sums));
    }
}

// dq from its sums; a thread two rows of one fragment at a time. Blocks after those of q's heads
// add up parts of dk and dv.
template <typename T>
__device__ __forceinline__ void attention_convert_sm90(const Heads<T>& dq, const float* dq_sums,
                                                       const RowBlocks& p, int num_heads,
                                                       const Parts<T>& parts, int num_sums,
                                                       int64_t num_rows, float softmax_scale) {
    follow_launch_before();
    if (static_cast<int>(blockIdx.y) >= num_heads) {
        add_parts(parts, (blockIdx.y - num_heads) * gridDim.x + blockIdx.x, p.head_dim);
        return;
    }
    const RowTile tile(p, blockIdx.x);
    if (tile.first_query >= tile.seqlen) {
        return;
    }
    const int row_idx = threadIdx.x % 8, row16 = tile.first / kTileRows;
#pragma unroll
    for (int step = 0; step < kMostHeadDim / kRowThreads; ++step) {
        const int col8 = step * (kRowThreads / 8) + threadIdx.x / 8;
        if (8 * col8 >= p.head_dim) {
            return;
        }
        const int place = fragment_at(p, row16, col8);
        const float* fragment =
            dq_sums + (tile.first_row - tile.first) * p.padded + place * kFragment + 16 * row_idx;
        float values[2][8] = {};
        const auto add = [&](const float* from) {
#pragma unroll
            for (int lane = 0; lane < 4; ++lane) {
                const uint4 bits = ld_global(from + 4 * lane);
                values[0][2 * lane] += __uint_as_float(bits.x);
                values[0][2 * lane + 1] += __uint_as_float(bits.y);
                values[1][2 * lane] += __uint_as_float(bits.z);
                values[1][2 * lane + 1] += __uint_as_float(bits.w);
            }
        };
        add(fragment);
#pragma unroll 1
        for (int nth = 1; nth < num_sums; ++nth) {
            add(fragment + nth * num_rows * p.padded);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            values[0][i] *= softmax_scale;
            values[1][i] *= softmax_scale;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = tile.first_query + half * 8 + row_idx;
            if (query < tile.seqlen) {
                st_global(dq.at(tile.batch_idx, tile.token + query, tile.head_idx) + col8 * 8,
                          pack<T>(values[half]));
            }
        }
    }
}

}  // namespace kernel_hub::attention::backward::sm90
