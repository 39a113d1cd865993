// decode_ordered_sm90.cu: a block of a cluster, from the length to its columns of the output. Its
// warps score keys, load values or add them.
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
};

// Where the next block of a warp that adds values is.
template <typename C>
struct NextBlock {
    int at = 0, slot = 0, turn = 0;  // from the end; of values, and how often it was filled before
    const uint8_t* sent;
    uint32_t from, probs_there;
    bool has_probs, has_values;

    // Asks for what `wait` waits for: the answer takes as long as a product.
    __device__ __forceinline__ void ask(const Ordered<C>& b, int summing) {
        const int round = at / C::kRound, first = round * C::kRound;
        const int block = b.count_from(first) - 1 - (at - first);
        probs_there = b.probs_there(round & 1, block / C::kBlocks);
        sent = dynamic_shared() + (b.probs - b.area) + (round & 1) * C::kHalfBytes +
               block * C::kSentBytes + 16 * b.lane_idx;
        from = b.values + slot * C::kValueBytes + b.value_place(b.lane_idx, summing);
        has_probs = mbarrier_test_wait(probs_there, round / 2 & 1);
        has_values = mbarrier_test_wait(b.value_full(slot), turn & 1);
    }
    __device__ __forceinline__ void wait(const Ordered<C>& b) const {
        mbarrier_wait_unless(has_probs, probs_there, at / C::kRound / 2 & 1);
        mbarrier_wait_unless(has_values, b.value_full(slot), turn & 1);
    }
    // A fourth of it.
    __device__ __forceinline__ void load(Fragments<C>& f, int j) const {
        f.probs[j] = *reinterpret_cast<const uint4*>(sent + 512 * j);
        ldmatrix_x4_trans(f.values[j], from + 32 * C::kValueRowBytes * j);
    }
    __device__ __forceinline__ void load_more(const Ordered<C>& b, Fragments<C>& f) const {
        f.more = *reinterpret_cast<const float2*>(sent + C::kProbBytes - 8 * b.lane_idx);
    }
    // Behind the last block it stays there.
    __device__ __forceinline__ void step(const Ordered<C>& b) {
        if (at + 1 < b.num_blocks) {
            ++at;
            const bool is_last = slot + 1 == C::kValueSlots;
            turn += is_last;
            slot = is_last ? 0 : slot + 1;
        }
    }
};

// Scores, largest scores, probabilities: a block of keys of each round of this warp's team.
template <typename C>
__device__ __forceinline__ void score_rounds(Ordered<C>& b) {
    using T = typename C::T;
    const auto& args = b.args;
    constexpr int kStep = C::kTeams * C::kRound, kPair = C::kScoring / 2;
    const int row = b.lane_idx / 4;
    // The length, the first pages and the queries, side by side.
    const bool is_one_round = args.max_tokens <= C::kRound * kBlockKeys;
    const bool is_few = 2 * args.max_tokens <= kStep * kBlockKeys;
    int team = is_few ? 0 : b.warp_idx / C::kTeam;
    int own = b.warp_idx % (is_few ? kPair : C::kTeam) * C::kBlocks + b.rank;  // of a round's
    const int early_pages = is_one_round && team == 0 ? b.look_up(own, args.max_tokens) : -1;
    b.read_length();
    // Few blocks have two warps each.
    const bool is_shared = 2 * b.num_blocks <= kStep, is_second = is_shared && b.warp_idx >= kPair;
    if (is_shared && !is_few) {
        team = 0;
        own = b.warp_idx % kPair * C::kBlocks + b.rank;
    }
    const bool is_leader = own < C::kBlocks && b.lane_idx == 0 && !is_second;
    uint32_t queries[C::kHeadDim / 16][4];  // rows from 8 on are zeros
    const T* const q = args.q + b.batch_idx * args.q_batch_stride +
                       (b.kv_head * b.group + row) * args.q_head_stride;
#pragma unroll
    for (int k = 0; k < C::kHeadDim / 8; ++k) {
        queries[k / 2][k % 2 * 2] = ld_global_if(
            row < b.group, reinterpret_cast<const uint32_t*>(q + 8 * k) + b.lane_idx % 4);
        queries[k / 2][k % 2 * 2 + 1] = 0;
    }
    report_if(args.flag, b.given > args.max_tokens && threadIdx.x == 0, kLengthsOutside);

    // The block of a round, -1 where it has none.
    const auto block_of = [&](int first) {
        const int count = b.count_from(first);
        return own < count ? b.num_blocks - first - count + own : -1;
    };
    const auto pages_of = [&](int block) { return block < 0 ? -1 : b.look_up(block, b.length); };
    const auto places_of = [&](int block, int pages) {
        return block < 0
                   ? -1
                   : b.place_of(block, pages, args.k_cache_page_stride, args.k_cache_token_stride);
    };
    int block = block_of(team * C::kRound), next_block = block_of(team * C::kRound + kStep);
    int64_t places =
        places_of(block, is_few || (is_one_round && !is_shared) ? early_pages : pages_of(block));
    int next_pages = pages_of(next_block);
    // Keys of the first round first.
    if (team > 0) {
        b.wait_for_maxima(0);
    }
    if (block >= 0) {
#pragma unroll 1
        for (int unit = 0; unit < C::kAhead; ++unit) {
            b.load_keys(block, is_second * C::kAhead + unit, places,
                        b.area + (b.warp_idx * C::kAhead + unit) * C::kUnitBytes);
            cp_async_commit();
        }
    }
    cluster_wait();
    int first = team * C::kRound;
#pragma unroll 1
    for (; first < b.num_blocks; first += kStep) {
        const int count = b.count_from(first), round = first / C::kRound, half = round & 1;
        asm volatile("" : "+r"(own));  // what follows from it is in no registers between rounds
        if (is_leader) {
            mbarrier_arrive_expect_tx(b.maxima_there(round), count * C::kRows * 4);
        }
        const int64_t next_places = places_of(next_block, next_pages);
        const int after_next = block_of(first + 2 * kStep);
        next_pages = pages_of(after_next);
        float scores[2 * C::kTiles][2];
        if (block >= 0) {
            b.score(block, places, next_block, next_places, is_shared, queries, scores);
            if (is_second) {
                b.pass_scores(scores);
            } else {
                if (is_shared) {
                    b.take_scores(scores);
                }
                b.mask(block, scores);
            }
        }
        if (is_second) {
            return;
        }
        if (block >= 0) {
            b.send_maxima(scores, b.maxima + round % C::kMaxima * C::kMaxBytes + own * C::kRows * 4,
                          b.maxima_there(round));
        }
        float shift = 0.f, rescale = 1.f;
        if (C::kTeams == 2 && round > 0) {  // what the other team's round made of the maximum
            b.wait_for_maxima(round - 1);
            b.move_shifts(round - 1, 0, C::kRound);
        }
        b.wait_for_maxima(round);
        const int at = count - 1 - own;  // of the own block, from the round's end
        b.move_shifts(round, 0, at);
        if (block >= 0) {
            rescale = b.own_shift(round, at, shift);
        }
        if (round >= 2) {
            mbarrier_wait(b.probs_free(half), (round / 2 & 1) ^ 1);
        }
        if (is_leader) {
#pragma unroll 1
            for (int i = 0; i < C::kTeam; ++i) {
                const int blocks = max(0, min(count - i * C::kBlocks, C::kBlocks));
                mbarrier_arrive_expect_tx(b.probs_there(half, i),
                                          blocks * 4 * b.group * (C::kSentBytes / 32));
            }
        }
        if (block >= 0) {
            b.send_probs(scores, shift, rescale,
                         b.probs + half * C::kHalfBytes + own * C::kSentBytes,
                         b.probs_there(half, own / C::kBlocks));
        }
        b.move_shifts(round, max(0, at + 1), count);
        block = next_block;
        places = next_places;
        next_block = after_next;
    }
    // Whether this team had the last round.
    const bool is_last =
        b.num_blocks > 0 ? first - kStep + C::kRound >= b.num_blocks : b.warp_idx == 0;
    if (own < C::kBlocks && is_last) {
        if (b.lane_idx % 4 == 0) {
            b.row_shifts()[row] = b.row_shift;
        }
        mbarrier_arrive_if(b.shift_there(), b.lane_idx % 4 == 0);
    }
}

// Values, from the last block on: a warp has every fourth one.
template <typename C>
__device__ __forceinline__ void load_rounds(Ordered<C>& b, int loading) {
    b.read_length();
    int pages = loading < b.num_blocks ? b.look_up(b.num_blocks - 1 - loading, b.length) : -1;
    int slot = loading, turn = 0;
#pragma unroll 1
    for (int at = loading; at < b.num_blocks; at += C::kLoading) {
        if (turn > 0) {
            mbarrier_wait(b.value_empty(slot), (turn - 1) & 1);
        }
        b.load_values(at, pages, slot);
        if (at + C::kLoading < b.num_blocks) {
            pages = b.look_up(b.num_blocks - 1 - at - C::kLoading, b.length);
        }
        slot += C::kLoading;
        if (slot >= C::kValueSlots) {
            slot -= C::kValueSlots;
            ++turn;
        }
        // Keys of the first round first: no other values are waited for before them.
        if (at == loading && at + C::kLoading < b.num_blocks) {
            b.wait_for_maxima(0);
        }
    }
    cluster_wait();
}

// Eight columns of the output: probabilities times values, key by key from the last one on.
template <typename C>
__device__ __forceinline__ void add_rounds(Ordered<C>& b, int summing) {
    using T = typename C::T;
    const auto& args = b.args;
    const int row = b.lane_idx / 4;
    b.read_length();
    cluster_wait();
    // Columns 2 (lane % 4) and the next one of the row in the first two.
    float values[4] = {}, row_sum = 0.f;
    NextBlock<C> next;
    const auto wait_and_load = [&](Fragments<C>& f) {
        next.ask(b, summing);
        next.wait(b);
#pragma unroll
        for (int j = 0; j < C::kTiles / 2; ++j) {
            next.load(f, j);
        }
        next.load_more(b, f);
    };
    // Adds a block, and loads the next under its products: each waits for the one before.
    const auto add = [&](const Fragments<C>& f, Fragments<C>& to) {
        const int at = next.at, slot = next.slot;
        next.step(b);
        row_sum = fmaf(row_sum, f.more.y, f.more.x);
        values[0] *= f.more.y;
        values[1] *= f.more.y;
#pragma unroll
        for (int i = 0; i < C::kTiles; ++i) {
            const uint4 p = f.probs[i / 2];
            if (i % 2 == 0) {
                mma_m16n8k16<T>(values, {p.x, 0, p.y, 0}, f.values[i / 2][0], f.values[i / 2][1]);
            } else {
                mma_m16n8k16<T>(values, {p.z, 0, p.w, 0}, f.values[i / 2][2], f.values[i / 2][3]);
            }
            if (i == 0) {
                next.ask(b, summing);
            } else if (i == 2) {
                next.wait(b);
                next.load_more(b, to);  // what the next block begins with
            }
            if (i >= 2 && i < 2 + C::kTiles / 2) {
                next.load(to, i - 2);
            }
        }
        __syncwarp();
        mbarrier_arrive_if(b.value_empty(slot), b.lane_idx == 0);
        // A round's probabilities were read, where another's come.
        const int behind = at + 1;
        if (behind % C::kRound == 0 && behind + C::kRound < b.num_blocks &&
            b.lane_idx < C::kBlocks) {
            mbarrier_arrive_cluster(
                cluster_address(b.probs_free((behind / C::kRound - 1) & 1), b.lane_idx));
        }
        __syncwarp();
    };
    if (b.num_blocks > 0) {
        Fragments<C> even, odd;
        wait_and_load(even);
#pragma unroll 1
        for (int i = 0; i < b.num_blocks; i += 2) {
            add(even, odd);
            if (i + 1 < b.num_blocks) {
                add(odd, even);
            }
        }
    }

    mbarrier_wait(b.shift_there(), 0);
    float shift = b.row_shifts()[row];
    row_sum += __shfl_xor_sync(kAllLanes, row_sum, 1);
    row_sum += __shfl_xor_sync(kAllLanes, row_sum, 2);
    const float factor = add_sink(-INFINITY, shift, row_sum);
    if (row < b.group) {
        const int head = b.kv_head * b.group + row;
        T* const out = args.out + b.batch_idx * args.out_batch_stride +
                       head * args.out_head_stride + C::kColumns * b.rank + 8 * summing +
                       2 * (b.lane_idx % 4);
        const bool is_empty = b.num_blocks == 0;
        *reinterpret_cast<uint32_t*>(out) =
            is_empty ? 0 : pack2<T>(values[0] * factor, values[1] * factor);
        if (args.lse != nullptr && b.rank == 0 && summing == 0 && b.lane_idx % 4 == 0) {
            args.lse[static_cast<int64_t>(b.batch_idx) * args.num_heads + head] =
                is_empty ? -INFINITY : shift * kLn2 + __logf(row_sum);
        }
    }
}

template <typename C>
__device__ __forceinline__ void attend_in_order(const OrderedArgs<typename C::T>& args) {
    Ordered<C> b(args);
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kMaxima; ++i) {
            mbarrier_init(b.maxima_there(i), 1);
        }
        for (int half = 0; half < 2; ++half) {
            mbarrier_init(b.probs_free(half), C::kBlocks * C::kSumming);
            for (int i = 0; i < C::kTeam; ++i) {
                mbarrier_init(b.probs_there(half, i), 1);
            }
        }
        mbarrier_init(b.shift_there(), C::kRows);
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
    if (b.warp_idx < C::kScoring) {
        score_rounds(b);
    } else if (b.warp_idx < C::kScoring + C::kLoading) {
        load_rounds(b, b.warp_idx - C::kScoring);
    } else {
        add_rounds(b, b.warp_idx - C::kScoring - C::kLoading);
    }
    report_if(args.flag, b.is_outside, kPagesOutside);
}

}  // namespace kernel_hub::kv_cache::decode::sm90
