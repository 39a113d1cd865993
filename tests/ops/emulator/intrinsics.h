// CUDA's own functions, as the emulator has them. Of emulator.h, at its end.
#pragma once

inline void __syncthreads() {
    emulator::wait_at(emulator::kBlockBarrier);
}
inline void __syncwarp(unsigned = ~0u) {
    emulator::wait_at(emulator::kSyncWarp);
}
inline size_t __cvta_generic_to_shared(const void* pointer) {
    return static_cast<const char*>(pointer) - emulator::shared;
}
inline void* __cvta_shared_to_generic(size_t address) {
    return emulator::shared + address;
}
// Four bytes of b : a, each picked by a digit of the selector.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    uint32_t picked = 0;
    for (int i = 0; i < 4; ++i)
        picked |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return picked;
}
template <typename T>
inline T __shfl_up_sync(unsigned, T value, int lanes) {
    const int from = emulator::lane() - lanes;
    return emulator::shuffle(value, from < 0 ? emulator::lane() : from);
}
template <typename T>
inline T __ldcg(const T* address) {
    return *address;
}
template <typename T>
inline void __stcg(T* address, T value) {
    *address = value;
}
template <typename T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulator::shuffle(value, emulator::lane() ^ mask);
}
template <typename T>
inline T __shfl_sync(unsigned, T value, int lane, int width = emulator::kWarp) {
    return emulator::shuffle(value, (emulator::lane() & ~(width - 1)) + (lane & (width - 1)));
}
inline unsigned __ballot_sync(unsigned, bool vote) {
    return emulator::ballot(vote);
}
inline bool __any_sync(unsigned, bool vote) {
    return emulator::ballot(vote) != 0;
}
inline bool __all_sync(unsigned, bool vote) {
    return emulator::ballot(vote) == ~0u;
}
inline unsigned __match_any_sync(unsigned, int value) {
    const emulator::Exchange<int> all(emulator::kShuffle, value);
    unsigned same = 0;
    for (int i = 0; i < emulator::kWarp; ++i)
        same |= static_cast<unsigned>(all.peer(i) == value) << i;
    return same;
}
inline int __popc(unsigned bits) {
    return __builtin_popcount(bits);
}
inline int __clz(int bits) {
    return bits == 0 ? 32 : __builtin_clz(bits);
}
template <typename T>
inline T __reduce_max_sync(unsigned, T value) {
    const emulator::Exchange<T> all(emulator::kShuffle, value);
    for (int i = 0; i < emulator::kWarp; ++i) value = value < all.peer(i) ? all.peer(i) : value;
    return value;
}
template <typename T>
inline T __reduce_min_sync(unsigned, T value) {
    const emulator::Exchange<T> all(emulator::kShuffle, value);
    for (int i = 0; i < emulator::kWarp; ++i) value = all.peer(i) < value ? all.peer(i) : value;
    return value;
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    const emulator::Exchange<unsigned> all(emulator::kShuffle, value);
    unsigned sum = 0;
    for (int i = 0; i < emulator::kWarp; ++i) sum += all.peer(i);
    return sum;
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
    const emulator::Exchange<unsigned> all(emulator::kShuffle, value);
    unsigned bits = 0;
    for (int i = 0; i < emulator::kWarp; ++i) bits |= all.peer(i);
    return bits;
}
inline unsigned atomicInc(unsigned* address, unsigned most) {
    const unsigned before = *address;
    *address = before >= most ? 0 : before + 1;
    return before;
}
template <typename T>
inline T atomicMin(T* address, T value) {
    const T before = *address;
    *address = value < before ? value : before;
    return before;
}
template <typename T>
inline T atomicMax(T* address, T value) {
    const T before = *address;
    *address = before < value ? value : before;
    return before;
}
inline int atomicExch(int* address, int value) {
    const int before = *address;
    *address = value;
    return before;
}
inline int __ffs(int bits) {
    return __builtin_ffs(bits);
}
template <typename T>
inline T atomicAdd(T* address, T value) {
    const T before = *address;
    *address = before + value;
    return before;
}
inline int atomicOr(int* address, int value) {
    const int before = *address;
    *address = before | value;
    return before;
}
inline void __threadfence() {}
// Each thread votes before the barrier; the last one through it clears the votes.
inline int __syncthreads_count(bool vote) {
    static int votes_of[emulator::kMaxCluster], through_of[emulator::kMaxCluster];
    int &votes = votes_of[emulator::block()], &through = through_of[emulator::block()];
    votes += vote;
    __syncthreads();
    const int found = votes;
    if (++through == emulator::block_threads) {
        through = 0;
        votes = 0;
    }
    __syncthreads();
    return found;
}
inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fdiv_rn(float a, float b) {
    return a / b;
}
inline double __dmul_rn(double a, double b) {
    return a * b;
}
inline double __ddiv_rn(double a, double b) {
    return a / b;
}
inline double __dadd_rn(double a, double b) {
    return a + b;
}
inline double __dadd_rz(double a, double b) {
    const double sum = a + b, of_b = sum - a;
    const double lost = (a - (sum - of_b)) + (b - of_b);
    return (sum > 0.0 && lost < 0.0) || (sum < 0.0 && lost > 0.0) ? std::nextafter(sum, 0.0) : sum;
}
inline long long __double_as_longlong(double x) {
    return __builtin_bit_cast(long long, x);
}
inline double __longlong_as_double(long long bits) {
    return __builtin_bit_cast(double, bits);
}
inline long long __double2ll_rn(double x) {
    return llrint(x);
}
inline long long __float2ll_rn(float x) {
    return llrintf(x);
}
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
    return static_cast<unsigned __int128>(a) * b >> 64;
}
template <typename T>
inline T __ldg(const T* address) {
    if (sizeof(T) == 16) emulator::check_aligned(address);
    return *address;
}
inline float __uint_as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline float __int_as_float(int bits) {
    return __uint_as_float(static_cast<uint32_t>(bits));
}
inline int __float_as_int(float value) {
    int bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
namespace emulator {

// From -1 to 1, as the bits of an argument draw it: the same each time.
inline double drawn(float argument) {
    uint32_t bits = __float_as_uint(argument);
    bits = (bits ^ bits >> 16) * 0x7feb352du;
    bits = (bits ^ bits >> 15) * 0x846ca68bu;
    return (bits ^ bits >> 16) * 0x1p-31 - 1.0;
}

// What approximate instructions are off by before their results are rounded: with that at most
// 2^-22 (ex2, lg2) and 2^-23 (rcp), as PTX documents them. Powers of 2 are exact.
constexpr double kPowerError = 0x1p-22 - 0x1p-24, kReciprocalError = 0x1p-23 - 0x1p-24;

inline float flushed(double value) {
    return fabs(value) < 0x1p-126 ? copysignf(0.0f, value) : value;
}

inline float exp2_approx(float x) {
    return flushed(exp2(x) * (x == rintf(x) ? 1.0 : 1.0 + kPowerError * drawn(x)));
}

inline double reciprocal(float x) {
    int exponent;
    const bool is_power = fabsf(frexpf(x, &exponent)) == 0.5f;
    return 1.0 / x * (is_power ? 1.0 : 1.0 + kReciprocalError * drawn(x));
}

}  // namespace emulator

inline float __expf(float x) {
    return emulator::exp2_approx(x * 1.4426950408889634f);
}
inline float __logf(float x) {
    const double exact = log2(x), size = x > 0.5f && x < 2.0f ? 1.0 : exact;
    const double error = emulator::kPowerError * size * emulator::drawn(x);
    // That of 0 is -inf: an error in proportion would make it a NaN.
    const double log = x == 1.0f || isinf(exact) ? exact : exact + error;
    return static_cast<float>(log) * 0.6931471805599453f;
}
inline float __fdividef(float a, float b) {
    return a * static_cast<float>(emulator::reciprocal(b));
}
inline float __saturatef(float x) {
    return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;  // nan becomes 0
}
inline float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}
template <typename T>
inline T min(T a, T b) {
    return b < a ? b : a;
}
template <typename T>
inline T max(T a, T b) {
    return a < b ? b : a;
}
