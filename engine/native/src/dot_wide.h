// The innermost loops for processors that multiply float32 only: AVX512 without bfloat16, AVX2 with FMA.
//
// Activations arrive as float32 (`multiply` converts bfloat16 ones, exactly), those of a tile of rows side by side:
// [k][ROWS], so that a tile reads one stream of them whatever k is. Weights of every format are widened in registers,
// or once for many rows. Every element is one chain of fused multiply-adds over k in ascending order, in every path.
//
// With AVX2, whose registers hold the sums of a tile of rows for sixteen columns only, a panel lies in strips of so
// many, each of which a tile reads from end to end. Step s of a strip holds
//   float32  [c], bfloat16 [c][2]: as a panel does
//   code8    [2][c]
//   code4    with the step beside it (2 i and 2 i + 1) 32 bytes, in the order that `load` undoes: `code4_byte`.
//            Their low halves are the codes of step 2 i.
//   lanes4   [c] words of 32 bits, whose nibble n belongs to k = 8 s + n: codes that are a row of integers need no
//            table. A nibble is converted where it is, which multiplies it by 16^n: activations are divided by that
//            before (`lanes4_factor`), exactly.
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
// Written out, since g++ 12 takes other forms of the instruction, which move sums between registers and then to memory.
BATON_ALWAYS inline Vec vec_fma(Vec a, Vec b, Vec c) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
    return c;
}
BATON_ALWAYS inline Vec vec_mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
BATON_ALWAYS inline Vec vec_minus_product(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
BATON_ALWAYS inline IntVec int_load(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }
BATON_ALWAYS inline Vec as_floats(IntVec x) { return _mm256_castsi256_ps(x); }
// Whose mask would take one of sixteen registers.
BATON_ALWAYS inline IntVec high_halves(IntVec x) {
    alignas(32) static constexpr int32_t MASK[8] = {-65536, -65536, -65536, -65536, -65536, -65536, -65536, -65536};
    asm("vpand %2, %1, %0" : "=x"(x) : "x"(x), "m"(MASK));
    return x;
}
BATON_ALWAYS inline IntVec low_halves(IntVec x) { return _mm256_slli_epi32(x, 16); }
BATON_ALWAYS inline Vec bytes_to_floats(const char* bytes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
}
#endif
constexpr int VECTORS = PANEL / WIDTH, STRIP_VECTORS = STRIP / WIDTH;
template <int N> using Number = std::integral_constant<int, N>;

// A panel, from step `first` on.
struct Panel {
    const char* data;
    int64_t strip_bytes;  // from strip to strip
    const Codebook* book;
    int64_t first = 0;

    Panel of_strip(int strip) const { return {data + strip * strip_bytes, strip_bytes, book, first}; }

    // Where a step begins in the strip of column vector `vector`.
    BATON_ALWAYS const char* at(int64_t step, int64_t step_bytes, int vector) const {
        return data + vector / STRIP_VECTORS * strip_bytes + (first + step) * step_bytes;
    }
};

// Vectors FIRST … FIRST + COUNT - 1 of the panel's columns, of step `step`, k = K * step + PLACE.
struct StepF32 {
    static constexpr int64_t BYTES = strip_step_bytes(DENSE_F32);
    static constexpr int K = 1;
    template <int PLACE, int FIRST, int COUNT> BATON_ALWAYS static void load(Vec* b, Panel panel, int64_t step) {
        for (int j = 0; j < COUNT; ++j) {
            const float* from = reinterpret_cast<const float*>(panel.at(step, BYTES, FIRST + j));
            b[j] = vec_load(from + (FIRST + j) % STRIP_VECTORS * WIDTH);
        }
    }
};

struct StepBF16 {
    static constexpr int64_t BYTES = strip_step_bytes(DENSE_BF16);
    static constexpr int K = 2;
    template <int PLACE, int FIRST, int COUNT> BATON_ALWAYS static void load(Vec* b, Panel panel, int64_t step) {
        for (int j = 0; j < COUNT; ++j) {
            const IntVec pairs = int_load(panel.at(step, BYTES, FIRST + j) + (FIRST + j) % STRIP_VECTORS * (4 * WIDTH));
            b[j] = as_floats(PLACE ? high_halves(pairs) : low_halves(pairs));
        }
    }
};

struct StepCode8 {  // of integers, packed as they are: `Codebook::is_integer`
    static constexpr int64_t BYTES = strip_step_bytes(CODE8);
    static constexpr int K = 2;
    template <int PLACE, int FIRST, int COUNT> BATON_ALWAYS static void load(Vec* b, Panel panel, int64_t step) {
        for (int j = 0; j < COUNT; ++j) {
            const char* from = panel.at(step, BYTES, FIRST + j) + PLACE * STRIP;
            b[j] = bytes_to_floats(from + (FIRST + j) % STRIP_VECTORS * WIDTH);
        }
    }
};

struct StepTable8 {
    static constexpr int64_t BYTES = strip_step_bytes(CODE8);
    static constexpr int K = 2;
    template <int PLACE, int FIRST, int COUNT> BATON_ALWAYS static void load(Vec* b, Panel panel, int64_t step) {
        for (int j = 0; j < COUNT; ++j) {
            const char* from = panel.at(step, BYTES, FIRST + j) + PLACE * STRIP;
            float values[WIDTH];
            for (int i = 0; i < WIDTH; ++i) {
                const char code = from[(FIRST + j) % STRIP_VECTORS * WIDTH + i];
                values[i] = to_float(code8_value(*panel.book, static_cast<uint8_t>(code)));
            }
            b[j] = vec_load(values);
        }
    }
};

struct StepCode4 {
    static constexpr int64_t BYTES = strip_step_bytes(CODE4);
    static constexpr int K = 2;
#if defined(__AVX512F__)
    // Lane c of 16 holds in nibbles 4 p … 4 p + 3 those of columns c, 16 + c, … of parity p.
    template <int PLACE, int FIRST, int COUNT> BATON_ALWAYS static void load(Vec* b, Panel panel, int64_t step) {
        const IntVec lanes = int_load(panel.at(step, BYTES, 0));
        for (int j = 0; j < COUNT; ++j)
            b[j] = _mm512_permutexvar_ps(_mm512_srli_epi32(lanes, 4 * (FIRST + j) + 16 * PLACE),
                                         vec_load(panel.book->wide));
    }
#else
    // Both bytes of 32 bfloat16 are looked up at once. The compiler sees that the other parity needs the same.
    template <int PLACE, int FIRST, int COUNT> BATON_ALWAYS static void load(Vec* b, Panel panel, int64_t step) {
        const IntVec low = int_load(panel.book->nibble_low), high = int_load(panel.book->nibble_high);
        const int64_t at = panel.first + step;
        const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(at % 2 * 4));
#pragma GCC unroll 8
        for (int j = 0; j < COUNT; ++j) {
            const char* from = panel.data + (FIRST + j) / STRIP_VECTORS * panel.strip_bytes + at / 2 * (2 * BYTES);
            const IntVec codes = _mm256_and_si256(_mm256_srl_epi16(int_load(from), shift), _mm256_set1_epi8(15));
            const IntVec lows = _mm256_shuffle_epi8(low, codes), highs = _mm256_shuffle_epi8(high, codes);
            const IntVec pairs =
                (FIRST + j) % STRIP_VECTORS ? _mm256_unpackhi_epi8(lows, highs) : _mm256_unpacklo_epi8(lows, highs);
            b[j] = as_floats(PLACE ? high_halves(pairs) : low_halves(pairs));
        }
    }
#endif
};

#if !defined(__AVX512F__)
struct StepLanes4 {
    static constexpr int64_t BYTES = strip_step_bytes(LANES4);
    static constexpr int K = step_k(LANES4);
    template <int PLACE, int FIRST, int COUNT> BATON_ALWAYS static void load(Vec* b, Panel panel, int64_t step) {
        for (int j = 0; j < COUNT; ++j) {
            const char* from = panel.at(step, BYTES, FIRST + j) + (FIRST + j) % STRIP_VECTORS * (4 * WIDTH);
            const IntVec words = int_load(from);
            b[j] = _mm256_cvtepi32_ps(PLACE == K - 1
                                          ? _mm256_srli_epi32(words, 4 * PLACE)
                                          : _mm256_and_si256(words, _mm256_set1_epi32(15 << 4 * (PLACE % (K - 1)))));
        }
    }
};
#endif

template <int ROWS, typename Step, int PLACE, int FIRST, int COUNT>
BATON_ALWAYS inline void columns_of_rows(Vec (&c)[ROWS][COUNT], const Vec (&x)[ROWS], Panel panel, int64_t step) {
    auto column = [&](auto j) BATON_ALWAYS {
        constexpr int J = decltype(j)::value;
        Vec b;
        Step::template load<PLACE, FIRST + J, 1>(&b, panel, step);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) c[r][J] = vec_fma(x[r], b, c[r][J]);
    };
    static_assert(COUNT == 2 || COUNT == 4 || COUNT == 8, "one call each");
    column(Number<0>()), column(Number<1>());
    if constexpr (COUNT > 2) column(Number<2>()), column(Number<3>());
    if constexpr (COUNT > 4) column(Number<4>()), column(Number<5>()), column(Number<6>()), column(Number<7>());
}

// c[r][j] += a[r] * the weights of column vector FIRST + j, for one k: PLACE of the step. Of two factors the fewer
// stay in registers, of which AVX2 has sixteen. With KEEP the weights of a strip are stored to `kept`: [k][STRIP].
template <int ROWS, typename Step, int PLACE, int FIRST, int COUNT, bool KEEP = false>
BATON_ALWAYS inline void multiply_k(Vec (&c)[ROWS][COUNT], const float* a, Panel panel, int64_t step, float* kept) {
    if constexpr (WIDTH == 8 && ROWS < COUNT) {
        static_assert(!KEEP, "of tiles that hold the weights");
        Vec x[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) x[r] = vec_same(a + r);
        columns_of_rows<ROWS, Step, PLACE, FIRST, COUNT>(c, x, panel, step);
    } else {
        Vec b[COUNT];
        Step::template load<PLACE, FIRST, COUNT>(b, panel, step);
        if constexpr (KEEP)
#pragma GCC unroll 16
            for (int j = 0; j < COUNT; ++j) vec_store(kept + (Step::K * step + PLACE) * STRIP + WIDTH * j, b[j]);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const Vec x = vec_same(a + r);
#pragma GCC unroll 16
            for (int j = 0; j < COUNT; ++j) c[r][j] = vec_fma(x, b[j], c[r][j]);
        }
    }
}

// Has weights read anew where sums leave no registers for what was read: compilers would keep one or the other on the
// stack.
template <bool IS_FULL> BATON_ALWAYS inline void forget() {
#if !defined(__AVX512F__)
    if (IS_FULL) asm volatile("" ::: "memory");
#endif
}

// All k of a step, from PLACE on.
template <int ROWS, typename Step, int FIRST, int COUNT, bool KEEP = false, int PLACE = 0>
BATON_ALWAYS inline void multiply_step(Vec (&c)[ROWS][COUNT], const float* a, Panel panel, int64_t step,
                                       float* kept = nullptr) {
    multiply_k<ROWS, Step, PLACE, FIRST, COUNT, KEEP>(c, a + (Step::K * step + PLACE) * ROWS, panel, step, kept);
    if constexpr (PLACE + 1 < Step::K) {
        forget<(ROWS * COUNT > 8)>();
        multiply_step<ROWS, Step, FIRST, COUNT, KEEP, PLACE + 1>(c, a, panel, step, kept);
    }
}

// Steps of one input are so short that several stand in a round of the loop.
constexpr int STEPS_OF_ROUND = 4;
template <typename Step, bool IS_FULL, typename Do>
BATON_ALWAYS inline void each_step(int64_t first, int64_t end, Do&& act) {
    int64_t s = first;
    if constexpr (Step::K == 1 && STRIP < PANEL)
        for (; s + STEPS_OF_ROUND <= end; s += STEPS_OF_ROUND)
#pragma GCC unroll 16
            for (int i = 0; i < STEPS_OF_ROUND; ++i) act(s + i), forget<IS_FULL>();
    for (; s < end; ++s) act(s);
}

// acc[r][c] (+)= sum over the steps, of a few vectors of columns. What follows in strips is fetched as fast as they are
// read. Loops over rows and vectors are unrolled by order: left to itself, g++ 12 keeps AVX2's sums in memory.
template <int ROWS, typename Step, int FIRST, int COUNT, bool KEEP = false>
void dot_columns(const float* a, Panel panel, int64_t steps, float* acc, bool accumulate, Prefetch prefetch,
                 float* kept = nullptr) {
    Vec c[ROWS][COUNT];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < COUNT; ++j)
            c[r][j] = accumulate ? vec_load(acc + r * ROW_SUMS + WIDTH * (FIRST + j)) : vec_zero();
    auto step = [&](int64_t s) BATON_ALWAYS { multiply_step<ROWS, Step, FIRST, COUNT, KEEP>(c, a, panel, s, kept); };
    auto fetch = [&](int64_t s) BATON_ALWAYS {
        if constexpr (STRIP < PANEL) {
            if (s % (64 / Step::BYTES)) return;
#pragma GCC unroll 4
            for (int i = 0; i < COUNT / STRIP_VECTORS; ++i)
                __builtin_prefetch(prefetch.from + i * panel.strip_bytes + s * Step::BYTES, 0, 2);
        } else {
            prefetch_step(prefetch, s);
        }
    };
    int64_t begun = 0;
    if (prefetch.from)
        for (const int64_t end = std::min<int64_t>(steps, prefetch.steps); begun < end; ++begun) step(begun), fetch(begun);
    each_step<Step, (ROWS * COUNT > 8)>(begun, steps, step);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < COUNT; ++j) vec_store(acc + r * ROW_SUMS + WIDTH * (FIRST + j), c[r][j]);
}

// Vectors of columns whose sums fit into registers beside the weights.
constexpr int columns_at_once(int rows) {
    return WIDTH == 16 ? (rows <= TILE_ROWS ? 4 : 2) : rows == 1 ? 8 : rows == 2 ? 4 : 2;
}
// The same beside the tables of codes of four bits.
template <typename Step> constexpr int columns_beside(int rows) {
    return WIDTH == 8 && std::is_same<Step, StepCode4>::value && rows == 1 ? 4 : columns_at_once(rows);
}
// What activations of input k are multiplied by for codes that stay in their place of a word.
constexpr float lanes4_factor(int64_t k) { return k % 8 == 7 ? 1.0f : 1.0f / static_cast<float>(1 << k % 8 * 4); }
constexpr int64_t PASS_STEPS = 64;  // that passes over some of the columns take turns on: they stay in the L1 cache
constexpr int64_t STRIP_STEPS = 256;   // of a strip that tiles take turns on: 16 KiB
constexpr int64_t STRIP_AHEAD = 4096;  // how far a single tile's strips are fetched

template <int ROWS, typename Step, int FIRST>
void dot_passes(const float* a, Panel panel, int64_t steps, float* acc, bool accumulate, Prefetch prefetch) {
    constexpr int COUNT = columns_at_once(ROWS);
    if constexpr (FIRST < VECTORS) {
        dot_columns<ROWS, Step, FIRST, COUNT>(a, panel, steps, acc, accumulate, prefetch);
        if (prefetch.from) prefetch.from += steps * prefetch.lines * 64;
        dot_passes<ROWS, Step, FIRST + COUNT>(a, panel, steps, acc, accumulate, prefetch);
    }
}

template <int ROWS, typename Step>
void dot_strips(const float* a, Panel panel, int64_t steps, float* acc, bool accumulate) {
    constexpr int COUNT = columns_beside<Step>(ROWS), STRIPS = COUNT / STRIP_VECTORS;
    for (int strip = 0; strip < PANEL / STRIP; strip += STRIPS) {
        const Panel here = panel.of_strip(strip);
        const Prefetch ahead{here.at(0, Step::BYTES, 0) + STRIP_AHEAD, 1};
        dot_columns<ROWS, Step, 0, COUNT>(a, here, steps, acc + strip * STRIP, accumulate, ahead);
    }
}

// acc[r][c] (+)= sum over the steps. With `prefetch` the passes share what is fetched meanwhile; strips are fetched
// themselves.
template <int ROWS, typename Step>
void dot_tile(const float* a, Panel panel, int64_t steps, float* acc, bool accumulate, Prefetch prefetch) {
    constexpr int PASSES = VECTORS / columns_at_once(ROWS);
    if constexpr (STRIP < PANEL) {
        dot_strips<ROWS, Step>(a, panel, steps, acc, accumulate);
    } else if constexpr (PASSES == 1) {
        dot_passes<ROWS, Step, 0>(a, panel, steps, acc, accumulate, prefetch);
    } else {
        const int lines = prefetch.lines < PASSES ? 1 : prefetch.lines / PASSES;
        for (int64_t first = 0; first < steps; first += PASS_STEPS) {
            const int64_t count = steps - first < PASS_STEPS ? steps - first : PASS_STEPS;
            const Prefetch share{prefetch.from ? prefetch.from + first * prefetch.lines * 64 : nullptr, lines};
            const Panel block{panel.data, 0, panel.book, panel.first + first};
            dot_passes<ROWS, Step, 0>(a + first * Step::K * ROWS, block, count, acc, accumulate || first > 0, share);
        }
    }
}

enum Zero { NO_ZERO, ONE_ZERO, ZEROS };

// Adds a group to `total`; `at` is its place in scales and zeros. Which zeros there are is known when this is compiled:
// decided for every sum, groups of 32 took about 5 % longer. What is the same for all rows is read once: compilers do
// not know that no sum lies there.
template <int ROWS, int COUNT, int ZERO, bool ADDS>
BATON_ALWAYS inline void fold_sums(Vec (&c)[ROWS][COUNT], const Groups& groups, int64_t g, int64_t at, float* total) {
#pragma GCC unroll 16
    for (int j = 0; j < COUNT; ++j) {
        const Vec scale = vec_load(groups.scales + at + WIDTH * j);
        const Vec zero = ZERO == ZEROS ? vec_load(groups.zeros + at + WIDTH * j) : vec_same(&groups.offset);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            Vec value = c[r][j];
            const float* sum = groups.sums + r * groups.sums_stride + g;
            if constexpr (ZERO == ZEROS) value = vec_minus_product(zero, vec_same(sum), value);
            if constexpr (ZERO == ONE_ZERO) value = vec_fma(zero, vec_same(sum), value);
            float* to = total + r * ROW_SUMS + WIDTH * j;
            vec_store(to, ADDS ? vec_fma(scale, value, vec_load(to)) : vec_mul(scale, value));
        }
    }
}

// The groups in turn. The sums of a group never leave the registers. `prefetch` is of lines per group, or per step
// where columns are not in strips.
template <int ROWS, typename Step, int FIRST, int COUNT, int ZERO, bool KEEP>
void dot_groups_with(const float* a, Panel panel, const Groups& groups, float* total, bool accumulate,
                     Prefetch prefetch, float* kept) {
    for (int64_t g = 0; g < groups.count; ++g) {
        Vec c[ROWS][COUNT];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
            for (int j = 0; j < COUNT; ++j) c[r][j] = vec_zero();
        auto step = [&](int64_t s) BATON_ALWAYS { multiply_step<ROWS, Step, FIRST, COUNT, KEEP>(c, a, panel, s, kept); };
        const int64_t steps = groups.k / Step::K, end = (g + 1) * steps;
        if (STRIP < PANEL && prefetch.from) prefetch_step(prefetch, g);
        if (STRIP == PANEL && prefetch.from)
            for (int64_t s = g * steps; s < end; s += 2) step(s), step(s + 1), prefetch_step(prefetch, s / 2);
        else
            each_step<Step, (ROWS * COUNT > 8)>(g * steps, end, step);
        const int64_t at = g * PANEL + WIDTH * FIRST;
        float* to = total + WIDTH * FIRST;
        if (accumulate || g > 0)
            fold_sums<ROWS, COUNT, ZERO, true>(c, groups, g, at, to);
        else
            fold_sums<ROWS, COUNT, ZERO, false>(c, groups, g, at, to);
    }
}

template <int ROWS, typename Step, int FIRST, int COUNT, bool KEEP = false>
void dot_groups(const float* a, Panel panel, const Groups& groups, float* total, bool accumulate, Prefetch prefetch,
                float* kept = nullptr) {
    if (groups.zeros)
        dot_groups_with<ROWS, Step, FIRST, COUNT, ZEROS, KEEP>(a, panel, groups, total, accumulate, prefetch, kept);
    else if (groups.offset != 0)
        dot_groups_with<ROWS, Step, FIRST, COUNT, ONE_ZERO, KEEP>(a, panel, groups, total, accumulate, prefetch, kept);
    else
        dot_groups_with<ROWS, Step, FIRST, COUNT, NO_ZERO, KEEP>(a, panel, groups, total, accumulate, prefetch, kept);
}

// One tile times all columns of a panel. Each pass fetches some of what its first strip comes to.
template <int ROWS, typename Step>
void dot_groups_alone(const float* a, Panel panel, const Groups& groups, float* total) {
    constexpr int COUNT = columns_beside<Step>(ROWS), STRIPS = COUNT / STRIP_VECTORS;
    constexpr int LINES = 8;  // for each group; the processor fetches the rest by itself
    Groups here = groups;
    for (int strip = 0; strip < PANEL / STRIP; strip += STRIPS) {
        const Panel from = panel.of_strip(strip);
        dot_groups<ROWS, Step, 0, COUNT>(a, from, here, total + strip * STRIP, false,
                                         {from.at(0, Step::BYTES, 0) + STRIP_AHEAD, LINES});
        here.scales += STRIPS * STRIP;
        if (here.zeros) here.zeros += STRIPS * STRIP;
    }
}

// A strip of a block of a panel to float32: [k][STRIP].
template <typename Step, int PLACE = 0> BATON_ALWAYS inline void widen_step(Panel panel, int64_t step, float* to) {
    Vec b[STRIP_VECTORS];
    Step::template load<PLACE, 0, STRIP_VECTORS>(b, panel, step);
    for (int j = 0; j < STRIP_VECTORS; ++j) vec_store(to + (Step::K * step + PLACE) * STRIP + WIDTH * j, b[j]);
    if constexpr (PLACE + 1 < Step::K) widen_step<Step, PLACE + 1>(panel, step, to);
}

template <typename Step> void widen_strip(Panel panel, int64_t steps, float* to) {
    for (int64_t s = 0; s < steps; ++s) widen_step<Step>(panel, s, to);
}

}  // namespace baton
