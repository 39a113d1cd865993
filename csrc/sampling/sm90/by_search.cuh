// Rows that are not drawn by what the first pass leaves: passes over them until the threshold is
// known, and the draw.
#pragma once

#include "sampling/sm90/window.cuh"

namespace kernel_hub::sampling::sm90 {

// Where a search is. The first pass has counted where it has bins.
enum Step { kStarting, kSearching, kWeighing, kRanking, kDrawn };
struct Going {
    float from;
    Step next;
    bool is_mass, has_bins, has_sums;
    bool is_guess;  // bins hold what the first pass has counted
};

// A pass for each of the most probable.
__device__ __noinline__ void rank_in_turn(float from) {
    TeamShared& shared = team_shared();
    const SampleParams& p = shared.p;
    Row row(p);
    row.has_mask = shared.has_mask;
    Fours{row};  // which knows whether it is plain
    write_top_in_turn(row, shared.weigher(), from, shared.s.above, shared.s);
}

// What the next pass asks.
// NOTE: functions of their own of what comes before a pass and after it, of one turn: what
// registers cannot hold here was stored by every row, 7 MB a launch of rows that top_k ends; a loop
// around them has some hundred instructions ahead of it that make addresses; and a pass has all
// registers.
__device__ __noinline__ Going ask_next(Going at) {
    Team team(team_shared());
    TeamShared& shared = team.shared;
    Shared& s = shared.s;
    auto& [from, next, is_mass, has_bins, has_sums, is_guess] = at;
    if (next == kStarting) {
        __syncthreads();
        if (threadIdx.x == 0) {
            start(s.search, is_mass, shared.top_k, from, shared.largest);
            s.wanted = is_mass ? 0 : shared.top_k;
        }
        __syncthreads();
        has_sums = has_bins;
        next = kSearching;
    }
    if (has_sums && next == kSearching) {
        __syncthreads();
        find_window(shared.bins, shared.weigher(), from, is_guess, shared.top_p,
                    shared.is_ahead && shared.p.dtype == kBf16, s);
        has_sums = false;
    }
    const bool fills_bins = next == kSearching && !s.search.collects;
    team.take_back();
    if (threadIdx.x == 0) {
        shared.num_own = shared.num_listed = shared.mine.num = 0;
        shared.mine.least_binned = ~0u;
        shared.mine.most_binned = 0;
        s.question = {from, next == kWeighing ? from : shared.bound,
                      next == kWeighing ? -kInfinity : shared.largest, next == kWeighing, true};
        if (next == kSearching) {
            ask(s, shared.weigher(), from);
        }
    }
    if (fills_bins) {
        empty_bins(shared.own_bins, true);
        has_bins = is_guess = false;
    }
    __syncthreads();
    return at;
}

// What a pass makes known: where it goes on, or the row is drawn.
__device__ __noinline__ Going go_on(Going at) {
    Team team(team_shared());
    TeamShared& shared = team.shared;
    Shared& s = shared.s;
    const SampleParams& p = shared.p;
    auto& [from, next, is_mass, has_bins, has_sums, is_guess] = at;
    const bool fills_bins = !s.question.collects;
    team.exchange<false>(fills_bins          ? Team::kBins
                         : next == kWeighing ? Team::kNotes
                                             : Team::kCandidates);
    if (threadIdx.x / 32 == kNumWarps - 1 && s.question.weighs) {
        sum_answers(team);
    }
    Chosen chosen;
    const bool has_chosen = !fills_bins && next != kWeighing && s.num_candidates <= kNumCandidates;
    uint64_t found = 0;
    if (has_chosen) {
        chosen.compare(shared.weigher(), s);
        found = chosen.kept_mass(s);
    } else if (fills_bins) {
        found = sum_of_bins(shared.bins, is_mass, s);
    }
    __syncthreads();
    bool is_among = has_chosen;  // what is drawn, or ranked
    if (next == kSearching) {
        if (threadIdx.x == 0) {
            // Too many are where the steps of the first histogram did not count all.
            s.is_done = (fills_bins || has_chosen) && learn(s, shared.top_p, found);
            s.search.collects = s.search.collects && has_chosen;
        }
        __syncthreads();
        if (!s.is_done) {
            // The guess once more, by what it was wrong.
            has_sums = has_bins && has_chosen;
            has_bins = false;
            return at;
        }
        if (has_chosen) {
            from = from_key(chosen.end_search(s.search, s));
            keep_above(chosen, from, team);
        } else if (s.least < s.most) {
            has_sums = true;
            return at;
        } else {
            from = s.question.from;
        }
        if (!is_mass && shared.top_p < 1.0f) {
            is_mass = true;
            has_bins = is_guess;
            next = kStarting;
            return at;
        }
        is_among = has_chosen && s.search.above == 0;
    }
    if (is_among) {
        if (team.rank == 0) {
            uint64_t total = s.above;
            if (next != kRanking) {
                total = chosen.kept_mass(s);
                chosen.draw(p, shared.weigher(), total, shared.bits, s);
            }
            chosen.write_top(p, shared.weigher(), total, s);
        }
        next = kDrawn;
        return at;
    }
    if (next == kRanking) {
        if (team.rank == 0) {
            rank_in_turn(from);
        }
        next = kDrawn;
        return at;
    }
    draw_in_row(from, s.above, shared.bits, team);
    const int num = wanted_top(p);
    if (num == 0) {
        if (team.rank == 0) {
            end_top(p, 0);
        }
        next = kDrawn;
        return at;
    }
    if (threadIdx.x == 0) {
        shared.bound = fmaxf(shared.top_bound, from);
    }
    next = kRanking;
    return at;
}

// All of a row but its first pass: its parameters and what the pass has found are in shared memory.
__device__ __forceinline__ void draw_by_search(bool is_counted, const TeamShared& shared) {
    const bool has_k = shared.top_k > 0 && shared.top_k < shared.p.size;
    const bool has_p = shared.top_p < 1.0f;
    Going at = {shared.floor, has_k || has_p ? kStarting : kWeighing,
                !has_k,       is_counted,
                is_counted,   is_counted};
#pragma unroll 1
    while (at.next != kDrawn) {
        at = ask_next(at);
        scan();
        at = go_on(at);
    }
}

}  // namespace kernel_hub::sampling::sm90
