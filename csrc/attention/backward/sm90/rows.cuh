// flash_attention_backward_sm90.cu: what is done row by row, before (delta) and after (convert) the
// main kernel.
#pragma once

#include "attention/backward/sm90/plan.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub::attention::backward::sm90 {

constexpr int kRowThreads = 128, kMostHeadDim = 256;
constexpr int kSumsAStep = 4 * kRowThreads / kTileRows;  // of a row, cleared at a time

// How the workspace is laid out, and where the rows lie in the tensors.
struct RowBlocks {
    const int* cu_seqlens_q;
    int64_t num_blocks_q;  // of a head
    int num_tiles;         // of 16 rows, of the longest sequence
    int seqlen_q, total_q, head_dim;
    int padded, block_m;  // head_dim and kBlockM of the main kernel
};

// Which 16 rows of a head a block works on.
struct RowTile {
    int batch_idx, head_idx, first_query, seqlen;
    int first;          // row of its block in the workspace
    int64_t first_row;  // in the workspace
    int64_t token;      // of query 0, in the tensors
    bool is_outside;    // cu_seqlens_q

    __device__ __forceinline__ explicit RowTile(const RowBlocks& p) {
        batch_idx = blockIdx.x / p.num_tiles;
        head_idx = blockIdx.y;
        first_query = blockIdx.x % p.num_tiles * kTileRows;
        first = first_query % p.block_m;
        const Sequence queries(p.cu_seqlens_q, batch_idx, p.seqlen_q, p.total_q);
        seqlen = queries.seqlen;
        is_outside = queries.is_outside;
        token = queries.first_row;
        const int first_block =
            first_block_of(p.cu_seqlens_q, queries.first_row, batch_idx, p.seqlen_q, p.block_m);
        first_row = (head_idx * p.num_blocks_q + first_block) * p.block_m + first_query;
    }
};

// delta, lse in units of log 2, zeros for the sums of dq, 0 for the turns; also in the rows that
// fill up a sequence's last block of block_m. Eight threads a row of up to kPanels panels.
template <typename T, int kPanels>
__device__ __forceinline__ void attention_delta_sm90(const Workspace& workspace, int* flag,
                                                     const Heads<const T>& out,
                                                     const Heads<const T>& dout, const float* lse,
                                                     int64_t lse_batch_stride,
                                                     int64_t lse_head_stride, const RowBlocks& p) {
    follow_launch_before();
    if (blockIdx.x + blockIdx.y + threadIdx.x == 0) {
        *workspace.taken = 0;
    }
    const RowTile tile(p);
    report_if(flag, tile.is_outside && threadIdx.x == 0, kQueriesOutside);
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
    float* sums = workspace.dq_sums + tile.first_row * p.padded;
    const auto clear = [&](float* rows) {
#pragma unroll
        for (int i = 0; i < kPanels * kPanelColumns / kSumsAStep; ++i) {
            if (i * kSumsAStep < p.padded) {
                st_global(rows + 4 * (i * kRowThreads + threadIdx.x), make_uint4(0, 0, 0, 0));
            }
        }
    };
    clear(sums);
#pragma unroll 1
    for (int nth = 1; nth < workspace.sums.num_sums; ++nth) {
        clear(sums + nth * workspace.num_rows * p.padded);
    }
    const int nth_turn = threadIdx.x;
    if (workspace.turns && nth_turn < workspace.sums.num_sums && tile.first == 0) {
        workspace.turns[(nth_turn * workspace.num_rows + tile.first_row) / p.block_m] = 0;
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
    const int* cu_seqlens_k;
    int seqlen_k, total_k, block_n;
};

// 16 rows of dk or dv: tile `nth` of those that were made in parts.
template <typename T>
__device__ __forceinline__ void add_parts(const Parts<T>& p, int nth, int head_dim) {
    const bool is_dv = nth % 2;
    const int row_in_block = nth / 2 % (p.block_n / kTileRows) * kTileRows + threadIdx.x / 8;
    const int parted = nth / 2 / (p.block_n / kTileRows);
    const Works& works = p.works;
    if (works.first_parted + parted >= works.num_blocks * works.num_pairs) {
        return;
    }
    int batch_idx, head_idx, key_block;
    works.find(works.first_parted + parted, batch_idx, head_idx, key_block);
    const Sequence keys(p.cu_seqlens_k, batch_idx, p.seqlen_k, p.total_k);
    const int key = key_block * p.block_n + row_in_block;
    if (key >= keys.seqlen) {
        return;
    }
    const int64_t first = works.part_of(is_dv, parted * works.num_parts);
    const T* parts = p.parts + (first * p.block_n + row_in_block) * head_dim;
    T* to = (is_dv ? p.dv : p.dk).at(batch_idx, keys.first_row + key, head_idx);
#pragma unroll 1
    for (int column = threadIdx.x % 8 * 8; column < head_dim; column += kPanelColumns) {
        float sums[8] = {};
#pragma unroll 4
        for (int i = 0; i < works.num_parts; ++i) {
            float values[8];
            unpack<T>(ld_global(parts + static_cast<int64_t>(i) * p.block_n * head_dim + column),
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
    const RowTile tile(p);
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
        // Panels of block_m x 64, the last one maybe narrower.
        const int width8 = min(p.padded / 8 - col8 / 8 * 8, 8);
        const int place = col8 / 8 * (p.block_m / 2) + row16 * width8 + col8 % 8;
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
