// Sixteen floats at a time, on any processor.
//
// With AVX512 a vector is a register of GCC's vector extension, elsewhere as many registers as it takes. Every function
// computes each lane by itself: a result never depends on which lane, or in which company, a number is.
#pragma once

#include "runtime.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define BATON_SIMD512 1
// GCC's own headers leave the unused source of unmasked intrinsics uninitialised on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#else
#define BATON_SIMD512 0
#endif
#if !BATON_SIMD512 && defined(__AVX2__) && defined(__FMA__)
#define BATON_SIMD256 1
#include <immintrin.h>
#else
#define BATON_SIMD256 0
#endif
#if BATON_SIMD512 && defined(__AVX512BF16__)
#define BATON_BF16_PRODUCTS 1
#else
#define BATON_BF16_PRODUCTS 0
#endif

#define BATON_INLINE inline __attribute__((always_inline))

namespace baton {

constexpr int LANES = 16;

constexpr int REGISTER_BYTES = BATON_SIMD512 ? 64 : BATON_SIMD256 ? 32 : 16;
constexpr int REGISTER_LANES = REGISTER_BYTES / 4;
using f32_register = float __attribute__((vector_size(REGISTER_BYTES)));
using u32_register = uint32_t __attribute__((vector_size(REGISTER_BYTES)));
using i32_register = int32_t __attribute__((vector_size(REGISTER_BYTES)));

#if BATON_SIMD512
template <typename Register> using Sixteen = Register;
#else
// Two vectors as one. Compilers take a vector that is wider than a register to memory and back with every operation.
template <typename V> struct Pair {
    V low, high;
};
#if BATON_SIMD256
template <typename Register> using Sixteen = Pair<Register>;
#else
template <typename Register> using Sixteen = Pair<Pair<Register>>;
#endif
#endif
using f32x16 = Sixteen<f32_register>;
using u32x16 = Sixteen<u32_register>;
using i32x16 = Sixteen<i32_register>;

#if !BATON_SIMD512
#define BATON_OF_PAIRS(OP)                                                                        \
    template <typename V> BATON_INLINE auto operator OP(const Pair<V>& a, const Pair<V>& b)       \
        ->Pair<decltype(a.low OP b.low)> {                                                        \
        return {a.low OP b.low, a.high OP b.high};                                                \
    }
BATON_OF_PAIRS(+)
BATON_OF_PAIRS(-)
BATON_OF_PAIRS(*)
BATON_OF_PAIRS(/)
BATON_OF_PAIRS(&)
BATON_OF_PAIRS(|)
BATON_OF_PAIRS(<)
BATON_OF_PAIRS(>)
#undef BATON_OF_PAIRS
template <typename V> BATON_INLINE Pair<V> operator-(const Pair<V>& x) { return {-x.low, -x.high}; }
template <typename V> BATON_INLINE Pair<V> operator<<(const Pair<V>& x, int bits) {
    return {x.low << bits, x.high << bits};
}
template <typename V> BATON_INLINE Pair<V> operator>>(const Pair<V>& x, int bits) {
    return {x.low >> bits, x.high >> bits};
}
#endif

template <typename To, typename From> BATON_INLINE To same_bits(const From& x) {
    static_assert(sizeof(To) == sizeof(From), "all bits");
    To to;
    std::memcpy(&to, &x, sizeof to);
    return to;
}

template <typename V> BATON_INLINE void load_bits(V& to, const void* from) { std::memcpy(&to, from, sizeof to); }
template <typename V> BATON_INLINE void store_bits(void* to, const V& x) { std::memcpy(to, &x, sizeof x); }
#if !BATON_SIMD512
// Part by part: compilers copy a pair by sixteen bytes, for whose stores loads of whole registers must wait.
template <typename To, typename V> BATON_INLINE To same_bits(const Pair<V>& x) {
    return {same_bits<decltype(To::low)>(x.low), same_bits<decltype(To::high)>(x.high)};
}
template <typename V> BATON_INLINE void load_bits(Pair<V>& to, const void* from) {
    load_bits(to.low, from);
    load_bits(to.high, static_cast<const char*>(from) + sizeof(V));
}
template <typename V> BATON_INLINE void store_bits(void* to, const Pair<V>& x) {
    store_bits(to, x.low);
    store_bits(static_cast<char*>(to) + sizeof(V), x.high);
}
#endif

template <typename V> BATON_INLINE V loaded(const void* from) {
    V x;
    load_bits(x, from);
    return x;
}
BATON_INLINE f32x16 load16(const void* from) { return loaded<f32x16>(from); }
BATON_INLINE void store16(void* to, const f32x16& x) { store_bits(to, x); }

// --- one number in all lanes ---

BATON_INLINE f32_register splat_register(float x) { return x - f32_register{}; }

#if BATON_SIMD512
BATON_INLINE f32x16 splat(float x) { return x - f32x16{}; }
BATON_INLINE u32x16 splat_bits(uint32_t x) { return x | u32x16{}; }
BATON_INLINE i32x16 splat_int(int32_t x) { return x | i32x16{}; }
#else
template <typename V, typename T> BATON_INLINE V splat_to(T x, V*) { return x - V{}; }
template <typename V, typename T> BATON_INLINE Pair<V> splat_to(T x, Pair<V>*) {
    const V half = splat_to(x, static_cast<V*>(nullptr));
    return {half, half};
}
BATON_INLINE f32x16 splat(float x) { return splat_to(x, static_cast<f32x16*>(nullptr)); }
BATON_INLINE u32x16 splat_bits(uint32_t x) { return splat_to(x, static_cast<u32x16*>(nullptr)); }
BATON_INLINE i32x16 splat_int(int32_t x) { return splat_to(x, static_cast<i32x16*>(nullptr)); }
#endif

// Keeps a vector in a register: compilers would rather load it again for each use.
template <typename V> BATON_INLINE void pin(V& x) {
#if BATON_SIMD512
    asm("" : "+v"(x));
#elif BATON_SIMD256
    asm("" : "+x"(x));
#endif
}

// --- lane by lane ---

// a where the mask, a comparison's result, is set, else b.
template <typename M, typename V> BATON_INLINE V select(const M& mask, const V& a, const V& b) { return mask ? a : b; }

// a * b + c with one rounding where the processor can.
template <typename V> BATON_INLINE V multiply_add(const V& a, const V& b, const V& c) {
#if BATON_SIMD512
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif BATON_SIMD256
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__aarch64__)
    V r;
    for (size_t i = 0; i < sizeof(V) / sizeof(float); ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#else
    return a * b + c;
#endif
}

template <typename V> BATON_INLINE V maximum(const V& a, const V& b) {
#if BATON_SIMD512
    return (V)_mm512_max_ps((__m512)a, (__m512)b);
#elif BATON_SIMD256
    return (V)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// Whole numbers, which the lanes are.
BATON_INLINE i32_register to_ints(f32_register x) { return __builtin_convertvector(x, i32_register); }

#if !BATON_SIMD512
template <typename M, typename V>
BATON_INLINE Pair<V> select(const Pair<M>& mask, const Pair<V>& a, const Pair<V>& b) {
    return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
}
template <typename V> BATON_INLINE Pair<V> multiply_add(const Pair<V>& a, const Pair<V>& b, const Pair<V>& c) {
    return {multiply_add(a.low, b.low, c.low), multiply_add(a.high, b.high, c.high)};
}
template <typename V> BATON_INLINE Pair<V> maximum(const Pair<V>& a, const Pair<V>& b) {
    return {maximum(a.low, b.low), maximum(a.high, b.high)};
}
template <typename V> BATON_INLINE auto to_ints(const Pair<V>& x) -> Pair<decltype(to_ints(x.low))> {
    return {to_ints(x.low), to_ints(x.high)};
}
#endif

// x where bit i of mask is set, else `otherwise`.
BATON_INLINE f32x16 choose(uint32_t mask, f32x16 x, f32x16 otherwise) {
#if BATON_SIMD512
    return _mm512_mask_blend_ps(static_cast<__mmask16>(mask), (__m512)otherwise, (__m512)x);
#else
    alignas(64) static constexpr int32_t BITS[LANES] = {1,    2,    4,    8,     16,    32,    64,     128,
                                                        256,  512,  1024, 2048,  4096,  8192,  16384,  32768};
    const i32x16 bits = splat_int(static_cast<int32_t>(mask)) & loaded<i32x16>(BITS);
    return select(bits > splat_int(0), x, otherwise);
#endif
}

#if BATON_SIMD256 || BATON_SIMD512
// columns[c]: in its lane r unit c of the eight units of rows[r].
BATON_INLINE void turn_eight(const char* const* rows, __m256i* columns) {
    __m256i a[8], b[8];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r)  // of rows r and r + 4 the first half, the second half
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const __m128i upper = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r]) + half);
            const __m128i lower = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r + 4]) + half);
            a[4 * half + r] = _mm256_inserti128_si256(_mm256_castsi128_si256(upper), lower, 1);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        columns[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        columns[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        columns[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        columns[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
}
#endif

// --- over the lanes ---

BATON_INLINE float maximum_of(f32x16 x) {
#if BATON_SIMD512
    return _mm512_reduce_max_ps((__m512)x);
#else
    float lanes[LANES];
    store16(lanes, x);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
#endif
}

#if BATON_SIMD512
// Four numbers of each of ROWS rows, the largest among which is the row's: vector i has those of rows 4 i … 4 i + 3, one
// of each in each quarter. Each round halves the numbers of a row and puts those of two rows into one vector.
template <int ROWS> BATON_INLINE void quarters_of(const f32x16* rows, __m512* a) {
    std::memcpy(a, rows, ROWS * sizeof *a);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS / 2; ++i)
        a[i] = _mm512_max_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < ROWS / 4; ++i) {
        const __m512d even = (__m512d)a[2 * i], odd = (__m512d)a[2 * i + 1];
        a[i] = _mm512_max_ps((__m512)_mm512_unpacklo_pd(even, odd), (__m512)_mm512_unpackhi_pd(even, odd));
    }
}

BATON_INLINE __m512 larger_quarters(__m512 a, __m512 b) {
    return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
#elif BATON_SIMD256
// The largest numbers of eight rows: as above, with half the lanes.
BATON_INLINE __m256 maxima_of_eight(const f32x16* rows) {
    __m256 a[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r) a[r] = _mm256_max_ps((__m256)rows[r].low, (__m256)rows[r].high);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        a[i] = _mm256_max_ps(_mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const __m256d even = (__m256d)a[2 * i], odd = (__m256d)a[2 * i + 1];
        a[i] = _mm256_max_ps((__m256)_mm256_unpacklo_pd(even, odd), (__m256)_mm256_unpackhi_pd(even, odd));
    }
    return _mm256_max_ps(_mm256_permute2f128_ps(a[0], a[1], 0x20), _mm256_permute2f128_ps(a[0], a[1], 0x31));
}
#endif

// Lane i: the largest number of rows[i]; lanes from `count` on are undefined.
BATON_INLINE f32x16 maxima_of(const f32x16* rows, int count) {
#if BATON_SIMD512
    __m512 a[16];
    if (count > LANES / 2) {
        quarters_of<16>(rows, a);
        return (f32x16)larger_quarters(larger_quarters(a[0], a[1]), larger_quarters(a[2], a[3]));
    }
    if (count > 1) {
        quarters_of<8>(rows, a);
        const __m512 halves = larger_quarters(a[0], a[1]);
        return (f32x16)larger_quarters(halves, halves);
    }
#endif
#if BATON_SIMD256
    if (count > 1) {
        const __m256 first = maxima_of_eight(rows);
        return {(f32_register)first, (f32_register)(count > 8 ? maxima_of_eight(rows + 8) : first)};
    }
#endif
    alignas(64) float largest[LANES] = {};
    for (int r = 0; r < count; ++r) largest[r] = maximum_of(rows[r]);
    return load16(largest);
}

// Sum in a fixed order: halves, quarters, …
BATON_INLINE float sum_of(f32x16 x) {
#if BATON_SIMD256
    const __m256 halves = (__m256)(x.low + x.high);
    const __m128 quarters = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
    const __m128 eighths = _mm_add_ps(quarters, _mm_movehl_ps(quarters, quarters));
    return _mm_cvtss_f32(_mm_add_ss(eighths, _mm_movehdup_ps(eighths)));
#else
    float s[LANES];
    store16(s, x);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) s[i] += s[i + half];
    return s[0];
#endif
}

// Exact at 0 (1) and below -126 or so (0); relative error below 2e-7 elsewhere. For x <= 127.
#if BATON_SIMD512
BATON_INLINE f32x16 exp2_16(f32x16 x) {
    // 2^x = 2^floor(x) (1 + r q(r)), r in [0, 1); minimax coefficients of q. The last instruction rounds x down itself,
    // and the first gives 0 for minus infinity. Rounding to the nearest, which needs two more of them and a limit for x,
    // took three times as long between products by tiles.
    const f32x16 c1 = splat(6.931512952e-01f), c2 = splat(2.401644439e-01f), c3 = splat(5.579991266e-02f);
    const f32x16 c4 = splat(9.017030708e-03f), c5 = splat(1.867129933e-03f);
    constexpr int DOWN = 1;
    const f32x16 r = _mm512_reduce_ps((__m512)x, DOWN);
    f32x16 y = multiply_add(r, c5, c4);
    y = multiply_add(r, y, c3);
    y = multiply_add(r, y, c2);
    y = multiply_add(r, y, c1);
    y = multiply_add(r, y, splat(1.0f));
    return _mm512_scalef_ps((__m512)y, (__m512)x);
}
#else
BATON_INLINE f32x16 exp2_16(f32x16 x) {
    // 2^r = 1 + r q(r) on [-0.5, 0.5]; minimax coefficients of q.
    const f32x16 c1 = splat(6.931470037e-01f), c2 = splat(2.402224243e-01f), c3 = splat(5.550733581e-02f);
    const f32x16 c4 = splat(9.671512991e-03f), c5 = splat(1.326472731e-03f);
    const f32x16 clamped = maximum(x, splat(-127.0f)), magic = splat(12582912.0f);  // 1.5 * 2^23
    const f32x16 n = (clamped + magic) - magic;
    const f32x16 r = clamped - n;
    f32x16 y = multiply_add(r, c5, c4);
    y = multiply_add(r, y, c3);
    y = multiply_add(r, y, c2);
    y = multiply_add(r, y, c1);
    y = multiply_add(r, y, splat(1.0f));
    const i32x16 exponent = to_ints(n) + splat_int(127);  // 0 for n = -127: the power is 0
    return y * same_bits<f32x16>(exponent << 23);
}
#endif

BATON_INLINE float exp2_1(float x) {
    float lanes[LANES];
    store16(lanes, exp2_16(splat(x)));
    return lanes[0];
}

// --- element types ---

BATON_INLINE f32x16 load_floats(const float* from) { return load16(from); }

BATON_INLINE f32x16 load_floats(const bf16* from) {
#if BATON_SIMD512
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif BATON_SIMD256
    const __m128i* at = reinterpret_cast<const __m128i*>(from);
    const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(at));
    const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(at + 1));
    return {(f32_register)_mm256_slli_epi32(low, 16), (f32_register)_mm256_slli_epi32(high, 16)};
#else
    float wide[LANES];
    for (int i = 0; i < LANES; ++i) wide[i] = to_float(from[i]);
    return load16(wide);
#endif
}

BATON_INLINE f32x16 load_floats(const int8_t* from) {
#if BATON_SIMD512
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif BATON_SIMD256
    const __m128i* at = reinterpret_cast<const __m128i*>(from);
    const __m128i* behind = reinterpret_cast<const __m128i*>(from + 8);
    return {(f32_register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at))),
            (f32_register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(behind)))};
#else
    float wide[LANES];
    for (int i = 0; i < LANES; ++i) wide[i] = static_cast<float>(from[i]);
    return load16(wide);
#endif
}

BATON_INLINE void store_floats(float* to, f32x16 x) { store16(to, x); }

// Rounded as by `to_bf16`: unlike the processor's own conversion it keeps the smallest numbers.
BATON_INLINE void store_rounded(bf16* to, f32x16 x) {
    const u32x16 bits = same_bits<u32x16>(x), upper = bits >> 16;
    const u32x16 nearest = (bits + splat_bits(0x7fffu) + (upper & splat_bits(1))) >> 16;
    const auto magnitude = same_bits<i32x16>(bits & splat_bits(0x7fffffffu));
    const u32x16 chosen = select(magnitude > splat_int(0x7f800000), upper | splat_bits(0x40u), nearest);
#if BATON_SIMD512
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)chosen));
#elif BATON_SIMD256
    const __m256i mixed = _mm256_packus_epi32((__m256i)chosen.low, (__m256i)chosen.high);
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(mixed, 0xd8));
#else
    uint32_t lanes[LANES];
    store_bits(lanes, chosen);
    for (int i = 0; i < LANES; ++i) to[i] = static_cast<bf16>(lanes[i]);
#endif
}

BATON_INLINE void store_floats(bf16* to, f32x16 x) {
#if BATON_BF16_PRODUCTS
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    store_rounded(to, x);
#endif
}

// The first `count` of sixteen; the others are 0, and not read or written.
template <typename T> BATON_INLINE f32x16 load_floats(const T* from, int64_t count) {
    if (count >= LANES) return load_floats(from);
    alignas(64) T buffer[LANES] = {};
#if BATON_SIMD512
    const __mmask16 mask = static_cast<__mmask16>(count > 0 ? (1u << count) - 1 : 0);
    if constexpr (sizeof(T) == 4)
        return _mm512_maskz_loadu_ps(mask, from);
    else if constexpr (sizeof(T) == 2)
        _mm256_store_si256((__m256i*)buffer, _mm256_maskz_loadu_epi16(mask, from));
    else
        _mm_store_si128((__m128i*)buffer, _mm_maskz_loadu_epi8(mask, from));
#else
    for (int64_t i = 0; i < count; ++i) buffer[i] = from[i];
#endif
    return load_floats(buffer);
}

template <typename T> BATON_INLINE void store_floats(T* to, f32x16 x, int64_t count) {
    if (count >= LANES) return store_floats(to, x);
#if BATON_SIMD512
    const __mmask16 mask = static_cast<__mmask16>(count > 0 ? (1u << count) - 1 : 0);
    if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_ps(to, mask, (__m512)x);
#endif
    T buffer[LANES];
    store_floats(buffer, x);
#if BATON_SIMD512
    if constexpr (sizeof(T) == 2)
        return _mm256_mask_storeu_epi16(to, mask, _mm256_loadu_si256((const __m256i*)buffer));
#endif
    for (int64_t i = 0; i < count; ++i) to[i] = buffer[i];
}

}  // namespace baton
