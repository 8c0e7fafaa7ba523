// The innermost loops for processors that multiply float32 only: AVX512 without bfloat16, AVX2 with FMA.
//
// Activations arrive as float32 (`multiply` converts bfloat16 ones, exactly), weights of every format are
// widened in registers, or once for many rows. Every element is one chain of fused multiply-adds over k in
// ascending order, in every path.
//
// Included by dot_tile.h.
#pragma once

#include <immintrin.h>

namespace baton {

#define BATON_ALWAYS __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
using Vec = __m512;
using IntVec = __m512i;
BATON_ALWAYS inline Vec vec_zero() { return _mm512_setzero_ps(); }
BATON_ALWAYS inline Vec vec_same(const float* x) { return _mm512_set1_ps(*x); }
BATON_ALWAYS inline Vec vec_load(const float* x) { return _mm512_loadu_ps(x); }
BATON_ALWAYS inline void vec_store(float* to, Vec x) { _mm512_storeu_ps(to, x); }
BATON_ALWAYS inline Vec vec_fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
BATON_ALWAYS inline Vec vec_mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
BATON_ALWAYS inline Vec vec_minus_product(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
BATON_ALWAYS inline IntVec int_load(const void* x) { return _mm512_loadu_si512(x); }
BATON_ALWAYS inline Vec as_floats(IntVec x) { return _mm512_castsi512_ps(x); }
BATON_ALWAYS inline IntVec high_halves(IntVec x) { return _mm512_and_si512(x, _mm512_set1_epi32(-65536)); }
BATON_ALWAYS inline IntVec low_halves(IntVec x) { return _mm512_slli_epi32(x, 16); }
BATON_ALWAYS inline Vec bytes_to_floats(const char* bytes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
}
#else
constexpr int WIDTH = 8;
using Vec = __m256;
using IntVec = __m256i;
BATON_ALWAYS inline Vec vec_zero() { return _mm256_setzero_ps(); }
BATON_ALWAYS inline Vec vec_same(const float* x) { return _mm256_broadcast_ss(x); }
BATON_ALWAYS inline Vec vec_load(const float* x) { return _mm256_loadu_ps(x); }
BATON_ALWAYS inline void vec_store(float* to, Vec x) { _mm256_storeu_ps(to, x); }
BATON_ALWAYS inline Vec vec_fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
BATON_ALWAYS inline Vec vec_mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
BATON_ALWAYS inline Vec vec_minus_product(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
BATON_ALWAYS inline IntVec int_load(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }
BATON_ALWAYS inline Vec as_floats(IntVec x) { return _mm256_castsi256_ps(x); }
BATON_ALWAYS inline IntVec high_halves(IntVec x) { return _mm256_and_si256(x, _mm256_set1_epi32(-65536)); }
BATON_ALWAYS inline IntVec low_halves(IntVec x) { return _mm256_slli_epi32(x, 16); }
BATON_ALWAYS inline Vec bytes_to_floats(const char* bytes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
}
#endif
constexpr int VECTORS = PANEL / WIDTH;

// Vectors FIRST … FIRST + COUNT - 1 of the panel's columns, of step `step`, k = K * step + PARITY.
struct StepF32 {
    static constexpr int64_t BYTES = 256;
    static constexpr int K = 1;
    template <int PARITY, int FIRST, int COUNT>
    BATON_ALWAYS static void load(Vec* b, const char* panel, int64_t step, const Codebook*) {
        const float* from = reinterpret_cast<const float*>(panel + step * BYTES);
        for (int j = 0; j < COUNT; ++j) b[j] = vec_load(from + WIDTH * (FIRST + j));
    }
};

struct StepBF16 {
    static constexpr int64_t BYTES = 256;
    static constexpr int K = 2;
    template <int PARITY, int FIRST, int COUNT>
    BATON_ALWAYS static void load(Vec* b, const char* panel, int64_t step, const Codebook*) {
        for (int j = 0; j < COUNT; ++j) {
            const IntVec pairs = int_load(panel + step * BYTES + 4 * WIDTH * (FIRST + j));
            b[j] = as_floats(PARITY ? high_halves(pairs) : low_halves(pairs));
        }
    }
};

struct StepCode8 {  // of integers, packed as they are: `Codebook::is_integer`
    static constexpr int64_t BYTES = 128;
    static constexpr int K = 2;
    template <int PARITY, int FIRST, int COUNT>
    BATON_ALWAYS static void load(Vec* b, const char* panel, int64_t step, const Codebook*) {
        const char* from = panel + step * BYTES + PARITY * PANEL;
        for (int j = 0; j < COUNT; ++j) b[j] = bytes_to_floats(from + WIDTH * (FIRST + j));
    }
};

struct StepTable8 {
    static constexpr int64_t BYTES = 128;
    static constexpr int K = 2;
    template <int PARITY, int FIRST, int COUNT>
    BATON_ALWAYS static void load(Vec* b, const char* panel, int64_t step, const Codebook* book) {
        const uint8_t* from = reinterpret_cast<const uint8_t*>(panel + step * BYTES + PARITY * PANEL);
        for (int j = 0; j < COUNT; ++j) {
            float values[WIDTH];
            for (int i = 0; i < WIDTH; ++i) values[i] = to_float(code8_value(*book, from[WIDTH * (FIRST + j) + i]));
            b[j] = vec_load(values);
        }
    }
};

struct StepCode4 {
    static constexpr int64_t BYTES = 64;
    static constexpr int K = 2;
    // Lane c of 16 holds in nibbles 4 p … 4 p + 3 those of columns c, 16 + c, … of parity p.
    template <int PARITY, int FIRST, int COUNT>
    BATON_ALWAYS static void load(Vec* b, const char* panel, int64_t step, const Codebook* book) {
        const char* from = panel + step * BYTES;
        for (int j = 0; j < COUNT; ++j) {
            const int column = WIDTH * (FIRST + j), shift = 4 * (column / 16) + 16 * PARITY;
            const IntVec lanes = int_load(from + 4 * (column % 16));
#if defined(__AVX512F__)
            b[j] = _mm512_permutexvar_ps(_mm512_srli_epi32(lanes, shift), vec_load(book->wide));
#else
            const IntVec index = _mm256_srli_epi32(lanes, shift);
            const Vec low = _mm256_permutevar8x32_ps(vec_load(book->wide), index);
            const Vec high = _mm256_permutevar8x32_ps(vec_load(book->wide + 8), index);
            b[j] = _mm256_blendv_ps(low, high, as_floats(_mm256_slli_epi32(index, 28)));
#endif
        }
    }
};

// Loops over rows and vectors are unrolled by order: left to itself, g++ 12 keeps AVX2's sums in memory.
template <int ROWS, typename Step, int FIRST, int COUNT>
void dot_columns(const float* const* rows, const char* panel, int64_t steps, const Codebook* book, float* acc,
                 bool accumulate, Prefetch prefetch) {
    Vec c[ROWS][COUNT];
    const float* a[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
        a[r] = rows[r];
#pragma GCC unroll 16
        for (int j = 0; j < COUNT; ++j)
            c[r][j] = accumulate ? vec_load(acc + r * PANEL + WIDTH * (FIRST + j)) : vec_zero();
    }
    auto multiply = [&](const Vec* b, int64_t k) BATON_ALWAYS {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const Vec x = vec_same(a[r] + k);
#pragma GCC unroll 16
            for (int j = 0; j < COUNT; ++j) c[r][j] = vec_fma(x, b[j], c[r][j]);
        }
    };
    auto step = [&](int64_t s) BATON_ALWAYS {
        Vec b[COUNT];
        Step::template load<0, FIRST, COUNT>(b, panel, s, book);
        multiply(b, Step::K * s);
        if constexpr (Step::K == 2) {
            Step::template load<1, FIRST, COUNT>(b, panel, s, book);
            multiply(b, 2 * s + 1);
        }
    };
    if (prefetch.from)
        for (int64_t s = 0; s < steps; ++s) step(s), prefetch_step(prefetch, s);
    else
        for (int64_t s = 0; s < steps; ++s) step(s);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < COUNT; ++j) vec_store(acc + r * PANEL + WIDTH * (FIRST + j), c[r][j]);
}

// Vectors of columns whose sums fit into registers beside the weights.
constexpr int columns_at_once(int rows) {
    return WIDTH == 16 ? (rows <= TILE_ROWS ? 4 : 2) : rows == 1 ? 8 : rows == 2 ? 4 : rows <= TILE_ROWS ? 2 : 1;
}

template <int ROWS, typename Step, int FIRST>
void dot_passes(const float* const* a, const char* block, int64_t steps, const Codebook* book, float* acc,
                bool accumulate, Prefetch prefetch) {
    constexpr int COUNT = columns_at_once(ROWS);
    if constexpr (FIRST < VECTORS) {
        dot_columns<ROWS, Step, FIRST, COUNT>(a, block, steps, book, acc, accumulate, prefetch);
        if (prefetch.from) prefetch.from += steps * prefetch.lines * 64;
        dot_passes<ROWS, Step, FIRST + COUNT>(a, block, steps, book, acc, accumulate, prefetch);
    }
}

// acc[r][c] (+)= sum over the steps. Passes over some of the columns take turns on blocks of steps that stay in
// the L1 cache; with `prefetch` each of them fetches its share of what comes after the block.
template <int ROWS, typename Step>
void dot_tile(const float* const* rows, const char* panel, int64_t steps, const Codebook* book, float* acc,
              bool accumulate, Prefetch prefetch) {
    constexpr int64_t BLOCK = 64;
    constexpr int PASSES = VECTORS / columns_at_once(ROWS);
    if (PASSES == 1) return dot_passes<ROWS, Step, 0>(rows, panel, steps, book, acc, accumulate, prefetch);
    const int lines = prefetch.lines < PASSES ? 1 : prefetch.lines / PASSES;
    const float* a[ROWS];
    for (int64_t first = 0; first < steps; first += BLOCK) {
        const int64_t count = steps - first < BLOCK ? steps - first : BLOCK;
        for (int r = 0; r < ROWS; ++r) a[r] = rows[r] + first * Step::K;
        const Prefetch share{prefetch.from ? prefetch.from + first * prefetch.lines * 64 : nullptr, lines};
        dot_passes<ROWS, Step, 0>(a, panel + first * Step::BYTES, count, book, acc, accumulate || first > 0, share);
    }
}

// Vectors FIRST … of the groups in turn, of a panel as `widen_steps` leaves it. The sums of a group never leave the
// registers.
template <int ROWS, int FIRST>
void dot_groups(const float* const* rows, const float* panel, const Groups& groups, float* total, bool accumulate,
                Prefetch prefetch) {
    constexpr int COUNT = columns_at_once(ROWS);
    if constexpr (FIRST < VECTORS) {
        for (int64_t g = 0; g < groups.count; ++g) {
            Vec c[ROWS][COUNT];
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
                for (int j = 0; j < COUNT; ++j) c[r][j] = vec_zero();
            auto multiply = [&](int64_t k) BATON_ALWAYS {
                Vec b[COUNT];
                StepF32::load<0, FIRST, COUNT>(b, reinterpret_cast<const char*>(panel), k, nullptr);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r) {
                    const Vec x = vec_same(rows[r] + k);
#pragma GCC unroll 16
                    for (int j = 0; j < COUNT; ++j) c[r][j] = vec_fma(x, b[j], c[r][j]);
                }
            };
            const int64_t k_first = g * groups.k, k_end = k_first + groups.k;
            if (FIRST == 0 && prefetch.from)
                for (int64_t k = k_first; k < k_end; k += 2) multiply(k), multiply(k + 1), prefetch_step(prefetch, k / 2);
            else
                for (int64_t k = k_first; k < k_end; ++k) multiply(k);
            const bool adds = accumulate || g > 0;
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
                for (int j = 0; j < COUNT; ++j) {
                    const int64_t column = WIDTH * (FIRST + j);
                    Vec value = c[r][j];
                    if (groups.zeros) {
                        const Vec sum = vec_same(groups.sums + r * groups.sums_stride + g);
                        value = vec_minus_product(vec_load(groups.zeros + g * PANEL + column), sum, value);
                    }
                    const Vec scale = vec_load(groups.scales + g * PANEL + column);
                    float* to = total + r * PANEL + column;
                    vec_store(to, adds ? vec_fma(scale, value, vec_load(to)) : vec_mul(scale, value));
                }
        }
        dot_groups<ROWS, FIRST + COUNT>(rows, panel, groups, total, accumulate, prefetch);
    }
}

// A block of a panel to float32: [k][PANEL].
template <typename Step> void widen_steps(const char* panel, int64_t steps, const Codebook* book, float* to) {
    for (int64_t s = 0; s < steps; ++s) {
        Vec b[VECTORS];
        Step::template load<0, 0, VECTORS>(b, panel, s, book);
        for (int j = 0; j < VECTORS; ++j) vec_store(to + (Step::K * s) * PANEL + WIDTH * j, b[j]);
        if constexpr (Step::K == 2) {
            Step::template load<1, 0, VECTORS>(b, panel, s, book);
            for (int j = 0; j < VECTORS; ++j) vec_store(to + (2 * s + 1) * PANEL + WIDTH * j, b[j]);
        }
    }
}

}  // namespace baton
