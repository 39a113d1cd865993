// What the bodies of qkv_linear share: the rows of b that a rotation pairs, and where results go.
#pragma once

#include "kernel_hub/kv_place.cuh"
#include "kernel_hub/ptx.cuh"
#include "matmul/epilogue.cuh"

namespace kernel_hub::matmul::paired {

// b holds head_dim rows a head: query heads, key heads, value heads. Heads are taken 16 columns at
// a time: of the first `paired_dim` those that a rotation pairs, the others as they lie. head_dim
// is a multiple of 32, rotary_dim of 16.
struct HeadRows {
    int head_dim, rotary_dim, paired_dim, is_interleaved;

    __device__ __forceinline__ int head(int group) const { return group / (head_dim / 16); }
    // The first of the 16 columns of the head.
    __device__ __forceinline__ int first(int group) const { return group % (head_dim / 16) * 16; }
    // The column of the head that is number w of a half.
    __device__ __forceinline__ int column(int first, int half, int w) const {
        if (is_interleaved) {
            return first + 2 * w + half;
        }
        if (first >= paired_dim) {
            return first + 8 * half + w;
        }
        const int in_block = rotary_dim == head_dim ? first : first % rotary_dim;
        return first - in_block + half * (rotary_dim / 2) + in_block / 2 + w;
    }
    __device__ __forceinline__ int64_t at(int group, int half, int w) const {
        return static_cast<int64_t>(head(group)) * head_dim + column(first(group), half, w);
    }
};

// Where a token's keys and values go (row below 0: nowhere), and its row of the tables (below 0:
// none). Queries outside every sequence are not written.
struct TokenPlace {
    int position, page, row, is_inside;
};

// 32 columns of a head that are to be written, two groups, and what is loaded for them, as it was
// loaded.
struct HeadPart {
    int head, first;
    int num_rotated;  // columns of the head
    int in_block;     // of the first group, among rotary_dim columns
    int low[2],
        distance[2];  // of a group: where its first half begins, and from there to the other
    uint2 cos[2][2], sin[2][2];  // pairs 2 (lane % 4) and the next one, of a group, a row
    uint32_t bias[2][2];         // the same of a group, a half
};

// One destination: of head h of a token, at page * page_stride + row * row_stride + h *
// head_stride.
template <typename T>
struct HeadTarget {
    T* data;
    int64_t page_stride, row_stride, head_stride;
    __device__ __forceinline__ T* at(int page, int row, int head) const {
        return data + page * page_stride + row * row_stride + head * head_stride;
    }
};

template <typename T>
struct QkvEnding {
    static constexpr int kUnit = 2;  // groups: 32 columns of a head
    HeadTarget<T> q, k, v;           // a row of q is a token
    const T* bias;                   // or null
    const void* cos;                 // (max_position, rotary_dim / 2), of T or of fp32
    const void* sin;
    int table_stride;  // the tables have fewer than 2^31 elements
    Routing routing;
    HeadRows heads;
    int m, num_heads, num_kv_heads, seqlen, max_position, table_bytes;

    // The places of two rows of a tile, and the part of a head that is next.
    struct Prepared {
        TokenPlace places[2];
        HeadPart next;
    };

    // Adds to `outside` what led there.
    __device__ __forceinline__ TokenPlace find(int token, int& outside) const {
        TokenPlace found{-1, 0, -1, 0};
        if (token < m) {
            const Place place = find_place(routing, token, token / seqlen, token % seqlen, false);
            found.is_inside = place.is_inside;
            found.page = place.page;
            found.row = place.is_inside && place.is_stored ? place.row : -1;
            if (routing.page_size == 0) {  // no cache: keys and values lie as tokens do
                found.page = 0;
                found.row = place.is_inside ? token : -1;
            }
            const bool is_known = place.position >= 0 && place.position < max_position;
            found.position = is_known ? static_cast<int>(place.position) : -1;
            const bool is_missing = place.is_inside && !place.is_stored;
            outside |= (place.is_odd ? kTokensOutside : 0) |
                       (is_missing ? find_missing(routing, token, place.row) : 0) |
                       (place.is_inside && !is_known ? kPositionsOutside : 0);
        }
        return found;
    }

    // Reports what led outside; positions do not matter without cos.
    __device__ __forceinline__ void say(int outside) const {
        report(routing.flag, cos != nullptr ? outside : outside & ~kPositionsOutside);
    }

    __device__ __forceinline__ TokenPlace find(int token) const {
        int outside = 0;
        const TokenPlace found = find(token, outside);
        say(outside);
        return found;
    }

    // Prepares `row` and row + 8, from `group` on, which is even.
    __device__ __forceinline__ void prepare(int row, int group, Prepared& prepared) const {
        int outside = 0;
        prepared.places[0] = find(row, outside);
        prepared.places[1] = find(row + 8, outside);
        say(outside);
        HeadPart& part = prepared.next;
        part.head = heads.head(group);
        part.first = heads.first(group);
        part.in_block = heads.rotary_dim > 0 ? part.first % heads.rotary_dim : 0;
        load(prepared.places, part);
    }

    // Whether these columns of a head are rotated.
    __device__ __forceinline__ bool is_rotated(int head, int first) const {
        return first < heads.rotary_dim && head < num_heads + num_kv_heads;
    }

    // Where a head goes, for all tokens.
    struct Destination {
        HeadTarget<T> target;
        int head;
        bool is_query, exists;
    };
    __device__ __forceinline__ Destination destination(int head) const {
        const bool is_query = head < num_heads, is_key = head < num_heads + num_kv_heads;
        Destination found;
        found.target = is_query ? q : is_key ? k : v;
        found.head = is_query ? head : head - num_heads - (is_key ? 0 : num_kv_heads);
        found.is_query = is_query;
        found.exists = head < num_heads + 2 * num_kv_heads;
        return found;
    }
    // The place of a token's head, or null where it is not written.
    static __device__ __forceinline__ T* at(const Destination& to, const TokenPlace& place,
                                            int token) {
        const bool is_written = to.exists && (to.is_query ? place.is_inside != 0 : place.row >= 0);
        T* found =
            to.target.at(to.is_query ? 0 : place.page, to.is_query ? token : place.row, to.head);
        return is_written ? found : nullptr;
    }

    // One entry of a table.
    __device__ __forceinline__ float load_entry(const void* table, int from) const {
        return table_bytes == 4 ? __ldg(static_cast<const float*>(table) + from)
                                : to_float(__ldg(static_cast<const T*>(table) + from));
    }

    // Starts the loads for a part.
    __device__ __forceinline__ void load(const TokenPlace (&places)[2], HeadPart& part) const {
        const int q = threadIdx.x % 4, rotary_dim = heads.rotary_dim;
        part.num_rotated = part.head < num_heads + num_kv_heads ? rotary_dim : 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int first = part.first + 16 * i;
            int in_block = part.in_block + 16 * i;
            in_block -= in_block >= rotary_dim ? rotary_dim : 0;
            const bool is_paired = first < heads.paired_dim;
            part.low[i] = is_paired ? first - in_block / 2 : first;
            part.distance[i] = is_paired ? rotary_dim / 2 : 8;
            if (first < part.num_rotated) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int from = max(0, places[r].position) * table_stride + first / 2 + 2 * q;
                    if (table_bytes == 4) {
                        part.cos[i][r] = ldg_2(static_cast<const float*>(cos) + from);
                        part.sin[i][r] = ldg_2(static_cast<const float*>(sin) + from);
                    } else {
                        part.cos[i][r].x = ldg_1(static_cast<const T*>(cos) + from);
                        part.sin[i][r].x = ldg_1(static_cast<const T*>(sin) + from);
                    }
                }
            }
            if (bias && part.head < num_heads + 2 * num_kv_heads) {
                const T* added = bias + part.head * heads.head_dim;
                if (heads.is_interleaved) {
                    const uint2 words = ldg_2(added + first + 4 * q);
                    part.bias[i][0] = words.x, part.bias[i][1] = words.y;
                } else {
                    part.bias[i][0] = ldg_1(added + part.low[i] + 2 * q);
                    part.bias[i][1] = ldg_1(added + part.low[i] + part.distance[i] + 2 * q);
                }
            }
        }
    }
    static __device__ __forceinline__ uint32_t ldg_1(const void* address) {
        return __ldg(static_cast<const uint32_t*>(address));
    }
    static __device__ __forceinline__ uint2 ldg_2(const void* address) {
        return __ldg(static_cast<const uint2*>(address));
    }

    // Two entries of a table as they were loaded.
    __device__ __forceinline__ void unpack_table(uint2 bits, float (&values)[2]) const {
        if (table_bytes == 4) {
            values[0] = __uint_as_float(bits.x), values[1] = __uint_as_float(bits.y);
        } else {
            Word<T>::unpack(bits.x, values);
        }
    }

    // `added`: 0, or nan where the tables have no row.
    static __device__ __forceinline__ void rotate(float& first, float& second, float c, float s,
                                                  float added) {
        const float rotated = first * c + added - second * s;
        second = second * c + added + first * s;
        first = rotated;
    }

    // The places of the few rows that write_pair is for, found by the first threads of the block,
    // which must meet before it.
    static constexpr int kFewRows = 16;
    static __device__ __forceinline__ TokenPlace* few_places() {
        __shared__ TokenPlace places[kFewRows];
        return places;
    }
    __device__ __forceinline__ void prepare_few() const {
        if (threadIdx.x < kFewRows) {
            few_places()[threadIdx.x] = find(threadIdx.x);
        }
    }

    // One pair.
    __device__ __forceinline__ void write_pair(int token, int group, int w, float first,
                                               float second) const {
        const int head = heads.head(group), first_column = heads.first(group);
        const int columns[2] = {heads.column(first_column, 0, w), heads.column(first_column, 1, w)};
        const TokenPlace place = few_places()[token];
        if (bias) {
            const T* added = bias + static_cast<int64_t>(head) * heads.head_dim;
            first += to_float(__ldg(added + columns[0]));
            second += to_float(__ldg(added + columns[1]));
        }
        if (is_rotated(head, first_column)) {
            const int from = max(0, place.position) * table_stride + first_column / 2 + w;
            rotate(first, second, load_entry(cos, from), load_entry(sin, from),
                   place.position < 0 ? __int_as_float(0x7fffffff) : 0.0f);
        }
        if (T* to = at(destination(head), place, token)) {
            to[columns[0]] = from_float<T>(first);
            to[columns[1]] = from_float<T>(second);
        }
    }

    // Adds the bias to a lane's pairs 2 q and 2 q + 1 of a group, for two rows.
    __device__ __forceinline__ void add_bias(const uint32_t (&words)[2],
                                             float (&sums)[2][4]) const {
        const bool swaps = heads.is_interleaved;
        float pairs[2][2];
        const uint32_t low = (words[0] & 0xffff) | words[1] << 16;
        const uint32_t high = words[0] >> 16 | (words[1] & 0xffff0000u);
        Word<T>::unpack(swaps ? low : words[0], pairs[0]);
        Word<T>::unpack(swaps ? high : words[1], pairs[1]);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sums[i / 4][i % 4] += pairs[i / 4][i % 2];
        }
    }

    // Whole groups of two rows, as matmul/paired/portable.cuh has it; always two of one head.
    template <int kGroups>
    __device__ __forceinline__ void write(int row, int, const float (&given)[kGroups][2][4],
                                          Prepared& prepared) const {
        static_assert(kGroups == 2, "a part has two groups");
        const HeadPart part = prepared.next;
        HeadPart next;
        next.head = part.head, next.first = part.first + 32, next.in_block = part.in_block + 32;
        if (next.first >= heads.head_dim) {
            ++next.head;
            next.first = next.in_block = 0;
        }
        next.in_block -= next.in_block >= heads.rotary_dim ? heads.rotary_dim : 0;
        next.in_block -= next.in_block >= heads.rotary_dim ? heads.rotary_dim : 0;
        // NOTE: the next part's loads start here, so that none is waited for.
        load(prepared.places, next);
        prepared.next = next;
        float sums[2][2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                sums[i][e / 4][e % 4] = given[i][e / 4][e % 4];
            }
            if (bias) {
                add_bias(part.bias[i], sums[i]);
            }
            if (part.first + 16 * i < part.num_rotated) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float c[2], s[2];
                    unpack_table(part.cos[i][r], c);
                    unpack_table(part.sin[i][r], s);
                    const float added =
                        prepared.places[r].position < 0 ? __int_as_float(0x7fffffff) : 0.0f;
#pragma unroll
                    for (int w = 0; w < 2; ++w) {
                        rotate(sums[i][0][2 * r + w], sums[i][1][2 * r + w], c[w], s[w], added);
                    }
                }
            }
        }
        const Destination to = destination(part.head);
        put(at(to, prepared.places[0], row), part, 0, sums);
        put(at(to, prepared.places[1], row + 8), part, 1, sums);
    }

    // One row, 16 bytes a lane.
    __device__ __forceinline__ void put(T* to, const HeadPart& part, int r,
                                        const float (&sums)[2][2][4]) const {
        const int q = threadIdx.x % 4, e = 2 * r;
        uint32_t words[4];
        int column;
        if (heads.is_interleaved) {
            // A lane has 4 columns of each group; neighbours swap, and have 8 of one.
            const bool is_odd = q & 1;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t low = pack2<T>(sums[0][0][e + i], sums[0][1][e + i]);
                const uint32_t high = pack2<T>(sums[1][0][e + i], sums[1][1][e + i]);
                const uint32_t got = __shfl_xor_sync(~0u, is_odd ? low : high, 1);
                words[i] = is_odd ? got : low;
                words[2 + i] = is_odd ? high : got;
            }
            column = part.first + 16 * is_odd + 8 * (q / 2);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                words[i] = pack2<T>(sums[i / 2][i % 2][e], sums[i / 2][i % 2][e + 1]);
            }
            transpose_quad(words, q);
            column = q < 2 ? part.low[0] : part.low[1];
            column += q % 2 ? (q < 2 ? part.distance[0] : part.distance[1]) : 0;
        }
        if (to) {
            st_global(to + column, make_uint4(words[0], words[1], words[2], words[3]));
        }
    }
};

// What says how projections end, as parameters of a kernel, and as they are handed on, with what
// HeadRows is made of.
// clang-format off: it would give each of them a line.
#define QKV_TABLES(T)                                                                              \
    const T* bias, const void* cos, const void* sin, ROUTING_TABLES
#define QKV_STRIDES                                                                                \
    int64_t q_token_stride, int64_t q_head_stride, int64_t k_page_stride, int64_t k_row_stride,    \
    int64_t k_head_stride, int64_t v_page_stride, int64_t v_row_stride, int64_t v_head_stride,     \
    int table_stride, int64_t block_table_stride
#define QKV_NUMBERS                                                                                \
    int num_heads, int num_kv_heads, int head_dim, int rotary_dim, int paired_dim,                 \
    int is_interleaved, int seqlen, int batch_size, int max_position, int table_bytes,             \
    int num_pages, int page_size, int max_pages, int positions_bytes, int slot_bytes
#define QKV_ENDING(...)                                                                            \
    .q = {q, 0, q_token_stride, q_head_stride},                                                    \
    .k = {k_cache, k_page_stride, k_row_stride, k_head_stride},                                    \
    .v = {v_cache, v_page_stride, v_row_stride, v_head_stride}, .bias = bias, .cos = cos,          \
    .sin = sin, .table_stride = table_stride, .routing = {ROUTING_ARGUMENTS(m)},                   \
    .heads = {__VA_ARGS__}, .m = m, .num_heads = num_heads, .num_kv_heads = num_kv_heads,          \
    .seqlen = seqlen, .max_position = max_position, .table_bytes = table_bytes
// clang-format on

}  // namespace kernel_hub::matmul::paired
