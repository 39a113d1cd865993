// Rows of new queries, keys and values as a decode step takes them: read, bias added, rotated.
#pragma once

#include "kernel_hub/e4m3.cuh"
#include "kernel_hub/int8.cuh"
#include "kernel_hub/ptx.cuh"
#include "kernel_hub/vec.cuh"
#include "kv_cache/decode/tiles.cuh"
#include "kv_cache/decode/work.cuh"

namespace kernel_hub::kv_cache::decode {

// Cosines and sines; `cos` null: no rotation.
struct Rotation {
    const void* cos;  // (max_position, rotary_dim / 2), fp32 or 16-bit
    const void* sin;  // same
    int64_t stride;
    int rotary_dim, max_position, entry_bytes;
    bool is_interleaved;

    __device__ __forceinline__ bool has(int position) const {
        return position >= 0 && position < max_position;
    }
};

// kCount table entries as floats; nan where the table ends before `position`.
template <typename T, int kCount>
__device__ __forceinline__ void read_table(const void* table, int64_t offset, int entry_bytes,
                                           bool is_inside, float (&values)[kCount]) {
    static_assert(kCount == 1 || kCount == 8, "one entry, or those of a vector of 16-bit values");
    const int64_t at = is_inside ? offset : 0;
    if constexpr (kCount == 8) {
        if (entry_bytes == 4) {
            const float4* entries =
                reinterpret_cast<const float4*>(static_cast<const float*>(table) + at);
            const float4 low = __ldg(entries), high = __ldg(entries + 1);
            values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
            values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
        } else {
            unpack<T>(load_shared_by_blocks(static_cast<const T*>(table) + at), values);
        }
    } else {
        values[0] = entry_bytes == 4 ? __ldg(static_cast<const float*>(table) + at)
                                     : to_float(__ldg(static_cast<const T*>(table) + at));
    }
    if (!is_inside) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] = __int_as_float(0x7fffffff);
        }
    }
}

// Columns column .. column + 7 of a row: x + bias.
template <typename T>
__device__ __forceinline__ void read_biased(const T* row, const T* bias, int column,
                                            float (&values)[8]) {
    unpack<T>(load_shared_by_blocks(row + column), values);
    if (bias != nullptr) {
        float added[8];
        unpack<T>(load_shared_by_blocks(bias + column), added);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            values[i] += added[i];
        }
    }
}

// The same, rotated; everything 16-byte aligned, rotary_dim a multiple of 16.
template <typename T>
__device__ __forceinline__ void read_rotated(const T* row, const T* bias, const Rotation& rotation,
                                             int position, int column, float (&values)[8]) {
    read_biased(row, bias, column, values);
    if (rotation.cos == nullptr || column >= rotation.rotary_dim) {
        return;
    }
    const int half = rotation.rotary_dim / 2;
    const bool is_inside = rotation.has(position);
    const bool is_second = column >= half;
    // Interleaved: four pairs; eight entries are read, aligned, and half of them used.
    const int pair = rotation.is_interleaved ? column / 2 : column - (is_second ? half : 0);
    const int64_t at = position * rotation.stride + pair / 8 * 8;
    float c[8], s[8];
    read_table<T>(rotation.cos, at, rotation.entry_bytes, is_inside, c);
    read_table<T>(rotation.sin, at, rotation.entry_bytes, is_inside, s);
    if (rotation.is_interleaved) {
        const bool is_high = pair % 8 != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float cosine = is_high ? c[4 + i] : c[i], sine = is_high ? s[4 + i] : s[i];
            const float a = values[2 * i], b = values[2 * i + 1];
            values[2 * i] = a * cosine - b * sine;
            values[2 * i + 1] = b * cosine + a * sine;
        }
    } else {
        float partner[8];
        read_biased(row, bias, is_second ? column - half : column + half, partner);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            values[i] = values[i] * c[i] + (is_second ? partner[i] : -partner[i]) * s[i];
        }
    }
}

// One element, for any alignment and any even rotary_dim.
template <typename T>
__device__ __forceinline__ float read_rotated_element(const T* row, const T* bias,
                                                      const Rotation& rotation, int position,
                                                      int column) {
    auto biased = [&](int at) {
        return to_float(row[at]) + (bias == nullptr ? 0.0f : to_float(bias[at]));
    };
    const float value = biased(column);
    if (rotation.cos == nullptr || column >= rotation.rotary_dim) {
        return value;
    }
    const int half = rotation.rotary_dim / 2;
    const bool is_second = rotation.is_interleaved ? column % 2 != 0 : column >= half;
    const int step = rotation.is_interleaved ? 1 : half;
    const int pair = rotation.is_interleaved ? column / 2 : column - (is_second ? half : 0);
    const int64_t at = position * rotation.stride + pair;
    float c[1], s[1];
    read_table<T>(rotation.cos, at, rotation.entry_bytes, rotation.has(position), c);
    read_table<T>(rotation.sin, at, rotation.entry_bytes, rotation.has(position), s);
    const float partner = biased(is_second ? column - step : column + step);
    return value * c[0] + (is_second ? partner : -partner) * s[0];
}

// A cache element from a float, rounded to nearest even; of bytes that of value * inverse_scale.
template <typename Cache>
__device__ __forceinline__ Cache to_cache(float value, float inverse_scale) {
    if constexpr (std::is_same_v<Cache, int8_t>) {
        return static_cast<int8_t>(round_to_int8(value * inverse_scale) & 0xff);
    } else if constexpr (sizeof(Cache) == 1) {
        return float_to_e4m3(value * inverse_scale);
    } else {
        return from_float<Cache>(value);
    }
}

// Eight of them to memory, aligned to their size.
template <typename Cache>
__device__ __forceinline__ void store_cache(Cache* target, const float (&values)[8],
                                            float inverse_scale) {
    if constexpr (std::is_same_v<Cache, int8_t>) {
        float scaled[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            scaled[i] = values[i] * inverse_scale;
        }
        write_int8(target, scaled);
    } else if constexpr (sizeof(Cache) == 1) {
        uint32_t words[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            words[i / 4] |= static_cast<uint32_t>(to_cache<Cache>(values[i], inverse_scale).__x)
                            << i % 4 * 8;
        }
        *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
    } else {
        st_global(target, pack<Cache>(values));
    }
}

// A row of queries, keys or values of the new tokens, and what is done as it is read.
template <typename T>
struct NewRow {
    const T* data;
    const T* bias;
    Rotation rotation;
};

template <typename T, typename Args>
__device__ __forceinline__ NewRow<T> find_row(const Args& args, const Segment& segment,
                                              bool is_query, bool is_value, int token, int head) {
    const T* data = is_query   ? args.q + segment.batch_idx * args.q_batch_stride +
                                     token * args.q_token_stride + head * args.q_head_stride
                    : is_value ? args.v + segment.batch_idx * args.v_batch_stride +
                                     token * args.v_token_stride + head * args.v_head_stride
                               : args.k + segment.batch_idx * args.k_batch_stride +
                                     token * args.k_token_stride + head * args.k_head_stride;
    const T* bias = args.qkv_bias;
    if (bias != nullptr) {
        const int before = is_query   ? 0
                           : is_value ? args.num_heads + args.num_kv_heads
                                      : args.num_heads;
        bias += static_cast<int64_t>(before + head) * args.head_dim;
    }
    return {data,
            bias,
            {is_value ? nullptr : args.cos, args.sin, args.table_stride, args.rotary_dim,
             args.max_position, args.table_bytes, args.is_interleaved != 0}};
}

template <typename Args>
__device__ __forceinline__ auto* row_of_cache(const Args& args, bool is_value, int page,
                                              int in_page, int head) {
    return is_value ? args.v_cache + page * args.v_cache_page_stride +
                          in_page * args.v_cache_token_stride + head * args.v_cache_head_stride
                    : args.k_cache + page * args.k_cache_page_stride +
                          in_page * args.k_cache_token_stride + head * args.k_cache_head_stride;
}

// Eight numbers of a row of queries as bf16 has them, in fp16, times the power of two that has the
// largest of the row below 2^15: exact, but of numbers below 2^-29 of it. What undoes that goes to
// `scale`. Numbers that are not finite stay so, and do not count. The lanes of a row, kLanes side
// by side, meet here, and with them all of their warp.
template <int kLanes, typename Words>
__device__ __forceinline__ void store_scaled(const float (&values)[8], bool is_row,
                                             Words&& word_place, float* scale) {
    float rounded[8];
    int largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        rounded[i] = to_float(from_float<__nv_bfloat16>(values[i]));
        const int bits = __float_as_int(fabsf(rounded[i]));
        largest = max(largest, bits < 0x7f800000 ? bits : 0);
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        largest = max(largest, __shfl_xor_sync(~0u, largest, offset));
    }
    const int exponent = max(largest >> 23, 15);
    const float factor = __int_as_float((2 * 127 + 14 - exponent) << 23);
    if (!is_row) {
        return;
    }
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        *reinterpret_cast<uint32_t*>(word_place(word)) =
            pack2<__half>(rounded[2 * word] * factor, rounded[2 * word + 1] * factor);
    }
    if (threadIdx.x % kLanes == 0) {
        *scale = __int_as_float((exponent - 14) << 23);
    }
}

// Write the queries of the segment to shared memory and its new tokens to the cache.
template <typename Config, typename Args>
__device__ __forceinline__ void prepare_rows(const Args& args, const Segment& segment,
                                             const Extent& extent, uint8_t* queries) {
    using T = typename Config::T;
    using Cache = typename Config::Cache;
    const int group = args.num_heads / args.num_kv_heads;
    const int first_row = segment.row_block * Config::kRows;
    const int num_rows = min(args.rows() - first_row, Config::kRows);
    const int first_position = extent.length - args.seqlen_q;
    // The new tokens whose places lie in this segment.
    int first_new = 0, num_new = 0;
    if (args.k != nullptr) {
        const int begin = segment.first_unit * Config::kUnit;
        const int end = min(begin + segment.num_units * Config::kUnit, extent.num_tokens);
        first_new = max(begin - first_position, 0);
        num_new = max(end - first_position - first_new, 0);
    }
    [[maybe_unused]] const int lane_idx = threadIdx.x & 31;
    const int cache_chunks = args.head_dim / 8;
    const int query_jobs = num_rows * Config::kQueryChunks;
    const int jobs = query_jobs + num_new * 2 * cache_chunks;
#pragma unroll 1
    for (int turn = threadIdx.x; turn - (Config::kRowScales ? lane_idx : 0) < jobs;
         turn += Config::kThreads) {
        // The lanes of a row of queries meet: whole warps come here, to the last job again.
        const int job = Config::kRowScales ? min(turn, jobs - 1) : turn;
        const bool is_query = job < query_jobs;
        const int j = job - query_jobs;
        const int chunk = is_query ? job % Config::kQueryChunks : j % cache_chunks;
        const int row = is_query ? job / Config::kQueryChunks : j / (2 * cache_chunks);
        const bool is_value = !is_query && j / cache_chunks % 2 != 0;
        const int token = is_query ? (first_row + row) / group : first_new + row;
        const int head =
            is_query ? segment.kv_head * group + (first_row + row) % group : segment.kv_head;
        const NewRow<T> from = find_row<T>(args, segment, is_query, is_value, token, head);
        const int place = first_position + token, column = chunk * 8;
        const int position = first_position + args.depth_of(segment.batch_idx, token);

        Cache* target = nullptr;
        float inverse_scale = 1.0f;
        if (!is_query) {
            int page = segment.batch_idx, in_page = place;
            if (args.block_table != nullptr) {
                page = __ldg(args.block_table + segment.batch_idx * args.block_table_stride +
                             place / args.page_size);
                in_page = place % args.page_size;
            }
            // No page, no place: the row is dropped (the attention says so in the flag).
            // Lanes of the same warp may have queries still, and meet below.
            if (is_index(page, args.num_pages)) {
                target = row_of_cache(args, is_value, page, in_page, head);
            } else if (!Config::kRowScales) {
                continue;
            }
            const float* scales = is_value ? args.v_scale : args.k_scale;
            inverse_scale = scales == nullptr ? 1.0f : 1.0f / __ldg(scales + head);
        }
        // Where words (pairs of columns) 0 .. 3 of a query's chunk lie. For e4m3 keys they are
        // interleaved by twos: a lane's four bytes of a key are then its two halves of B.
        auto word_place = [&](int word) {
            const int at = Config::kQuantised ? (chunk & ~1) + (word & 1) : chunk;
            const int inside = Config::kQuantised ? 2 * (chunk & 1) + (word >> 1) : word;
            return queries + swizzled<Config::kQueryChunks>(row, at) + inside * 4;
        };
        if constexpr (Config::kRowScales) {
            if (turn - lane_idx < query_jobs) {
                float values[8] = {};
                if (is_query && column < args.head_dim && args.is_vectorised != 0) {
                    read_rotated(from.data, from.bias, from.rotation, position, column, values);
                } else if (is_query && column < args.head_dim) {
#pragma unroll 1
                    for (int i = 0; i < 8; ++i) {
                        const float value = read_rotated_element(
                            from.data, from.bias, from.rotation, position, column + i);
#pragma unroll
                        for (int e = 0; e < 8; ++e) {
                            values[e] = e == i ? value : values[e];
                        }
                    }
                }
                float* const scales = reinterpret_cast<float*>(queries + Config::kQueryBytes);
                store_scaled<Config::kQueryChunks>(values, is_query && turn == job, word_place,
                                                   scales + row);
            }
            if (target == nullptr || turn != job) {
                continue;
            }
        }
        if (is_query && column >= args.head_dim) {
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                *reinterpret_cast<uint32_t*>(word_place(word)) = 0;
            }
        } else if (args.is_vectorised != 0) {
            float values[8];
            read_rotated(from.data, from.bias, from.rotation, position, column, values);
            if (is_query) {
#pragma unroll
                for (int word = 0; word < 4; ++word) {
                    *reinterpret_cast<uint32_t*>(word_place(word)) =
                        pack2<T>(values[2 * word], values[2 * word + 1]);
                }
            } else {
                store_cache(target + column, values, inverse_scale);
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < 8; ++i) {
                const float value =
                    read_rotated_element(from.data, from.bias, from.rotation, position, column + i);
                if (is_query) {
                    reinterpret_cast<T*>(word_place(i / 2))[i % 2] = from_float<T>(value);
                } else {
                    target[column + i] = to_cache<Cache>(value, inverse_scale);
                }
            }
        }
    }
}

}  // namespace kernel_hub::kv_cache::decode
