// Products of bytes with bytes (W8A8): weights of 8 bits, activations rounded per row to 8 bits as they come.
//
// Sums of integers are exact: no order of theirs, no class of processors and no company of a row changes a bit
// before the scales, and those are applied one column at a time.
//
// A panel's step is four inputs of 64 columns, [c][4] bytes, which is what VNNI multiplies and a tile of AMX
// is. VNNI's and AMX's first factor has no sign: activations are stored plus 128, and 128 times the sum of a
// column's weights is taken off afterwards. Without VNNI both factors are widened to 16 bits.
#pragma once

#include <algorithm>

#include "matrix.h"
#include "simd.h"

#if BATON_SIMD512
#define BATON_QUAD_LANES 16
#elif defined(__AVX2__)
#define BATON_QUAD_LANES 8
#include <immintrin.h>
#else
#define BATON_QUAD_LANES 0
#endif
#if (BATON_QUAD_LANES == 16 && defined(__AVX512VNNI__)) || (BATON_QUAD_LANES == 8 && defined(__AVXVNNI__)) || \
    BATON_QUAD_LANES == 0 || BATON_AMX
#define BATON_QUAD_OFFSET 128
#else
#define BATON_QUAD_OFFSET 0
#endif

namespace baton {

using quad_input = std::conditional<BATON_QUAD_OFFSET == 128, uint8_t, int16_t>::type;
constexpr int64_t QUAD_BYTES = 4 * sizeof(quad_input);  // of a row, per step
constexpr float ROUNDED_MAX = 127.0f, ZERO_BELOW = 1e-30f;

// --- activations ---

// Sixteen whole numbers as the products read them. Pairs of 16 bits are inputs 0 and 2, 1 and 3 of a step:
// this is how shifting the weights' bytes pairs those.
inline void store_quads(quad_input* to, i32x16 values) {
#if BATON_SIMD512 && BATON_QUAD_OFFSET == 128
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)(values + splat_int(128))));
#elif BATON_SIMD256 && BATON_QUAD_OFFSET == 0
    const __m256i mixed = _mm256_packs_epi32((__m256i)values.low, (__m256i)values.high);
    const __m256i in_order = _mm256_permute4x64_epi64(mixed, 0xd8);  // then numbers 1 and 2 of each four change places
    _mm256_storeu_si256((__m256i*)to, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(in_order, 0xd8), 0xd8));
#else
    int32_t lanes[LANES];
    store_bits(lanes, values);
    constexpr int PAIRED[4] = {0, 2, 1, 3}, APART[4] = {0, 1, 2, 3};
    for (int i = 0; i < LANES; ++i) {
        const int at = i / 4 * 4 + (BATON_QUAD_OFFSET == 128 ? APART : PAIRED)[i % 4];
        to[i] = static_cast<quad_input>(lanes[at] + BATON_QUAD_OFFSET);
    }
#endif
}

// The largest magnitude; not a number where any of them is none, for its bits are larger than infinity's.
template <typename T> float largest_magnitude(const T* row, int64_t k) {
    i32x16 most{};
    for (int64_t i = 0; i < k; i += LANES) {
        const i32x16 bits = same_bits<i32x16>(load_floats(row + i, k - i)) & splat_int(0x7fffffff);
        most = select(bits > most, bits, most);
    }
    int32_t lanes[LANES];
    store_bits(lanes, most);
    return same_bits<float>(*std::max_element(lanes, lanes + LANES));
}

// One row [k] to `padded` whole numbers -127 … 127, nearest, halves to even, zeros behind k. Returns the scale.
template <typename T> float round_row(const T* row, int64_t k, int64_t padded, quad_input* to) {
    const float most = largest_magnitude(row, k);
    const bool is_zero = most < ZERO_BELOW;
    const f32x16 inverse = splat(is_zero ? 0.0f : ROUNDED_MAX / most);
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: a sum with it has no fraction
    for (int64_t i = 0; i < padded; i += LANES) {
        const f32x16 x = i < k ? load_floats(row + i, k - i) : f32x16{};
        const f32x16 whole = (x * inverse + magic) - magic;
        const i32x16 values = to_ints(whole);
        if (padded - i >= LANES) {
            store_quads(to + i, values);
            continue;
        }
        quad_input last[LANES];
        store_quads(last, values);
        std::memcpy(to + i, last, static_cast<size_t>(padded - i) * sizeof(quad_input));
    }
    return is_zero ? 0.0f : most / ROUNDED_MAX;
}

// Of the whole numbers of a group of inputs; both orders of inputs within a step have the same sum.
inline float sum_quads(const quad_input* from, int64_t count) {
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += static_cast<int32_t>(from[i]) - BATON_QUAD_OFFSET;
    return static_cast<float>(sum);
}

// --- products ---

#if BATON_QUAD_LANES

#define BATON_QUAD inline __attribute__((always_inline))
#if BATON_QUAD_LANES == 16
using QuadVec = __m512i;
BATON_QUAD QuadVec quad_load(const void* x) { return _mm512_loadu_si512(x); }
BATON_QUAD void quad_store(void* to, QuadVec x) { _mm512_storeu_si512(to, x); }
BATON_QUAD QuadVec quad_zero() { return _mm512_setzero_si512(); }
BATON_QUAD QuadVec quad_same(int32_t x) { return _mm512_set1_epi32(x); }
#else
using QuadVec = __m256i;
BATON_QUAD QuadVec quad_load(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }
BATON_QUAD void quad_store(void* to, QuadVec x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }
BATON_QUAD QuadVec quad_zero() { return _mm256_setzero_si256(); }
BATON_QUAD QuadVec quad_same(int32_t x) { return _mm256_set1_epi32(x); }
#endif

BATON_QUAD int32_t quad_int(const char* from) {
    int32_t x;
    std::memcpy(&x, from, 4);
    return x;
}

#if BATON_QUAD_OFFSET == 128
struct QuadInputs {
    QuadVec bytes;
    BATON_QUAD explicit QuadInputs(const char* row) : bytes(quad_same(quad_int(row))) {}
};
struct QuadWeights {
    QuadVec bytes;
    BATON_QUAD void load(const char* from) { bytes = quad_load(from); }
};
BATON_QUAD QuadVec quad_dot(QuadVec sum, const QuadInputs& a, const QuadWeights& b) {
#if BATON_QUAD_LANES == 16 && defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(sum, a.bytes, b.bytes);
#elif BATON_QUAD_LANES == 8 && defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, a.bytes, b.bytes);
#elif BATON_QUAD_LANES == 16  // emulated tiles: their activations have the offset
    const QuadVec low = _mm512_set1_epi16(255);
    const QuadVec even = _mm512_madd_epi16(_mm512_and_si512(a.bytes, low),
                                           _mm512_srai_epi16(_mm512_slli_epi16(b.bytes, 8), 8));
    const QuadVec odd = _mm512_madd_epi16(_mm512_srli_epi16(a.bytes, 8), _mm512_srai_epi16(b.bytes, 8));
    return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
#else
    const QuadVec low = _mm256_set1_epi16(255);
    const QuadVec even = _mm256_madd_epi16(_mm256_and_si256(a.bytes, low),
                                           _mm256_srai_epi16(_mm256_slli_epi16(b.bytes, 8), 8));
    const QuadVec odd = _mm256_madd_epi16(_mm256_srli_epi16(a.bytes, 8), _mm256_srai_epi16(b.bytes, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
#endif
}
#else
struct QuadInputs {
    QuadVec even, odd;
    BATON_QUAD explicit QuadInputs(const char* row) : even(quad_same(quad_int(row))), odd(quad_same(quad_int(row + 4))) {}
};
struct QuadWeights {
    QuadVec even, odd;
    BATON_QUAD void load(const char* from) {
        const QuadVec bytes = quad_load(from);
#if BATON_QUAD_LANES == 16
        even = _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8), odd = _mm512_srai_epi16(bytes, 8);
#else
        even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), odd = _mm256_srai_epi16(bytes, 8);
#endif
    }
};
BATON_QUAD QuadVec quad_dot(QuadVec sum, const QuadInputs& a, const QuadWeights& b) {
#if BATON_QUAD_LANES == 16
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(a.even, b.even));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a.odd, b.odd));
#else
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a.even, b.even));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a.odd, b.odd));
#endif
}
#endif

// Vectors of columns whose sums fit into registers beside the weights.
constexpr int quad_columns_at_once(int rows) {
    constexpr bool pairs = sizeof(QuadWeights) > sizeof(QuadVec);
    if (BATON_QUAD_LANES == 16) return rows <= (pairs ? 3 : TILE_ROWS) ? 4 : 2;
    if (rows == 1) return 4;
    return rows <= (pairs ? 3 : TILE_ROWS) ? 2 : 1;
}

template <int ROWS, int FIRST, int COUNT>
void quad_columns(const char* const* rows, const char* panel, int64_t steps, int32_t* sums, bool accumulate,
                  Prefetch prefetch) {
    QuadVec c[ROWS][COUNT];
    const char* a[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
        a[r] = rows[r];
#pragma GCC unroll 16
        for (int j = 0; j < COUNT; ++j)
            c[r][j] = accumulate ? quad_load(sums + r * ROW_SUMS + BATON_QUAD_LANES * (FIRST + j)) : quad_zero();
    }
    auto step = [&](int64_t s) __attribute__((always_inline)) {
        QuadWeights b[COUNT];
#pragma GCC unroll 16
        for (int j = 0; j < COUNT; ++j) b[j].load(panel + s * 256 + 4 * BATON_QUAD_LANES * (FIRST + j));
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const QuadInputs x(a[r] + s * QUAD_BYTES);
#pragma GCC unroll 16
            for (int j = 0; j < COUNT; ++j) c[r][j] = quad_dot(c[r][j], x, b[j]);
        }
    };
    if (prefetch.from)
        for (int64_t s = 0; s < steps; ++s) step(s), prefetch_step(prefetch, s);
    else
        for (int64_t s = 0; s < steps; ++s) step(s);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < COUNT; ++j) quad_store(sums + r * ROW_SUMS + BATON_QUAD_LANES * (FIRST + j), c[r][j]);
}

template <int ROWS, int FIRST>
void quad_passes(const char* const* rows, const char* block, int64_t steps, int32_t* sums, bool accumulate,
                 Prefetch prefetch) {
    constexpr int COUNT = quad_columns_at_once(ROWS);
    if constexpr (FIRST < PANEL / BATON_QUAD_LANES) {
        quad_columns<ROWS, FIRST, COUNT>(rows, block, steps, sums, accumulate, prefetch);
        if (prefetch.from) prefetch.from += steps * prefetch.lines * 64;
        quad_passes<ROWS, FIRST + COUNT>(rows, block, steps, sums, accumulate, prefetch);
    }
}

// sums[r][c] (+)= sum over the steps. Passes over some of the columns take turns on blocks of steps that stay in
// the L1 cache; with `prefetch` each of them fetches its share of what comes after the block.
template <int ROWS>
void quad_tile(const char* const* rows, const char* panel, int64_t steps, int32_t* sums, bool accumulate,
               Prefetch prefetch) {
    constexpr int64_t BLOCK = 64;
    constexpr int PASSES = PANEL / BATON_QUAD_LANES / quad_columns_at_once(ROWS);
    if (PASSES == 1) return quad_passes<ROWS, 0>(rows, panel, steps, sums, accumulate, prefetch);
    const int lines = prefetch.lines < PASSES ? 1 : prefetch.lines / PASSES;
    const char* a[ROWS];
    for (int64_t first = 0; first < steps; first += BLOCK) {
        const int64_t count = steps - first < BLOCK ? steps - first : BLOCK;
        for (int r = 0; r < ROWS; ++r) a[r] = rows[r] + first * QUAD_BYTES;
        const Prefetch share{prefetch.from ? prefetch.from + first * prefetch.lines * 64 : nullptr, lines};
        quad_passes<ROWS, 0>(a, panel + first * 256, count, sums, accumulate || first > 0, share);
    }
}

#else

template <int ROWS>
void quad_tile(const char* const* rows, const char* panel, int64_t steps, int32_t* sums, bool accumulate, Prefetch) {
    if (!accumulate) std::memset(sums, 0, sizeof(int32_t) * ROWS * ROW_SUMS);
    const int8_t* b = reinterpret_cast<const int8_t*>(panel);
    for (int64_t s = 0; s < steps; ++s, b += 256)
        for (int r = 0; r < ROWS; ++r) {
            const uint8_t* a = reinterpret_cast<const uint8_t*>(rows[r]) + 4 * s;
            for (int c = 0; c < PANEL; ++c) {
                int32_t sum = 0;
                for (int i = 0; i < 4; ++i) sum += a[i] * b[4 * c + i];
                uint32_t total = static_cast<uint32_t>(sums[r * ROW_SUMS + c]) + static_cast<uint32_t>(sum);
                std::memcpy(sums + r * ROW_SUMS + c, &total, 4);
            }
        }
}

#endif

inline void dot_quads(int64_t rows, const char* const* a, const char* panel, int64_t steps, int32_t* sums,
                      bool accumulate, Prefetch prefetch) {
    static_assert(TALL_ROWS == 12, "one case each");
    switch (rows) {
        case 1: return quad_tile<1>(a, panel, steps, sums, accumulate, prefetch);
        case 2: return quad_tile<2>(a, panel, steps, sums, accumulate, prefetch);
        case 3: return quad_tile<3>(a, panel, steps, sums, accumulate, prefetch);
        case 4: return quad_tile<4>(a, panel, steps, sums, accumulate, prefetch);
        case 5: return quad_tile<5>(a, panel, steps, sums, accumulate, prefetch);
        case 6: return quad_tile<6>(a, panel, steps, sums, accumulate, prefetch);
        case 7: return quad_tile<7>(a, panel, steps, sums, accumulate, prefetch);
        case 8: return quad_tile<8>(a, panel, steps, sums, accumulate, prefetch);
        case 9: return quad_tile<9>(a, panel, steps, sums, accumulate, prefetch);
        case 10: return quad_tile<10>(a, panel, steps, sums, accumulate, prefetch);
        case 11: return quad_tile<11>(a, panel, steps, sums, accumulate, prefetch);
        default: return quad_tile<12>(a, panel, steps, sums, accumulate, prefetch);
    }
}

// total (+)= scale * (sum - zero * sum of inputs); after the last group times the row's scale.
inline void fold_quads(const Matrix& m, int64_t panel, int64_t group, const int32_t* sums, float* total, int64_t rows,
                       const float* row_scales, const float* input_sums) {
    const int64_t at = (panel * m.group_count + group) * PANEL;
    const float* scale = m.scales + at;
    const float* zero = m.zeros ? m.zeros + at : nullptr;
    const int32_t* offset = m.offsets + at;
    const bool is_last = group + 1 == m.group_count;
    for (int64_t r = 0; r < rows; ++r, sums += ROW_SUMS, total += ROW_SUMS) {
        const float inputs = zero ? input_sums[r * m.group_count + group] : 0.0f;
        const float row_scale = row_scales[r];
        float value[PANEL];
        for (int c = 0; c < PANEL; ++c)  // without a sign: the sum may have gone round, and comes back here
            value[c] = static_cast<float>(
                static_cast<int32_t>(static_cast<uint32_t>(sums[c]) + static_cast<uint32_t>(offset[c])));
        if (zero)
            for (int c = 0; c < PANEL; ++c) value[c] = value[c] - zero[c] * inputs;
        for (int c = 0; c < PANEL; ++c) value[c] = scale[c] * value[c];
        if (group)
            for (int c = 0; c < PANEL; ++c) value[c] = total[c] + value[c];
        if (is_last)
            for (int c = 0; c < PANEL; ++c) total[c] = row_scale * value[c];
        else
            std::memcpy(total, value, sizeof value);
    }
}

}  // namespace baton
