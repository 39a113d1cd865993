// What the emulator keeps of Hopper: transaction barriers, named barriers, the barrier of a
// cluster, bulk copies and the products of warpgroups. What is asynchronous comes when it hurts
// most: what is fetched arrives at once, into whatever is still there; what is stored, and the
// operands of products, are read when somebody waits for them, and not before.
#pragma once

#include "emulator.h"

namespace emulator {

// A transaction barrier, 8 bytes: arrivals of a phase and those left, bytes expected times 2 plus
// the phase's parity.
struct Mbarrier {
    int16_t arrivals, left;
    int bytes;
};

inline Mbarrier* mbarrier(uint32_t address) {
    return reinterpret_cast<Mbarrier*>(shared_place(address, 8));
}

inline void complete_if_due(Mbarrier* barrier) {
    if (barrier->left == 0 && barrier->bytes >> 1 == 0) {
        barrier->left = barrier->arrivals;
        barrier->bytes ^= 1;
        has_moved = true;
    }
}

inline void arrive(uint32_t address) {
    Mbarrier* barrier = mbarrier(address);
    if (barrier->left <= 0) error = kAsynchronous;  // more than it was made for
    --barrier->left;
    complete_if_due(barrier);
}

// Bytes have arrived, perhaps before they were expected.
inline void complete_bytes(uint32_t address, int bytes) {
    Mbarrier* barrier = mbarrier(address);
    barrier->bytes -= 2 * bytes;
    complete_if_due(barrier);
}

inline bool has_completed(uint32_t address, uint32_t parity) {
    return (mbarrier(address)->bytes & 1) != static_cast<int>(parity & 1);
}

struct Barrier {
    int arrived = 0;
    uint32_t opened = 0;  // times
    void arrive(int threads) {
        if (++arrived == threads) {
            arrived = 0;
            ++opened;
            has_moved = true;
        }
    }
};

inline Barrier cluster_barrier;
inline Barrier named_barriers[kMaxCluster][16];

// A store that has been started: read from shared memory when it is waited for.
struct Store {
    void (*run)(const Store&);
    const void* map;
    uint32_t source;
    int at[5];
    float* target;
    uint32_t bytes;
};

// What a thread keeps besides a Fibre.
struct Hopper {
    uint32_t cluster_waits;
    std::vector<Store> stores;
    std::vector<size_t> store_groups;  // stores that were started when each was closed
    size_t stores_done;
    size_t products;                     // of its warpgroup, that it has begun
    std::vector<size_t> product_groups;  // products begun when each was closed
};

inline std::vector<Hopper> hopper(kMaxThreads);

inline void finish_stores(size_t pending) {
    Hopper& mine = hopper[current];
    if (mine.store_groups.size() <= pending) return;
    const size_t until = mine.store_groups[mine.store_groups.size() - pending - 1];
    for (; mine.stores_done < until; ++mine.stores_done)
        mine.stores[mine.stores_done].run(mine.stores[mine.stores_done]);
}

// A product of a warpgroup: the operands as each thread gave them.
struct Product {
    using Run = void (*)(Product&);
    Run run;
    int n;
    uint64_t a, b;
    bool accumulates, a_in_registers;
    int threads = 0;  // that have begun it
    float* sums[128];
    uint32_t a_words[128][4];
};

struct Warpgroup {
    std::vector<Product> products;
    size_t done = 0;
};

inline std::vector<Warpgroup> warpgroups(kMaxThreads / 128);

inline Warpgroup& warpgroup() {
    return warpgroups[current / 128];
}

inline void begin_product(Product::Run run, int n, float* sums, const uint32_t* a_words, uint64_t a,
                          uint64_t b, bool accumulates) {
    Warpgroup& group = warpgroup();
    const size_t number = hopper[current].products++;
    if (number == group.products.size()) {
        group.products.push_back({run, n, a, b, accumulates, a_words != nullptr});
    }
    Product& product = group.products[number];
    const bool is_same = product.run == run && product.n == n && product.b == b &&
                         product.accumulates == accumulates &&
                         (a_words != nullptr || product.a == a);
    if (!is_same) error = kAsynchronous;
    product.sums[current % 128] = sums;
    if (a_words) memcpy(product.a_words[current % 128], a_words, 16);
    ++product.threads;
}

// Runs the products of all but the last `pending` groups, once the whole warpgroup has begun them.
inline void finish_products(size_t pending) {
    Hopper& mine = hopper[current];
    if (mine.product_groups.size() <= pending) return;
    const size_t until = mine.product_groups[mine.product_groups.size() - pending - 1];
    Warpgroup& group = warpgroup();
    if (group.done >= until) return;
    wait_until([&] {
        for (size_t i = group.done; i < until; ++i)
            if (group.products[i].threads < 128) return false;
        return true;
    });
    for (; group.done < until; ++group.done)
        group.products[group.done].run(group.products[group.done]);
}

inline void start_hopper() {
    cluster_barrier = {};
    for (auto& of_block : named_barriers)
        for (Barrier& barrier : of_block) barrier = {};
    for (int i = 0; i < block_threads * cluster_size; ++i) hopper[i] = {};
    for (Warpgroup& group : warpgroups) group = {};
}

inline void end_hopper() {
    for (int i = 0; i < block_threads * cluster_size; ++i)
        if (hopper[i].stores_done != hopper[i].stores.size()) error = kAsynchronous;
    for (const Warpgroup& group : warpgroups)
        if (group.done != group.products.size()) error = kAsynchronous;
}

inline const bool is_hopper = [] {
    start_cluster = start_hopper;
    end_cluster = end_hopper;
    return true;
}();

// The 128-byte swizzle: bits 4 to 6 of an address are flipped by bits 7 to 9.
inline uint32_t swizzled(uint32_t address) {
    return address ^ (address >> 3 & 0x70);
}

}  // namespace emulator
