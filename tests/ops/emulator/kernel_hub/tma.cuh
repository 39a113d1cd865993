// Stands in for csrc/include/kernel_hub/tma.cuh: same names. A tensor map is what emulated_maps.py
// writes; a launch passes its address.
#pragma once

#include "hopper.h"

namespace emulator {

struct Map {
    int64_t address, rank, element_bytes, is_swizzled;
    int64_t sizes[5], strides[5], box[5];  // strides in bytes; innermost first
};

}  // namespace emulator

struct CUtensorMap {
    const emulator::Map* map;
};

namespace emulator {

// Calls copy(place in shared memory, place in the tensor or null outside it) for each element of
// the box; returns its bytes. A row's last `grain` elements are inside where the first of them is.
template <typename Copy>
inline int for_each(const Map& map, uint32_t shared_address, const int (&first)[5], int64_t grain,
                    const Copy& copy) {
    if (shared_address % 128) error = kMisaligned;
    int count = 1;
    for (int d = 0; d < map.rank; ++d) count *= map.box[d];
    const int width = map.box[0], bytes = map.element_bytes;
    for (int i = 0; i < count; i += width) {
        int64_t offset = first[0] * map.strides[0];
        bool is_row_inside = true;
        for (int d = 1, rest = i / width; d < map.rank; rest /= map.box[d++]) {
            const int64_t at = first[d] + rest % map.box[d];
            is_row_inside &= at >= 0 && at < map.sizes[d];
            offset += at * map.strides[d];
        }
        for (int x = 0; x < width; ++x, offset += map.strides[0]) {
            const int64_t at = first[0] + x;
            const bool is_inside = is_row_inside && at >= 0 && at / grain * grain < map.sizes[0];
            const uint32_t to = shared_address + (i + x) * bytes;
            copy(shared_place(map.is_swizzled ? swizzled(to) : to, bytes),
                 is_inside ? reinterpret_cast<char*>(map.address + offset) : nullptr);
        }
    }
    return count * map.element_bytes;
}

inline void load_box(uint32_t target, const CUtensorMap* tensor, uint32_t barrier,
                     const int (&first)[5]) {
    const Map& map = *tensor->map;
    const int bytes = for_each(map, target, first, 1, [&](char* to, const char* from) {
        from ? memcpy(to, from, map.element_bytes) : memset(to, 0, map.element_bytes);
    });
    complete_bytes(barrier, bytes);
}

inline void load_boxes(uint32_t target, const CUtensorMap* map, uint32_t barrier,
                       const int (&first)[5], uint16_t block_mask) {
    for (int i = 0; i < cluster_size; ++i)
        if (block_mask >> i & 1)
            load_box(target % kSpan + i * kSpan, map, barrier % kSpan + i * kSpan, first);
    if (block_mask >> cluster_size) error = kSharedBounds;
}

inline void store_box(const Store& store) {
    const Map& map = *static_cast<const Map*>(store.map);
    // What an H200 does: 16 bytes are written or are not, whatever the tensor has of them.
    const int64_t grain = 16 / map.element_bytes;
    for_each(map, store.source, store.at, grain, [&](const char* from, char* to) {
        if (to) memcpy(to, from, map.element_bytes);
    });
}

inline void add_bytes(const Store& store) {
    const float* from = reinterpret_cast<const float*>(shared_place(store.source, store.bytes, 16));
    for (uint32_t i = 0; i < store.bytes / 4; ++i) store.target[i] += from[i];
}

}  // namespace emulator

namespace kernel_hub {

inline void tma_prefetch_map(const CUtensorMap*) {}
inline void tma_prefetch_4d(const CUtensorMap*, int, int, int, int) {}

inline void tma_load_2d(uint32_t target, const CUtensorMap* map, uint32_t barrier, int x, int y) {
    emulator::load_box(target, map, barrier, {x, y});
}
inline void tma_load_2d_multicast(uint32_t target, const CUtensorMap* map, uint32_t barrier, int x,
                                  int y, uint16_t block_mask) {
    emulator::load_boxes(target, map, barrier, {x, y}, block_mask);
}
inline void tma_load_4d(uint32_t target, const CUtensorMap* map, uint32_t barrier, int x, int y,
                        int z, int w) {
    emulator::load_box(target, map, barrier, {x, y, z, w});
}
inline void tma_load_4d_multicast(uint32_t target, const CUtensorMap* map, uint32_t barrier,
                                  uint16_t block_mask, int x, int y, int z, int w) {
    emulator::load_boxes(target, map, barrier, {x, y, z, w}, block_mask);
}
inline void tma_load_5d(uint32_t target, const CUtensorMap* map, uint32_t barrier, int x, int y,
                        int z) {
    emulator::load_box(target, map, barrier, {x, 0, 0, y, z});
}
inline void tma_load_5d_multicast(uint32_t target, const CUtensorMap* map, uint32_t barrier, int x,
                                  int y, int z, uint16_t block_mask) {
    emulator::load_boxes(target, map, barrier, {x, 0, 0, y, z}, block_mask);
}

inline void bulk_load(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
    emulator::check_aligned(source);
    memcpy(emulator::shared_place(target, bytes, 16), source, bytes);
    emulator::complete_bytes(barrier, bytes);
}

inline void start_store(const emulator::Store& store) {
    emulator::hopper[emulator::current].stores.push_back(store);
}
inline void tma_store_2d(const CUtensorMap* map, uint32_t source, int x, int y) {
    start_store({emulator::store_box, map->map, source, {x, y}});
}
inline void tma_store_4d(const CUtensorMap* map, uint32_t source, int x, int y, int z, int w) {
    start_store({emulator::store_box, map->map, source, {x, y, z, w}});
}
inline void bulk_reduce_add(float* target, uint32_t source, uint32_t bytes) {
    emulator::check_aligned(target);
    start_store({emulator::add_bytes, nullptr, source, {}, target, bytes});
}
inline void tma_store_commit() {
    emulator::Hopper& mine = emulator::hopper[emulator::current];
    mine.store_groups.push_back(mine.stores.size());
}
template <int kPending>
inline void tma_store_wait() {
    emulator::finish_stores(kPending);
}
template <int kPending>
inline void tma_store_wait_all() {
    emulator::finish_stores(kPending);
}
inline void fence_proxy_async() {}
inline void fence_proxy_async_global() {}

}  // namespace kernel_hub
