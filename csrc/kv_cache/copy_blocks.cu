// Pages of caches copied to other pages: copies on write, beams that change their parents.
//
//   k_cache[block_mapping[i, 1]] = k_cache[block_mapping[i, 0]], v_cache likewise, of every i
// A pair with a page below 0 is none; one with a page that is not there is reported. Pairs are
// copied in no order: a page that one writes no other may read or write.
//
// Parallelisation: 256 threads, kAhead units each; gridDim.x the units of a page, gridDim.y pairs,
// gridDim.z the two caches. No shared memory.
//   vec    units of 16 bytes
//   byte   any size and alignment
// Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
// PagedAttention", 2023, 4.4.

#include "kernel_hub/bounds.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"

namespace kernel_hub::kv_cache {

constexpr int kThreads = 256;
constexpr int kAhead = 4;  // reads before the writes

// Beside those of kernel_hub/bounds.cuh, and numbered with them.
enum CopyOutside : int {
    kMappingOutside = 1 << 12,  // block_mapping
};

__device__ __forceinline__ int64_t load_page(const void* mapping, int64_t at, int bytes) {
    return bytes == 8 ? __ldg(static_cast<const long long*>(mapping) + at)
                      : __ldg(static_cast<const int*>(mapping) + at);
}

template <typename Unit>
__device__ __forceinline__ void copy_pages(Unit* k_cache, Unit* v_cache, int* flag,
                                           const void* block_mapping, int64_t k_stride,
                                           int64_t v_stride, int num_pairs, int k_units,
                                           int v_units, int num_pages, int mapping_bytes) {
    const bool is_v = blockIdx.z == 1;
    Unit* cache = is_v ? v_cache : k_cache;
    const int64_t stride = is_v ? v_stride : k_stride;
    const int units = is_v ? v_units : k_units;
    const int first = blockIdx.x * kAhead * kThreads + threadIdx.x;
    follow_launch_before();
#pragma unroll 1
    for (int pair = blockIdx.y; pair < num_pairs; pair += gridDim.y) {
        const int64_t from = load_page(block_mapping, 2ll * pair, mapping_bytes);
        const int64_t to = load_page(block_mapping, 2ll * pair + 1, mapping_bytes);
        if (from < 0 || to < 0) {
            continue;
        }
        const bool is_outside = from >= num_pages || to >= num_pages;
        report(flag,
               is_outside && blockIdx.x == 0 && threadIdx.x == 0 && !is_v ? kMappingOutside : 0);
        if (is_outside) {
            continue;
        }
        const Unit* source = cache + from * stride;
        Unit* target = cache + to * stride;
        Unit bits[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (first + i * kThreads < units) {
                bits[i] = source[first + i * kThreads];
            }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (first + i * kThreads < units) {
                target[first + i * kThreads] = bits[i];
            }
        }
    }
}

#define EXPORT_COPY_BLOCKS(VARIANT, UNIT)                                                         \
    DESCRIBED(                                                                                    \
        copy_blocks_##VARIANT, "x: units of a page in steps of 1024, y: pairs, z: k and v",       \
        (.threads = kThreads),                                                                    \
        extern "C" __global__ void __launch_bounds__(kThreads) copy_blocks_##VARIANT(             \
            void* k_cache, void* v_cache, int* flag, const void* block_mapping, int64_t k_stride, \
            int64_t v_stride, int num_pairs, int k_units, int v_units, int num_pages,             \
            int mapping_bytes) {                                                                  \
            copy_pages(static_cast<UNIT*>(k_cache), static_cast<UNIT*>(v_cache), flag,            \
                       block_mapping, k_stride, v_stride, num_pairs, k_units, v_units, num_pages, \
                       mapping_bytes);                                                            \
        })

// {op}_{unit}
EXPORT_COPY_BLOCKS(vec, uint4)
EXPORT_COPY_BLOCKS(byte, uint8_t)

}  // namespace kernel_hub::kv_cache
