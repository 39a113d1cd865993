// kernel_hub: allow-local-memory: at most 48 bytes, between tiles
// q, k, v = rotated(a b^T + bias) on Hopper, k and v written into a cache: bulk tensor copies and
// wgmma. sm_90a only.
//
//   a (m, k), b ((num_heads + 2 num_kv_heads) head_dim, k), of fp16 or bf16, head_dim a multiple of
//   32; halves rotated: rotary_dim a multiple of 64 that divides head_dim; neighbours: of 16; sums
//   and rotation in fp32, rounded once
//
// Rows of b come in an order that leaves both sums of a rotated pair in one thread, and 8
// neighbouring columns in one lane (BlockBoxes); in swapped tiles 8 rows are followed by their 8
// partners (PairedBoxes of matmul/paired/sm90.cuh). Where tokens go in the cache is worked out as
// append_kv.cu does (kv_place.cuh), under the products of a tile's first step. Parallelisation and
// shared memory as in linear_sm90.cu, without boxes for results: they leave from registers, 16
// bytes a lane. Variants, [swapped_]{rows}x{columns of a block's tile}_c{blocks of a cluster along
// rows, columns}[_k{blocks of a cluster that share k}][_b2: two blocks a multiprocessor]; swapped:
// few rows of a, rows of b are the rows of the product. All deterministic.
// Source: Su et al., "RoFormer", 2021; NVIDIA, PTX ISA, "Asynchronous warpgroup level matrix
// instructions".

#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/ptx.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "matmul/paired/qkv_ending.cuh"
#include "matmul/paired/sm90.cuh"

namespace kernel_hub::matmul::paired {

// Rows of b for tiles by blocks of 32, two by two: columns 0-31 of 64 of a tile are those that a
// rotation pairs with columns 32-63, or 64 that lie side by side. In a block the rows are in the
// order in which lane q of four has 8 neighbours: row 8 q + 2 j + e is number 8 j + 2 q + e.
struct BlockBoxes {
    const CUtensorMap* map;          // k; e; q; j; blocks
    int pairs_per_run, run_blocks;   // a run: what is rotated as one, pairs of blocks
    int block_step, block_distance;  // from a pair to the next one, and in a pair

    struct Walk {
        int run, pair, half;
    };
    __device__ __forceinline__ Walk begin(int first_row) const {
        const int pair = first_row / 64, run = pair / pairs_per_run;
        return {run * run_blocks, pair - run * pairs_per_run, first_row / 32 % 2};
    }
    __device__ __forceinline__ void next(Walk& walk, int& y, int& z) const {
        y = 0, z = walk.run + walk.pair * block_step + walk.half * block_distance;
        walk.half ^= 1;
        if (walk.half == 0 && ++walk.pair == pairs_per_run) {
            walk.pair = 0;
            walk.run += run_blocks;
        }
    }
    __device__ __forceinline__ int box_rows() const { return 32; }
};

constexpr int kMostSwapped = 128;  // tokens of a swapped tile

__device__ __forceinline__ TokenPlace* swapped_places() {
    __shared__ TokenPlace places[kMostSwapped];
    return places;
}

// Also for swapped tiles: pair lane / 4 of `group`, sums[4 j + 2 half + e] of token 8 j +
// 2 (lane % 4) + e. The tokens are the same in all tiles.
template <typename T>
struct QkvEndingSm90 : QkvEnding<T> {
    static constexpr int kUnit = 4;  // groups: a pair of blocks
    static constexpr bool kUnrolls = false, kChooses = false;
    BlockBoxes boxes;

    struct Prepared {
        TokenPlace places[2];
        BlockBoxes::Walk walk;
    };
    __device__ __forceinline__ void prepare(int row, int group, Prepared& prepared) const {
        int outside = 0;
        prepared.places[0] = this->find(row, outside);
        prepared.places[1] = this->find(row + 8, outside);
        this->say(outside);
        prepared.walk = boxes.begin(16 * group);
    }

    // kCount neighbours of a table's row, from 16-byte accesses (8 bytes: 4 of T).
    template <int kCount>
    __device__ __forceinline__ void load_entries(const void* table, int from,
                                                 float (&values)[kCount]) const {
        if (this->table_bytes == 4) {
#pragma unroll
            for (int i = 0; i < kCount; i += 4) {
                const float4 four = __ldg(
                    reinterpret_cast<const float4*>(static_cast<const float*>(table) + from + i));
                values[i] = four.x, values[i + 1] = four.y;
                values[i + 2] = four.z, values[i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < kCount; i += 4) {
                const uint2 four =
                    __ldg(reinterpret_cast<const uint2*>(static_cast<const T*>(table) + from + i));
                Word<T>::unpack(four.x, values + i);
                Word<T>::unpack(four.y, values + i + 2);
            }
        }
    }

    // A lane has columns 8 q to 8 q + 7 of two blocks: for block h, column 2 j + e of row + 8 r is
    // number 16 h + 4 j + 2 r + e.
    template <int kGroups>
    __device__ __forceinline__ void write(int row, int, const float (&given)[kGroups][2][4],
                                          Prepared& prepared) const {
        static_assert(kGroups == 4, "two blocks of 32 columns");
        const int q = threadIdx.x % 4, head_dim = this->heads.head_dim;
        const int total_heads = this->num_heads + 2 * this->num_kv_heads;
        const int rotated_heads = this->num_heads + this->num_kv_heads;
        const int rotary_dim = this->heads.rotary_dim;
        const TokenPlace(&places)[2] = prepared.places;
        int y, block, other, head[2], column[2];
        boxes.next(prepared.walk, y, block);
        boxes.next(prepared.walk, y, other);
        head[0] = block * 32 / head_dim;
        column[0] = block * 32 - head[0] * head_dim + 8 * q;
        const int from_first = column[0] + 32 * (other - block);
        const bool is_next = from_first >= head_dim;  // neighbours may be of two heads
        head[1] = head[0] + is_next;
        column[1] = from_first - (is_next ? head_dim : 0);
        float sums[2][16];
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            sums[i / 16][i % 16] = given[i / 8][i / 4 % 2][i % 4];
        }
        if (this->bias) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (head[h] < total_heads) {
                    float added[8];
                    unpack<T>(load_shared_by_blocks(this->bias + head[h] * head_dim + column[h]),
                              added);
#pragma unroll
                    for (int i = 0; i < 16; ++i) {
                        sums[h][i] += added[i / 4 * 2 + i % 2];
                    }
                }
            }
        }
        if (this->heads.is_interleaved) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (head[h] < rotated_heads && column[h] < rotary_dim) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float c[4], s[4];
                        const int position = places[r].position;
                        const int from = max(0, position) * this->table_stride + column[h] / 2;
                        const float added = position < 0 ? __int_as_float(0x7fffffff) : 0.0f;
                        load_entries(this->cos, from, c);
                        load_entries(this->sin, from, s);
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            this->rotate(sums[h][4 * j + 2 * r], sums[h][4 * j + 2 * r + 1], c[j],
                                         s[j], added);
                        }
                    }
                }
            }
        } else if (head[0] < rotated_heads && column[0] < rotary_dim) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float c[8], s[8];
                const int position = places[r].position;
                const int from = max(0, position) * this->table_stride + column[0];
                const float added = position < 0 ? __int_as_float(0x7fffffff) : 0.0f;
                load_entries(this->cos, from, c);
                load_entries(this->sin, from, s);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int at = i / 2 * 4 + 2 * r + i % 2;
                    this->rotate(sums[0][at], sums[1][at], c[i], s[i], added);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const auto to = this->destination(head[h]);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                uint32_t words[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    words[j] = pack2<T>(sums[h][4 * j + 2 * r], sums[h][4 * j + 2 * r + 1]);
                }
                if (T* address = this->at(to, places[r], row + 8 * r)) {
                    st_global(address + column[h],
                              make_uint4(words[0], words[1], words[2], words[3]));
                }
            }
        }
    }

    __device__ __forceinline__ void prepare_swapped(int thread, int num_threads) const {
        if (thread < kMostSwapped) {
            const TokenPlace found = this->find(thread);
            swapped_places()[thread] = found;
            if (this->cos && found.position >= 0) {  // its entries are far away by then
                const int64_t from =
                    int64_t{found.position} * this->table_stride * this->table_bytes;
                for (int at = 0; at < this->heads.rotary_dim / 2 * this->table_bytes; at += 128) {
                    prefetch_l2(static_cast<const char*>(this->cos) + from + at);
                    prefetch_l2(static_cast<const char*>(this->sin) + from + at);
                }
            }
        }
        named_barrier_sync(1, num_threads);
    }

    template <int kSums>
    __device__ __forceinline__ void write_swapped(int, int group,
                                                  const float (&given)[kSums]) const {
        const HeadRows& heads = this->heads;
        const int lane = threadIdx.x % 32, w = lane / 4;
        const int head = heads.head(group), first = heads.first(group);
        if (head >= this->num_heads + 2 * this->num_kv_heads) {
            return;
        }
        const auto destination = this->destination(head);
        float sums[kSums];
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            sums[i] = given[i];
        }
        if (this->bias) {
            const T* added = this->bias + static_cast<int64_t>(head) * heads.head_dim;
            const float low = to_float(__ldg(added + heads.column(first, 0, w)));
            const float high = to_float(__ldg(added + heads.column(first, 1, w)));
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                sums[i] += i / 2 % 2 ? high : low;
            }
        }
        if (this->is_rotated(head, first)) {
            // All loads first, whatever the positions are: branches would keep them apart.
            float c[kSums / 2], s[kSums / 2];
#pragma unroll
            for (int i = 0; i < kSums / 2; ++i) {
                const int position =
                    swapped_places()[8 * (i / 2) + 2 * (lane % 4) + i % 2].position;
                const int from = max(0, position) * this->table_stride + first / 2 + w;
                c[i] = this->load_entry(this->cos, from);
                s[i] = this->load_entry(this->sin, from);
            }
#pragma unroll
            for (int i = 0; i < kSums / 2; ++i) {
                const int at = i / 2 * 4 + i % 2;
                const int position =
                    swapped_places()[8 * (i / 2) + 2 * (lane % 4) + i % 2].position;
                this->rotate(sums[at], sums[at + 2], c[i], s[i],
                             position < 0 ? __int_as_float(0x7fffffff) : 0.0f);
            }
        }
#pragma unroll
        for (int j = 0; j < kSums / 4; ++j) {
            // Two tokens of a pair; transposed, pairs 2 q and 2 q + 1 of one token.
            const uint32_t low = movmatrix_trans(pack2<T>(sums[4 * j], sums[4 * j + 1]));
            const uint32_t high = movmatrix_trans(pack2<T>(sums[4 * j + 2], sums[4 * j + 3]));
            const int token = 8 * j + lane / 4, pair = 2 * (lane % 4);
            T* to = this->at(destination, swapped_places()[token], token);
            if (!to) {
                continue;
            }
            if (heads.is_interleaved) {
                *reinterpret_cast<uint2*>(to + first + 2 * pair) =
                    make_uint2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
            } else {
                *reinterpret_cast<uint32_t*>(to + heads.column(first, 0, pair)) = low;
                *reinterpret_cast<uint32_t*>(to + heads.column(first, 1, pair)) = high;
            }
        }
    }
};

// BOXES: of tiles that are swapped or not.
#define EXPORT_QKV_LINEAR(NAME, T, BOXES, ...)                                                     \
    DESCRIBED(                                                                                     \
        NAME, "x: as many clusters as run at once, or as there are tiles of block_m x block_n",    \
        (facts_of<PairedConfig<__VA_ARGS__>>(PairedConfig<__VA_ARGS__>::kBiasAt)),                 \
        extern "C" __global__ void __cluster_dims__(PairedConfig<__VA_ARGS__>::kClusterSize, 1, 1) \
        __launch_bounds__(PairedConfig<__VA_ARGS__>::kThreads,                                     \
                          PairedConfig<__VA_ARGS__>::kMinBlocks)                                   \
        NAME(T* q, T* k_cache, T* v_cache, int* flag, const __grid_constant__ CUtensorMap a_map,   \
             const __grid_constant__ CUtensorMap a_tail,                                           \
             const __grid_constant__ CUtensorMap b_map, QKV_TABLES(T), QKV_STRIDES, int m, int k,  \
             QKV_NUMBERS, int pairs_per_run, int run_blocks, int block_step, int block_distance,   \
             int groups_per_block, int box_rows, int group, int ready) {                           \
            [[maybe_unused]] const PairedBoxes swapped_boxes{&b_map, groups_per_block, box_rows};  \
            const BlockBoxes block_boxes{&b_map, pairs_per_run, run_blocks, block_step,            \
                                         block_distance};                                          \
            paired_linear_sm90<T, PairedConfig<__VA_ARGS__>>(                                      \
                QkvEndingSm90<T>{{QKV_ENDING(head_dim, rotary_dim, paired_dim, is_interleaved)},   \
                                 block_boxes},                                                     \
                &a_map, &a_tail, BOXES, m, (num_heads + 2 * num_kv_heads) * (head_dim / 16), k,    \
                group, ready);                                                                     \
        })

#define EXPORT_BOTH(NAME, BOXES, ...)                                     \
    EXPORT_QKV_LINEAR(qkv_linear_fp16_##NAME, __half, BOXES, __VA_ARGS__) \
    EXPORT_QKV_LINEAR(qkv_linear_bf16_##NAME, __nv_bfloat16, BOXES, __VA_ARGS__)
// clang-format off
EXPORT_BOTH(128x256_c21, block_boxes, kTogether, 2, 1, 256, 4, 2, 1, 1, 0, 1)
EXPORT_BOTH(128x320_c21, block_boxes, kTogether, 2, 2, 160, 4, 2, 1, 1, 0, 1)
EXPORT_BOTH(128x192_c21, block_boxes, kTogether, 2, 1, 192, 5, 2, 1, 1, 0, 1)
EXPORT_BOTH(128x128_c21, block_boxes, kTogether, 2, 1, 128, 7, 2, 1, 1, 0, 1)
EXPORT_BOTH(128x128_c11, block_boxes, kTogether, 2, 1, 128, 7, 1, 1, 1, 0, 1)
EXPORT_BOTH(swapped_64x16_c11_b2, swapped_boxes, kSwapped, 1, 1, 16, 10, 1, 1, 1, 0, 2)
EXPORT_BOTH(swapped_64x16_c11_k4_b2, swapped_boxes, kSwapped, 1, 1, 16, 10, 1, 1, 4, 0, 2)
EXPORT_BOTH(swapped_64x32_c11_b2, swapped_boxes, kSwapped, 1, 1, 32, 8, 1, 1, 1, 0, 2)
EXPORT_BOTH(swapped_64x32_c11_k4_b2, swapped_boxes, kSwapped, 1, 1, 32, 8, 1, 1, 4, 0, 2)
EXPORT_BOTH(swapped_48x64_c11, swapped_boxes, kSwapped, 1, 1, 64, 15, 1, 1, 1, 0, 1, 48)
EXPORT_BOTH(swapped_64x64_c11, swapped_boxes, kSwapped, 1, 1, 64, 13, 1, 1, 1, 0, 1)
EXPORT_BOTH(swapped_64x64_c11_k2, swapped_boxes, kSwapped, 1, 1, 64, 13, 1, 1, 2, 0, 1)
EXPORT_BOTH(swapped_64x64_c11_k4, swapped_boxes, kSwapped, 1, 1, 64, 13, 1, 1, 4, 0, 1)
EXPORT_BOTH(swapped_64x128_c11, swapped_boxes, kSwapped, 1, 1, 128, 9, 1, 1, 1, 0, 1)
// clang-format on

}  // namespace kernel_hub::matmul::paired
