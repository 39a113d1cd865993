// flash_attention_split_sm90.cu: the work of a launch as one line of units, dealt to its blocks.
//
// A tile is packing.tokens tokens of packing.heads heads of a group. Of what it sees, a unit is
//   in shares: kBlockN keys; each block takes a stretch of the line, all of them equally long;
//   in parts:  an equal part, of `longest` blocks of keys at most; a block takes one of them, or
//              where there are more of them draws the next, as in turn;
//   in turn:   all that it sees, or where lengths are on the device and a merge comes after parts
//              of no more than a share, the longest first; a block takes one of each round, or
//              where lengths or what tiles see of them differ draws the next
//              (Parameters::tile_counter), so that those that run at a time read the same keys:
//              with shares longer than a tile, each block reads keys of its own from memory, of
//              many kv heads at a time.
// Parts are longer than shares, and are fewer pieces: a share may have the ends of two tiles.
// Tiles of a sequence are as wide as its widest. In the line come, outermost first: sequences, kv
// heads, chunks of keys (of a share's length, or a part), tiles, the last one first, units: blocks
// that run side by side read the same keys. What a block has of a tile in one stretch is a piece,
// which goes to memory unless it is the whole tile.
//
// NOTE: in turn, a piece and all that comes before it is half a share or longer, as of w > s blocks
// a part has more than s / 2: they are less than two a block. NOTE: chunks are half a share or
// longer, so that of a block's pieces at most one lies inside its share: Packing::kSlots is 3.
#pragma once

#include "attention/sm90/plan.cuh"
#include "attention/sm90/ranks.cuh"
#include "kernel_hub/math.cuh"

namespace kernel_hub::attention::sm90 {

// A stretch of a tile's units, and of the line.
struct Stretch {
    int begin, count;  // units of the tile
    int at;            // of its first in the line
};

// Whole blocks among so many keys, of which there are less than 2^31.
template <class C>
__device__ __forceinline__ int blocks_in(const Parameters& p, int keys) {
    if constexpr (C::kBlockN != 0) {
        return keys / C::kBlockN;
    } else {
        return static_cast<int>(static_cast<uint64_t>(keys / 16) * p.packing.reciprocal_n >> 32);
    }
}

// Blocks that so many keys lie in.
template <class C>
__device__ __forceinline__ int blocks_over(const Parameters& p, int keys) {
    if constexpr (C::kBlockN != 0) {
        return (keys + C::kBlockN - 1) / C::kBlockN;
    } else {
        return keys > 0 ? blocks_in<C>(p, keys - 1) + 1 : 0;
    }
}

__device__ __forceinline__ int parts_of(int blocks, int longest) {
    return quotient(blocks + longest - 1, longest);
}

// What a sequence has to do.
template <class C>
struct Sequence {
    int q_begin, seqlen_q, seqlen_k;
    int tiles;                      // that share the keys of a kv head
    int width;                      // units of a tile, at most
    int unit;                       // blocks of keys of a unit
    int packs;                      // tiles of the same tokens
    int chunk, chunks, last_begin;  // units: of a chunk, ..., where the last one begins

    // In blocks of keys; `deal` makes units of them.
    __device__ __forceinline__ Sequence(const Parameters& p, int batch) {
        const RowRange queries = find_queries(p, batch);
        q_begin = queries.start;
        seqlen_q = queries.count;
        seqlen_k = find_keys(p, batch).count;
        packs = p.packing.packs(quotient(p.num_heads, p.num_kv_heads));
        const int rows = min(seqlen_q, p.seqlen_q);
        tiles = quotient(rows + p.packing.tokens - 1, p.packing.tokens) * packs;
        width = blocks_over<C>(p, seqlen_k);
        if (C::kMask == Mask::kWindow && p.window_left >= 0) {
            width -= blocks_in<C>(p, max(0, seqlen_k - seqlen_q - p.window_left));
            if (p.window_right >= 0) {
                const int span = p.packing.tokens + p.window_left + p.window_right;
                width = min(width, blocks_over<C>(p, span - 1) + 1);
            }
        }
        unit = 1;
    }

    // longest, share: Packing's, found, and of the line.
    __device__ __forceinline__ void deal(int longest, int share) {
        if (longest != 1 && width > 0) {
            const int blocks = width;
            width = C::kHasParts ? parts_of(blocks, longest) : 1;
            unit = C::kHasParts ? parts_of(blocks, width) : blocks;
        }
        cut(share);
    }

    __device__ __forceinline__ int units(const Parameters& p) const {
        return p.num_kv_heads * tiles * width;
    }

    // Cuts the width into chunks: of a share, but the last two where the rest is short.
    __device__ __forceinline__ void cut(int share) {
        chunk = share;
        chunks = max(1, share == 1 ? width : parts_of(width, share));
        last_begin = (chunks - 1) * share;
        const int rest = width - last_begin;
        if (chunks > 1 && 2 * rest < share) {
            last_begin += (share + rest + 1) / 2 - share;
        }
    }
    __device__ __forceinline__ int chunk_begin(int index) const {
        return index < chunks - 1 ? index * chunk : index < chunks ? last_begin : width;
    }
    __device__ __forceinline__ int chunk_width(int index) const {
        return chunk_begin(index + 1) - chunk_begin(index);
    }
    // Where the units of a tile of kv head `kv_head` begin in the sequence's part of the line: the
    // last tile first, which sees the most keys.
    __device__ __forceinline__ int place(int kv_head, int index, int tile) const {
        return (kv_head * width + chunk_begin(index)) * tiles +
               (tiles - 1 - tile) * chunk_width(index);
    }
    __device__ __forceinline__ bool is_whole(const Stretch& s) const {
        return chunks == 1 && s.begin == 0 && s.count == width;
    }

    // The tile with the blocks of keys of a stretch that it sees.
    __device__ __forceinline__ Tile describe(const Parameters& p, int batch, int kv_head, int tile,
                                             const Stretch& s, int slot) const {
        Tile found;
        const int token_tile = quotient(tile, packs);
        found.row_begin = token_tile * p.packing.tokens;
        found.batch = batch;
        found.head = ((kv_head - token_tile) * packs + tile) * p.packing.heads | (slot + 1) << 16;
        found.q_begin = q_begin;
        found.seqlen_q = seqlen_q;
        found.seqlen_k = seqlen_k;
        int begin = 0, end = seqlen_k;
        if (p.window_right >= 0) {
            const int row_end = min(found.row_begin + p.packing.tokens, seqlen_q);
            end = max(0, min(end, row_end + found.offset() + p.window_right));
        }
        if (C::kMask == Mask::kWindow && p.window_left >= 0) {
            begin = blocks_in<C>(p, max(0, found.row_begin + found.offset() - p.window_left));
        }
        found.block_begin = begin + s.begin * unit;
        found.block_end = min(blocks_over<C>(p, end), found.block_begin + s.count * unit);
        return found;
    }
};

// Where a piece goes that is `count` units from `at` on in the line.
__device__ __forceinline__ int slot_of(int at, int count, int share) {
    if (share == 1) {
        return at;
    }
    const int block = quotient(at, share);
    const int inner = at == block * share ? 0 : at + count == (block + 1) * share ? 2 : 1;
    return block * Packing::kSlots + inner;
}

__device__ __forceinline__ bool has_device_lengths(const Parameters& p) {
    return p.cu_seqlens_q || p.cu_seqlens_k || p.cache_seqlens;
}

// Whether tiles in turn are whole though lengths are on the device, so that no merge comes after.
__device__ __forceinline__ bool is_alone(const Parameters& p) {
    return has_device_lengths(p) && !p.packing.line;
}

__device__ __forceinline__ int share_of(const Parameters& p, int longest, int units, int blocks) {
    return longest != 1 ? 1 : max(p.packing.least_blocks, parts_of(units, blocks));
}

// The blocks of keys of a share. Every thread of the block, each with a sequence: `tiles` of so
// many blocks of keys.
__device__ __forceinline__ int find_share(const Parameters& p, Line& line, int tiles, int blocks) {
    if (threadIdx.x <= Line::kTried) {
        line.sums[threadIdx.x] = 0;
    }
    __syncthreads();
    const unsigned sum = __reduce_add_sync(kAllLanes, static_cast<unsigned>(tiles * blocks));
    if (threadIdx.x % 32 == 0 && threadIdx.x < p.batch_size) {
        atomicAdd(&line.sums[Line::kTried], static_cast<int>(sum));
    }
    __syncthreads();
    return max(2, share_of(p, 1, line.sums[Line::kTried], gridDim.x));
}

// About the shortest parts of which there is one a block, if they are no more than so many steps
// longer than a share; else 1. As above.
__device__ __forceinline__ int find_longest(const Parameters& p, Line& line, int tiles, int blocks,
                                            int share, int more, bool is_coarse) {
    const int step = 1 + share / (is_coarse ? Packing::kCoarseStep : Packing::kStep);
    if (threadIdx.x / 32 * 32 < p.batch_size) {
#pragma unroll 1
        for (int i = 0; i <= more; ++i) {
            const unsigned parts = __reduce_add_sync(
                kAllLanes, static_cast<unsigned>(tiles * parts_of(blocks, share + i * step)));
            if (threadIdx.x % 32 == 0) {
                atomicAdd(&line.sums[i], static_cast<int>(parts));
            }
        }
    }
    __syncthreads();
    int found = 0;
    while (found <= more && line.sums[found] > static_cast<int>(gridDim.x)) {
        ++found;
    }
    return found <= more ? share + found * step : 1;
}

// Finds where each sequence begins, or where lengths are not on the device the units of the first.
// Every thread of the block; who reads it needs a barrier. The first block writes it down for the
// merge.
template <class C>
__device__ __forceinline__ void make_line(const Parameters& p, Line& line) {
    const bool has_lengths = has_device_lengths(p);
    int longest = p.packing.longest, blocks = 0, tiles = 0;
    if (threadIdx.x < (has_lengths ? p.batch_size : 1)) {
        const Sequence<C> sequence(p, threadIdx.x);
        blocks = sequence.width;
        tiles = p.num_kv_heads * sequence.tiles;
    }
    int rank = threadIdx.x;
    if (has_lengths && longest != 1 && longest != Packing::kAsTheyCome) {
        const int share = find_share(p, line, tiles, blocks);
        if (longest > 1) {
            longest = C::kHasParts && p.packing.line ? min(longest, share) : longest;
            const int parts = C::kHasParts ? max(1, parts_of(blocks, longest)) : 1;
            rank = find_rank(p, line, (blocks + parts - 1) / parts,
                             tiles * blocks * p.batch_size == line.sums[Line::kTried]);
        } else if (C::kHasParts) {
            const bool is_coarse = -longest >= Line::kTried;
            const int most = -longest % Line::kTried;
            const int more = min(most, (share - p.packing.least_blocks) / 2);
            longest = find_longest(p, line, tiles, blocks, share, more, is_coarse);
        }
    }
    line.longest = longest;
    if (C::kHasParts) {
        blocks = parts_of(blocks, longest);
    } else if (longest != 1) {
        blocks = min(blocks, 1);
    }
    if (threadIdx.x < (has_lengths ? p.batch_size : 1)) {
        line.begin[rank] = tiles * blocks;
        line.batch[rank] = threadIdx.x;
    }
    if (!has_lengths) {
        return;
    }
    const bool is_written = blockIdx.x == 0 && p.packing.line;
    if (is_written && threadIdx.x == 0) {
        p.packing.line[p.batch_size + 1] = longest;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        int sum = 0;
#pragma unroll 1
        for (int first = 0; first <= p.batch_size; first += 32) {
            const int i = first + threadIdx.x;
            const int own = i < p.batch_size ? line.begin[i] : 0;
            int end = own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int left = __shfl_up_sync(~0u, end, step);
                end += threadIdx.x >= step ? left : 0;
            }
            if (i <= p.batch_size) {
                line.begin[i] = sum + end - own;
                if (is_written) {
                    p.packing.line[i < p.batch_size ? line.batch[i] : i] = sum + end - own;
                }
            }
            sum += __shfl_sync(~0u, end, 31);
        }
    }
}

// Walks through a block's share, or shares.
template <class C>
struct Walker {
    const Parameters& p;
    const Line& line;
    int first, place, at, end, longest, share, units, batch = 0;  // first: of the round
    bool is_drawn;  // units, from the counter, but for the block's first

    __device__ __forceinline__ Walker(const Parameters& p_, const Line& line_)
        : p(p_), line(line_), longest(line_.longest) {
        units = has_device_lengths(p) ? line.begin[p.batch_size] : line.begin[0] * p.batch_size;
        share = share_of(p, longest, units, gridDim.x);
        is_drawn = (has_device_lengths(p) || p.packing.together != 1) && p.packing.longest > 1 &&
                   p.packing.longest != Packing::kAsTheyCome && units > static_cast<int>(gridDim.x);
        first = 0;
        place = blockIdx.x;
        at = place * share;
        end = min(at + share, units);
        // The last sequence that begins at `at` or before it.
        int behind = has_device_lengths(p) ? p.batch_size : 1;
#pragma unroll 1
        while (behind - batch > 1) {
            const int middle = (batch + behind) / 2;
            const bool is_before = line.begin[middle] <= at;
            batch = is_before ? middle : batch;
            behind = is_before ? behind : middle;
        }
    }

    // Whole tiles of sequences of one length: the place in the line of the one that is `index`-th
    // where the last ones of all kv heads that run together come first.
    __device__ __forceinline__ int place_of(int index) const {
        const int tiles = quotient(line.begin[0], p.num_kv_heads), together = p.packing.together;
        const int group = quotient(index, together * tiles);
        const int size = min(together, p.batch_size * p.num_kv_heads - group * together);
        const int rest = index - group * together * tiles;
        const int row = quotient(rest, size);
        return (group * together + rest - row * size) * tiles + row;
    }

    // The next piece that sees keys.
    __device__ __forceinline__ bool next(Tile& tile) {
#pragma unroll 1
        while (true) {
            if (at >= end && is_drawn) {
                // Where a piece goes is its unit's, whoever drew it: the same bits every time.
                const int ticket = threadIdx.x % 32 == 0 ? atomicAdd(p.tile_counter, 1) : 0;
                at = gridDim.x + __shfl_sync(kAllLanes, ticket, 0);
                end = at + 1;
                if (at >= units) {
                    return false;
                }
                continue;
            }
            if (at >= end) {
                // Every second round from its other end: who had the longest has the shortest.
                first += gridDim.x * share;
                place = gridDim.x - 1 - place;
                at = first + place * share;
                end = min(at + share, units);
                if (first >= units) {
                    return false;
                }
                continue;
            }
            int rest;
            if (has_device_lengths(p)) {
#pragma unroll 1
                while (line.begin[batch + 1] <= at) {
                    ++batch;
                }
                rest = at - line.begin[batch];
            } else {
                const int own = line.begin[0], in_line = p.packing.together > 1 ? place_of(at) : at;
                batch = quotient(in_line, own);
                rest = in_line - batch * own;
            }
            const int found = has_device_lengths(p) ? line.batch[batch] : batch;
            Sequence<C> sequence(p, found);
            sequence.deal(longest, share);
            const int kv_head = quotient(rest, sequence.tiles * sequence.width);
            rest -= kv_head * sequence.tiles * sequence.width;
            const int unit = quotient(rest, sequence.tiles);
            Stretch s{unit, 1, at};
            int which = sequence.tiles - 1 - rest + unit * sequence.tiles;
            if (share > 1) {  // NOTE: a warp finds a block's first tile while all others wait
                const int last = sequence.chunks - 1;
                const int index =
                    unit >= sequence.last_begin ? last : min(quotient(unit, share), last - 1);
                rest -= sequence.chunk_begin(index) * sequence.tiles;
                const int width = sequence.chunk_width(index);
                const int before = quotient(rest, width);
                which = sequence.tiles - 1 - before;
                rest -= before * width;
                s = {sequence.chunk_begin(index) + rest, min(width - rest, end - at), at};
            }
            const int slot = sequence.is_whole(s) ? -1 : slot_of(at, s.count, share);
            tile = sequence.describe(p, found, kv_head, which, s, slot);
            at += s.count;
            if (!tile.is_empty()) {
                return true;
            }
        }
    }
};

}  // namespace kernel_hub::attention::sm90
