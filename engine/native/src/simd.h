// Sixteen floats at a time, on any processor.
//
// One path for AVX512 with its bfloat16 products, one that any compiler with GCC's vector extension turns into
// what the processor has. Every function computes each lane by itself: a result never depends on which
// lane, or in which company, a number is.
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
#if !BATON_SIMD512
#pragma GCC diagnostic ignored "-Wpsabi"  // about calls between libraries; all of this is inlined
#endif
#if BATON_SIMD512 && defined(__AVX512BF16__)
#define BATON_BF16_PRODUCTS 1
#else
#define BATON_BF16_PRODUCTS 0
#endif

#define BATON_INLINE inline __attribute__((always_inline))

namespace baton {

constexpr int LANES = 16;
using f32x16 = float __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));

BATON_INLINE f32x16 splat(float x) { return x - f32x16{}; }
BATON_INLINE u32x16 splat_bits(uint32_t x) { return x | u32x16{}; }

using f32x16_anywhere = float __attribute__((vector_size(64), aligned(1), may_alias));
BATON_INLINE f32x16 load16(const void* from) { return *static_cast<const f32x16_anywhere*>(from); }
BATON_INLINE void store16(void* to, f32x16 x) { *static_cast<f32x16_anywhere*>(to) = x; }

// Keeps a vector in a register: compilers would rather load it again for each use.
template <typename V> BATON_INLINE void pin(V& x) {
#if BATON_SIMD512
    asm("" : "+v"(x));
#endif
}

#if BATON_SIMD256
// A vector of sixteen is two registers. Compilers keep it in memory, from operation to operation, so that what has many
// of them works on the halves.
struct Halves {
    __m256 part[2];
};
BATON_INLINE Halves halves_of(f32x16 x) {
    Halves halves;
    std::memcpy(&halves, &x, sizeof x);
    return halves;
}
BATON_INLINE f32x16 whole_of(const Halves& halves) {
    f32x16 x;
    std::memcpy(&x, &halves, sizeof x);
    return x;
}
#endif

// a * b + c with one rounding where the processor can.
BATON_INLINE f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {
#if BATON_SIMD512
    return _mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif BATON_SIMD256
    const Halves x = halves_of(a), y = halves_of(b), z = halves_of(c);
    return whole_of({{_mm256_fmadd_ps(x.part[0], y.part[0], z.part[0]), _mm256_fmadd_ps(x.part[1], y.part[1], z.part[1])}});
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__aarch64__)
    f32x16 r;
    for (int i = 0; i < LANES; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#else
    return a * b + c;
#endif
}

BATON_INLINE f32x16 maximum(f32x16 a, f32x16 b) {
#if BATON_SIMD512
    return _mm512_max_ps((__m512)a, (__m512)b);
#elif BATON_SIMD256
    const Halves x = halves_of(a), y = halves_of(b);
    return whole_of({{_mm256_max_ps(x.part[0], y.part[0]), _mm256_max_ps(x.part[1], y.part[1])}});
#else
    return a > b ? a : b;
#endif
}

BATON_INLINE float maximum_of(f32x16 x) {
#if BATON_SIMD512
    return _mm512_reduce_max_ps((__m512)x);
#else
    float m = x[0];
    for (int i = 1; i < LANES; ++i) m = x[i] > m ? x[i] : m;
    return m;
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
    f32x16 largest{};
    for (int r = 0; r < count; ++r) largest[r] = maximum_of(rows[r]);
    return largest;
}

// Sum in a fixed order: halves, quarters, …
BATON_INLINE float sum_of(f32x16 x) {
    float s[LANES];
    std::memcpy(s, &x, sizeof s);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) s[i] += s[i + half];
    return s[0];
}

// x where bit i of mask is set, else `otherwise`.
BATON_INLINE f32x16 choose(uint32_t mask, f32x16 x, f32x16 otherwise) {
#if BATON_SIMD512
    return _mm512_mask_blend_ps(static_cast<__mmask16>(mask), (__m512)otherwise, (__m512)x);
#else
    constexpr u32x16 bit = {1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                            1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    return (splat_bits(mask) & bit) != 0 ? x : otherwise;
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
#elif BATON_SIMD256
// The function below, of eight numbers.
BATON_INLINE __m256 exp2_8(__m256 x) {
    const auto same = [](float value) { return _mm256_set1_ps(value); };
    const __m256 clamped = _mm256_max_ps(x, same(-127.0f)), magic = same(12582912.0f);
    const __m256 n = _mm256_sub_ps(_mm256_add_ps(clamped, magic), magic), r = _mm256_sub_ps(clamped, n);
    __m256 y = _mm256_fmadd_ps(r, same(1.326472731e-03f), same(9.671512991e-03f));
    y = _mm256_fmadd_ps(r, y, same(5.550733581e-02f));
    y = _mm256_fmadd_ps(r, y, same(2.402224243e-01f));
    y = _mm256_fmadd_ps(r, y, same(6.931470037e-01f));
    y = _mm256_fmadd_ps(r, y, same(1.0f));
    const __m256i exponent = _mm256_add_epi32(_mm256_cvttps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
BATON_INLINE f32x16 exp2_16(f32x16 x) {
    const Halves halves = halves_of(x);
    return whole_of({{exp2_8(halves.part[0]), exp2_8(halves.part[1])}});
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
    const i32x16 exponent = __builtin_convertvector(n, i32x16) + 127;  // 0 for n = -127: the power is 0
    f32x16 power;
    const i32x16 bits = exponent << 23;
    std::memcpy(&power, &bits, sizeof power);
    return y * power;
}
#endif

BATON_INLINE float exp2_1(float x) { return exp2_16(splat(x))[0]; }

// --- element types ---

BATON_INLINE f32x16 load_floats(const float* from) { return load16(from); }

BATON_INLINE f32x16 load_floats(const bf16* from) {
    f32x16 x;
#if BATON_SIMD512
    const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
    std::memcpy(&x, &wide, sizeof x);
#else
    for (int i = 0; i < LANES; ++i) x[i] = to_float(from[i]);
#endif
    return x;
}

BATON_INLINE f32x16 load_floats(const int8_t* from) {
#if BATON_SIMD512
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#else
    f32x16 x;
    for (int i = 0; i < LANES; ++i) x[i] = static_cast<float>(from[i]);
    return x;
#endif
}

BATON_INLINE void store_floats(float* to, f32x16 x) { store16(to, x); }

BATON_INLINE void store_floats(bf16* to, f32x16 x) {
#if BATON_BF16_PRODUCTS
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    for (int i = 0; i < LANES; ++i) to[i] = to_bf16(x[i]);
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
    for (int64_t i = 0; i < count; ++i) to[i] = buffer[i];
}

}  // namespace baton
