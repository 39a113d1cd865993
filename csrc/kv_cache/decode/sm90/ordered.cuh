// decode_ordered_sm90.cu: a block of a cluster, from the length to its columns of the output.
#pragma once

#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/optional_reads.cuh"
#include "kernel_hub/sinks.cuh"
#include "kv_cache/decode/sm90/ordered_keys.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

// What a warp that adds values takes of a block: probabilities, eight columns of values, the lane's
// part of the sum and the row's factor.
template <typename C>
struct Fragments {
    uint4 probs[C::kTiles / 2];
    uint32_t values[C::kTiles / 2][4];
    float2 more;
    const uint8_t* sent;
    uint32_t from;

    // Waits for the round's i-th block from its end.
    __device__ __forceinline__ void wait(const Ordered<C>& b, int first, int i, int count,
                                         int parity, int summing) {
        const int block = count - 1 - i, slot = (first + i) % C::kValueSlots;
        mbarrier_wait(b.probs_there(block / C::kBlocks), parity);
        mbarrier_wait(b.value_full(slot), (first + i) / C::kValueSlots & 1);
        sent = dynamic_shared() + block * C::kSentBytes + 16 * b.lane_idx;
        from = b.values + slot * C::kValueBytes + b.value_place(b.lane_idx, summing);
        more = *reinterpret_cast<const float2*>(sent + C::kProbBytes - 8 * b.lane_idx);
    }
    // Then a fourth of it at a time.
    __device__ __forceinline__ void load(int j) {
        probs[j] = *reinterpret_cast<const uint4*>(sent + 512 * j);
        ldmatrix_x4_trans(values[j], from + 32 * C::kValueRowBytes * j);
    }
};

// Eight columns of a row's output, columns 2 (lane % 4) and the next one in the first two.
template <typename C>
struct Sums {
    using T = typename C::T;
    float values[4] = {}, row_sum = 0.f;

    // Adds a block, and loads the next under its products: each waits for the one before.
    template <typename Wait>
    __device__ __forceinline__ void add(const Fragments<C>& f, Fragments<C>& next,
                                        const Wait& wait) {
        row_sum = fmaf(row_sum, f.more.y, f.more.x);
        values[0] *= f.more.y;
        values[1] *= f.more.y;
#pragma unroll
        for (int j = 0; j < C::kTiles / 2; ++j) {
            const uint4 p = f.probs[j];
            mma_m16n8k16<T>(values, {p.x, 0, p.y, 0}, f.values[j][0], f.values[j][1]);
            if (j == 0) {
                wait(next);
            }
            mma_m16n8k16<T>(values, {p.z, 0, p.w, 0}, f.values[j][2], f.values[j][3]);
            next.load(j);
        }
    }

    // What the values must be multiplied by; shift becomes the sum's.
    __device__ __forceinline__ float finish(float& shift) {
        row_sum += __shfl_xor_sync(kAllLanes, row_sum, 1);
        row_sum += __shfl_xor_sync(kAllLanes, row_sum, 2);
        return add_sink(-INFINITY, shift, row_sum);
    }
};

template <typename C>
__device__ __forceinline__ void attend_in_order(const OrderedArgs<typename C::T>& args) {
    using T = typename C::T;
    Ordered<C> b(args);
    const int lane_idx = b.lane_idx, warp_idx = b.warp_idx, row = lane_idx / 4;
    if (threadIdx.x == 0) {
        mbarrier_init(b.maxima_there(), 1);
        for (int i = 0; i < C::kWarps; ++i) {
            mbarrier_init(b.probs_there(i), 1);
        }
        for (int i = 0; i < C::kValueSlots; ++i) {
            mbarrier_init(b.value_full(i), 32);
            mbarrier_init(b.value_empty(i), C::kSumming);
        }
        fence_mbarrier_init();
    }
    // That the blocks are there is asked when something is sent to them.
    cluster_arrive_relaxed();
    wait_for_launch_before();
    allow_next_launch();
    __syncthreads();

    // The length, the first pages and the queries, side by side.
    const int own = warp_idx * C::kBlocks + b.rank;  // of a round's blocks
    const bool is_one_round = args.max_tokens <= C::kRound * kBlockKeys;
    const int given = *static_cast<const volatile int*>(args.cache_seqlens + b.batch_idx);
    const int first_pages = is_one_round ? b.look_up(own, args.max_tokens) : -1;
    uint32_t queries[C::kHeadDim / 16][4];  // rows from 8 on are zeros
    const T* const q = args.q + b.batch_idx * args.q_batch_stride +
                       (b.kv_head * b.group + row) * args.q_head_stride + 2 * (lane_idx % 4);
#pragma unroll
    for (int k = 0; k < C::kHeadDim / 8; ++k) {
        queries[k / 2][k % 2 * 2] =
            ld_global_if(row < b.group, reinterpret_cast<const uint32_t*>(q + 8 * k));
        queries[k / 2][k % 2 * 2 + 1] = 0;
    }
    b.length = max(0, min(given, args.max_tokens));
    b.num_blocks = (b.length + kBlockKeys - 1) / kBlockKeys;
    report_if(args.flag, given > args.max_tokens && threadIdx.x == 0, kLengthsOutside);

    Sums<C> sums;
    const int summing = warp_idx - C::kLoaders;  // from 0 on: of the warps that add values
    int next_values = warp_idx;                  // the block whose values a loader loads next
    bool is_met = false;
#pragma unroll 1
    for (int first = 0; first < b.num_blocks; first += C::kRound) {
        const int count = min(b.num_blocks - first, C::kRound), parity = first / C::kRound & 1;
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(b.maxima_there(), count * C::kRows * 4);
            for (int i = 0; i < C::kWarps; ++i) {
                const int blocks = max(0, min(count - i * C::kBlocks, C::kBlocks));
                mbarrier_arrive_expect_tx(b.probs_there(i),
                                          blocks * 4 * b.group * (C::kSentBytes / 32));
            }
        }
        const uint32_t maxima = b.maxima + parity * C::kMaxBytes;
        // What the last warps do not read before the round after next.
        float* const row_shifts = reinterpret_cast<float*>(dynamic_shared() + C::kSharedBytes -
                                                           (1 + parity) * 4 * C::kRows);
        const bool has_keys = own < count;
        const int depth = count <= C::kRound / 2 ? C::kTiles : C::kAhead;
        const int block = b.num_blocks - first - count + own;
        int64_t places = -1;
        if (has_keys) {
            const int pages = is_one_round ? first_pages : b.look_up(block, b.length);
            places = b.place_of(block, pages, args.k_cache_page_stride, args.k_cache_token_stride);
#pragma unroll 1
            for (int tile = 0; tile < depth; ++tile) {
                b.load_keys(block, tile, places,
                            b.area + (warp_idx * depth + tile) * C::kTileBytes);
            }
        }
        if (first == 0 && summing < 0) {
#pragma unroll 1
            for (; next_values < min(b.num_blocks, C::kValueSlots); next_values += C::kLoaders) {
                b.load_values(next_values);
            }
        }
        float scores[2 * C::kTiles][2];
        if (has_keys) {
            b.score(block, places, depth, queries, scores);
        }
        if (!is_met) {
            cluster_wait();
            is_met = true;
        }
        if (has_keys) {
            b.send_maxima(scores, maxima + own * C::kRows * 4);
        }
        mbarrier_wait(b.maxima_there(), parity);
        // Blocks of the round from its last one on, `at` 0.
        const float* const largest =
            reinterpret_cast<const float*>(dynamic_shared() + (maxima - b.area)) +
            (count - 1) * C::kRows + row;
        int at = 0;
        float shift = 0.f, rescale = 1.f;
        if (has_keys) {
#pragma unroll 1
            for (; at < count - own; ++at) {
                rescale = b.move_shift(largest[-at * C::kRows], first + at == 0, shift);
            }
            b.send_probs(scores, shift, rescale, b.area + own * C::kSentBytes);
        }

        if (summing < 0) {
            const int end = min(b.num_blocks, first + count + C::kValueSlots);
#pragma unroll 1
            for (; next_values < end; next_values += C::kLoaders) {
                const int turn = next_values / C::kValueSlots;
                mbarrier_wait(b.value_empty(next_values % C::kValueSlots), (turn - 1) & 1);
                b.load_values(next_values);
            }
#pragma unroll 1
            for (; at < count; ++at) {
                b.move_shift(largest[-at * C::kRows], first + at == 0, shift);
            }
            if (warp_idx == 0 && lane_idx % 4 == 0) {
                row_shifts[row] = b.row_shift;
            }
        } else {
            const auto wait_for = [&](Fragments<C>& f, int i) {
                f.wait(b, first, min(i, count - 1), count, parity, summing);
            };
            const auto add = [&](const Fragments<C>& f, Fragments<C>& next, int i) {
                sums.add(f, next, [&](Fragments<C>& each) { wait_for(each, i + 1); });
                __syncwarp();
                mbarrier_arrive_if(b.value_empty((first + i) % C::kValueSlots), lane_idx == 0);
            };
            Fragments<C> even, odd;
            wait_for(even, 0);
#pragma unroll
            for (int j = 0; j < C::kTiles / 2; ++j) {
                even.load(j);
            }
#pragma unroll 1
            for (int i = 0; i < count; i += 2) {
                add(even, odd, i);
                if (i + 1 < count) {
                    add(odd, even, i + 1);
                }
            }
        }
        __syncthreads();  // the ring is where the probabilities were
        b.row_shift = row_shifts[row];
    }
    report_if(args.flag, b.is_outside, kPagesOutside);
    if (!is_met) {
        cluster_wait();
    }
    if (summing < 0) {
        return;
    }

    const float factor = sums.finish(b.row_shift);
    if (row < b.group) {
        const int head = b.kv_head * b.group + row;
        T* const out = args.out + b.batch_idx * args.out_batch_stride +
                       head * args.out_head_stride + C::kColumns * b.rank + 8 * summing +
                       2 * (lane_idx % 4);
        const bool is_empty = b.num_blocks == 0;
        *reinterpret_cast<uint32_t*>(out) =
            is_empty ? 0 : pack2<T>(sums.values[0] * factor, sums.values[1] * factor);
        if (args.lse != nullptr && b.rank == 0 && summing == 0 && lane_idx % 4 == 0) {
            args.lse[static_cast<int64_t>(b.batch_idx) * args.num_heads + head] =
                is_empty ? -INFINITY : b.row_shift * kLn2 + __logf(sums.row_sum);
        }
    }
}

}  // namespace kernel_hub::kv_cache::decode::sm90
