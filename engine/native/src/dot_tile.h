// The innermost loops of a matrix product: a few rows times one panel of PANEL columns.
//
// Every element of the result is one chain of fused multiply-adds over k in ascending order, by the same
// instruction whatever the number of rows: this is what makes results independent of the batch. (By tiles of AMX,
// in dot_amx.h, the chain is another, and again the same for every number of rows.)
//
// A panel is stored in steps over k; in memory order, step s holds for columns c = 0 … 63 (with AVX2 all but quad8 lie
// in strips of 16 columns, one after another, each in steps over all k: dot_wide.h):
//   float32  k = s:             [c]
//   bfloat16 k = 2s, 2s + 1:    [c][2]
//   code8    k = 2s, 2s + 1:    bytes, in the order that `decode` undoes with two byte interleavings, or [2][c]
//   quad8    k = 4s … 4s + 3:   [c][4] (quads.h)
//   code4    k = 2s, 2s + 1:    32 words; word w holds in nibble n column 16 n + w / 2, k = 2s + w % 2
//   lanes4   k = 8s … 8s + 7:   [c], words of 32 bits whose nibble n is the code for k = 8s + n (dot_wide.h)
#pragma once

#include "runtime.h"

#include "amx.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define BATON_AVX512 1
#include <immintrin.h>
#else
#define BATON_AVX512 0
#include <cmath>
#endif
// Processors that multiply float32 only (dot_wide.h).
#if !BATON_AVX512 && !BATON_AMX &&                                                           \
    ((defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)) || \
     (defined(__AVX2__) && defined(__FMA__)))
#define BATON_WIDE 1
#else
#define BATON_WIDE 0
#endif
// Those of them whose registers hold the sums of a few columns at a time.
#if BATON_WIDE && !defined(__AVX512F__)
#define BATON_FEW_SUMS 1
#else
#define BATON_FEW_SUMS 0
#endif
// Processors that scale coded weights before tiles multiply them (coded_tiles.h).
#if BATON_AMX && BATON_AVX512 && defined(__AVX512FP16__)
#define BATON_SCALED 1
#else
#define BATON_SCALED 0
#endif

namespace baton {

constexpr int PANEL = 64;
constexpr int STRIP = BATON_FEW_SUMS ? 16 : PANEL;  // columns whose sums fit into registers for a tile of rows
// A row's sums of a panel and the next row's lie so many numbers apart. With strips that is an odd number of lines:
// sums of a strip for many rows would else share a quarter of the sets of the L1 cache.
constexpr int ROW_SUMS = BATON_FEW_SUMS ? PANEL + STRIP : PANEL;
constexpr int TILE_ROWS = 6;
constexpr int TALL_ROWS = 12;  // of a tile that is the only one

enum Format : int32_t { DENSE_F32 = 0, DENSE_BF16 = 1, CODE8 = 2, CODE4 = 3, QUAD8 = 4, LANES4 = 5 };

constexpr int64_t step_bytes(int format) {
    return format == CODE4 ? 64 : format == CODE8 ? 128 : 256;
}
constexpr int64_t strip_step_bytes(int format) { return step_bytes(format) * STRIP / PANEL; }
constexpr int step_k(int format) { return format == DENSE_F32 ? 1 : format == QUAD8 ? 4 : format == LANES4 ? 8 : 2; }

// Place in which code8 keeps column c, k = 2s + parity, within its step.
constexpr int code8_position(int c, int parity) {
    if (BATON_WIDE) return parity * STRIP + c;
    return (c / 32) * 64 + ((c % 16) / 4) * 16 + ((c / 16) % 2) * 8 + (c % 4) * 2 + parity;
}

// Meaning of a matrix's codes. code8: bit 7 is the sign, the rest the index of a magnitude;
// code 0x80 has a value of its own (int8's -128). code4: an index.
struct alignas(64) Codebook {
    uint8_t low[128];
    uint8_t high[128];
    bf16 nibble[32];  // twice the same 16: the bits above the nibble need no masking
    uint8_t high_of_0x80[64];
    float wide[16];      // of code4
    uint8_t nibble_low[32], nibble_high[32];  // bytes of `nibble`
    bool is_integer;     // code8: a magnitude is its index, 0x80 is -128
    float halves_unit;   // of codes in half precision: a power of two that none exceeds
    uint16_t halves[32];  // of code4, as `nibble`
};

// Where a strip keeps the code of column c, input k, with AVX2: the byte, and by how many bits it is shifted there.
constexpr int64_t code4_byte(int c, int64_t k) { return k / 4 * 32 + c % 8 / 4 * 16 + c / 8 * 8 + c % 4 * 2 + k % 2; }
constexpr int code4_shift(int64_t k) { return static_cast<int>(k / 2 % 2 * 4); }

// What a panel holds of a code.
inline uint8_t code8_packed(const Codebook& book, uint8_t code) {
    if (!BATON_WIDE || !book.is_integer || code <= 0x80) return code;
    return static_cast<uint8_t>(-(code & 0x7f));
}

inline bf16 code8_value(const Codebook& book, uint8_t code) {
    const int magnitude = code & 0x7f;
    const int high = code == 0x80 ? book.high_of_0x80[0] : book.high[magnitude] | (code & 0x80);
    return static_cast<bf16>(high << 8 | book.low[magnitude]);
}

struct Prefetch {
    const char* from;  // null: nothing
    int lines;         // per step
    int steps = INT32_MAX;  // during which they are fetched (dot_wide.h)
};

inline void prefetch_step(const Prefetch& prefetch, int64_t step) {
    const char* line = prefetch.from + step * prefetch.lines * 64;
    for (int i = 0; i < prefetch.lines; ++i) __builtin_prefetch(line + i * 64, 0, 2);
}

// Some groups of inputs in turn: total (+)= scale * (sum over the group - zero * sum of inputs), two
// fused operations, where scales, zeros and `sums` of rows are those of the first of the groups.
// Without zeros `offset` is minus the zero of all groups.
struct Groups {
    int64_t count, k;     // inputs of each
    const float* scales;  // [count][PANEL]
    const float* zeros;   // the same, or null
    const float* sums;    // of row r and group g at r * sums_stride + g
    int64_t sums_stride;
    float offset;
};

}  // namespace baton

#if BATON_WIDE
#include "dot_wide.h"
#endif

namespace baton {

#if BATON_AVX512

// The compiler must not call what runs once per step: it would pass vectors through memory and load tables anew.
#define BATON_STEP __attribute__((always_inline))

struct StepF32 {
    static constexpr int64_t BYTES = 256, K = 1;
    static constexpr int WIDE_ROWS = TILE_ROWS;
    using Element = float;
    __m512 b[4];  // of the panel's 64 columns
    static __m512 row(const float* a, int64_t step) { return _mm512_set1_ps(a[step]); }
    static __m512 dot(__m512 c, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, c); }
    template <int FIRST, int COUNT> BATON_STEP void load(const char* panel, int64_t step, const Codebook*) {
        const float* from = reinterpret_cast<const float*>(panel) + step * PANEL;
        for (int j = FIRST; j < FIRST + COUNT; ++j) b[j] = _mm512_load_ps(from + 16 * j);
    }
};

struct StepPairs {
    static constexpr int64_t K = 2;
    static constexpr int WIDE_ROWS = TILE_ROWS;
    using Element = bf16;
    __m512bh b[4];
    static __m512bh row(const bf16* a, int64_t step) {
        int32_t pair;
        std::memcpy(&pair, a + 2 * step, 4);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    static __m512 dot(__m512 c, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(c, a, b); }
};

struct StepBF16 : StepPairs {
    static constexpr int64_t BYTES = 256;
    template <int FIRST, int COUNT> BATON_STEP void load(const char* panel, int64_t step, const Codebook*) {
        const char* from = panel + step * 256;
        for (int j = FIRST; j < FIRST + COUNT; ++j) b[j] = (__m512bh)_mm512_load_si512(from + 64 * j);
    }
};

struct StepCode8 : StepPairs {
    static constexpr int64_t BYTES = 128;
    static constexpr int WIDE_ROWS = TILE_ROWS - 1;  // the tables take registers
    template <int FIRST, int COUNT> BATON_STEP void load(const char* panel, int64_t step, const Codebook* book) {
        const __m512i low0 = _mm512_load_si512(book->low), low1 = _mm512_load_si512(book->low + 64);
        const __m512i high0 = _mm512_load_si512(book->high), high1 = _mm512_load_si512(book->high + 64);
        const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
        const __m512i special = _mm512_load_si512(book->high_of_0x80);
        for (int j = FIRST / 2; j < (FIRST + COUNT) / 2; ++j) {
            const __m512i codes = _mm512_load_si512(panel + step * 128 + 64 * j);
            const __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
            __m512i high = _mm512_permutex2var_epi8(high0, codes, high1);
            high = _mm512_ternarylogic_epi32(high, codes, sign, 0xf8);  // high | (codes & sign)
            high = _mm512_mask_mov_epi8(high, _mm512_cmpeq_epi8_mask(codes, sign), special);
            b[2 * j] = (__m512bh)_mm512_unpacklo_epi8(low, high);
            b[2 * j + 1] = (__m512bh)_mm512_unpackhi_epi8(low, high);
        }
    }
};

struct StepCode4 : StepPairs {
    static constexpr int64_t BYTES = 64;
    template <int FIRST, int COUNT> BATON_STEP void load(const char* panel, int64_t step, const Codebook* book) {
        const __m512i table = _mm512_load_si512(book->nibble);
        const __m512i codes = _mm512_load_si512(panel + step * 64);
        for (int j = FIRST; j < FIRST + COUNT; ++j)
            b[j] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * j), table);
    }
};

// Vectors FIRST … FIRST + COUNT - 1 (of 16 columns) of: acc[r][c] (+)= sum over the steps. With KEEP the decoded
// weights are stored to `kept`, as bfloat16 steps: the first of several tiles does so for those after it. Decoding and
// products use different units of the processor, so it costs little beside the sums of all columns; beside those of
// half of them, which read each input twice, it takes longer. Tables are read anew after each store, for all that the
// compiler knows: that leaves registers for the sums of six rows.
template <int ROWS, typename Step, int FIRST, int COUNT, bool KEEP = false>
void dot_columns(const typename Step::Element* const* rows, const char* panel, int64_t steps, const Codebook* book,
                 float* acc, bool accumulate, Prefetch prefetch, char* kept = nullptr) {
    __m512 c[ROWS][COUNT];
    const typename Step::Element* a[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
        a[r] = rows[r];
#pragma GCC unroll 16
        for (int j = 0; j < COUNT; ++j)
            c[r][j] = accumulate ? _mm512_load_ps(acc + r * PANEL + 16 * (FIRST + j)) : _mm512_setzero_ps();
    }
    auto step = [&](int64_t s) __attribute__((always_inline)) {
        Step weights;
        weights.template load<FIRST, COUNT>(panel, s, book);
        if constexpr (KEEP)
            for (int j = FIRST; j < FIRST + COUNT; ++j)
                _mm512_store_si512(kept + s * 256 + 64 * j, (__m512i)weights.b[j]);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const auto x = Step::row(a[r], s);
#pragma GCC unroll 16
            for (int j = 0; j < COUNT; ++j) c[r][j] = Step::dot(c[r][j], x, weights.b[FIRST + j]);
        }
    };
    if (const char* ahead = prefetch.from; ahead && ROWS >= TILE_ROWS) {
        // So many rows leave no registers for addresses but this. And lines that are fetched as part of a step, not by
        // a loop over them, cost seven to ten rows of bfloat16 a tenth.
        int lines = prefetch.lines;
        asm("" : "+r"(lines));
        for (int64_t s = 0; s < steps; ++s) {
            step(s);
            for (int i = lines; i > 0; --i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        }
    } else if (ahead) {
        for (int64_t s = 0; s < steps; ++s) step(s), prefetch_step(prefetch, s);
    } else {
        for (int64_t s = 0; s < steps; ++s) step(s);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < COUNT; ++j) _mm512_store_ps(acc + r * PANEL + 16 * (FIRST + j), c[r][j]);
}

// acc[r][c] (+)= sum over the steps. `rows` point at the first k of the panel's first step.
//
// Up to WIDE_ROWS rows the registers hold sums of all columns. With more they hold those of half the columns:
// the halves take turns on blocks of steps small enough for the L1 cache, so that a panel is read from memory
// once; each half prefetches half of the next block.
template <int ROWS, typename Step>
void dot_tile(const typename Step::Element* const* rows, const char* panel, int64_t steps, const Codebook* book,
              float* acc, bool accumulate, Prefetch prefetch) {
    if (ROWS <= Step::WIDE_ROWS) return dot_columns<ROWS, Step, 0, 4>(rows, panel, steps, book, acc, accumulate, prefetch);
    constexpr int64_t BLOCK = 64;
    const typename Step::Element* a[ROWS];
    for (int64_t first = 0; first < steps; first += BLOCK) {
        const int64_t count = steps - first < BLOCK ? steps - first : BLOCK;
        const char* block = panel + first * Step::BYTES;
        const char* next = block + count * Step::BYTES;
        for (int r = 0; r < ROWS; ++r) a[r] = rows[r] + first * Step::K;
        const bool more = accumulate || first > 0;
        constexpr int LINES = Step::BYTES / 128;  // per step: half of what a step is; code4 has a line only
        dot_columns<ROWS, Step, 0, 2>(a, block, count, book, acc, more, {next, LINES ? LINES : 1});
        dot_columns<ROWS, Step, 2, 2>(a, block, count, book, acc, more, {next + count * LINES * 64, LINES});
    }
}

// The sums of a group never leave the registers; without the pragmas the compiler keeps them in memory. With KEEP the
// decoded weights are stored to `kept`, as bfloat16 steps.
template <int ROWS, typename Step = StepBF16, bool KEEP = false>
BATON_STEP inline void dot_groups(const bf16* const* rows, const char* block, const Groups& groups, float* total,
                                  bool accumulate, Prefetch prefetch, const Codebook* book = nullptr,
                                  char* __restrict kept = nullptr) {
    const bf16* a[ROWS];  // else each is read anew after what is stored to `kept`
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) a[r] = rows[r];
    for (int64_t g = 0; g < groups.count; ++g) {
        __m512 c[ROWS][4];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
            for (int j = 0; j < 4; ++j) c[r][j] = _mm512_setzero_ps();
        const auto step = [&](int64_t s) BATON_STEP {
            Step weights;
            weights.template load<0, 4>(block, s, book);
            if constexpr (KEEP)
                for (int j = 0; j < 4; ++j) _mm512_store_si512(kept + s * 256 + 64 * j, (__m512i)weights.b[j]);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const __m512bh x = Step::row(a[r], s);
#pragma GCC unroll 16
                for (int j = 0; j < 4; ++j) c[r][j] = Step::dot(c[r][j], x, weights.b[j]);
            }
        };
        const int64_t end = (g + 1) * groups.k / 2;
        int64_t s = g * groups.k / 2;
        for (; s + 4 <= end; s += 4) {  // groups are short: a jump for every step takes 3 % of the time
            if (prefetch.from)
                for (int i = 0; i < 4 * prefetch.lines; ++i)
                    __builtin_prefetch(prefetch.from + (s * prefetch.lines + i) * 64, 0, 2);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) step(s + i);
        }
        for (; s < end; ++s) step(s);
        if (groups.zeros)
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const __m512 sum = _mm512_set1_ps(groups.sums[r * groups.sums_stride + g]);
#pragma GCC unroll 16
                for (int j = 0; j < 4; ++j)
                    c[r][j] = _mm512_fnmadd_ps(_mm512_loadu_ps(groups.zeros + g * PANEL + 16 * j), sum, c[r][j]);
            }
        const bool adds = accumulate || g;
#pragma GCC unroll 16
        for (int j = 0; j < 4; ++j) {
            const __m512 scale = _mm512_loadu_ps(groups.scales + g * PANEL + 16 * j);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                float* to = total + r * PANEL + 16 * j;
                _mm512_store_ps(to, adds ? _mm512_fmadd_ps(scale, c[r][j], _mm512_load_ps(to))
                                         : _mm512_mul_ps(scale, c[r][j]));
            }
        }
    }
}

// One block of a coded panel to bfloat16.
template <typename Step>
void decode_steps(const char* panel, int64_t steps, const Codebook* book, char* to) {
    for (int64_t s = 0; s < steps; ++s) {
        Step weights;
        weights.template load<0, 4>(panel, s, book);
        for (int j = 0; j < 4; ++j) _mm512_store_si512(to + s * 256 + 64 * j, (__m512i)weights.b[j]);
    }
}

#elif !BATON_WIDE  // any processor: loops over the panel's columns, which compilers vectorise

inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

struct StepF32 {
    using Element = float;
    static constexpr int K = 1;
    float b[1][PANEL];
    void load(const char* panel, int64_t step, const Codebook*) {
        std::memcpy(b, panel + step * 256, 256);
    }
};

struct StepBF16 {
    using Element = bf16;
    static constexpr int K = 2;
    float b[2][PANEL];
    void load(const char* panel, int64_t step, const Codebook*) {
        const bf16* from = reinterpret_cast<const bf16*>(panel + step * 256);
        for (int c = 0; c < PANEL; ++c) b[0][c] = to_float(from[2 * c]), b[1][c] = to_float(from[2 * c + 1]);
    }
};

struct StepCode8 : StepBF16 {
    void load(const char* panel, int64_t step, const Codebook* book) {
        const uint8_t* from = reinterpret_cast<const uint8_t*>(panel + step * 128);
        for (int c = 0; c < PANEL; ++c)
            for (int p = 0; p < 2; ++p) b[p][c] = to_float(code8_value(*book, from[code8_position(c, p)]));
    }
};

struct StepCode4 : StepBF16 {
    void load(const char* panel, int64_t step, const Codebook* book) {
        const char* from = panel + step * 64;
        for (int c = 0; c < PANEL; ++c)
            for (int p = 0; p < 2; ++p) {
                uint16_t word;
                std::memcpy(&word, from + 2 * (2 * (c % 16) + p), 2);
                b[p][c] = to_float(book->nibble[(word >> (4 * (c / 16))) & 15]);
            }
    }
};

template <int ROWS, typename Step>
void dot_tile(const typename Step::Element* const* rows, const char* panel, int64_t steps,
              const Codebook* book, float* acc, bool accumulate, Prefetch) {
    if (!accumulate) std::memset(acc, 0, sizeof(float) * ROWS * PANEL);
    for (int64_t s = 0; s < steps; ++s) {
        Step weights;
        weights.load(panel, s, book);
        for (int r = 0; r < ROWS; ++r)
            for (int p = 0; p < Step::K; ++p) {
                const float x = to_float(rows[r][s * Step::K + p]);
                for (int c = 0; c < PANEL; ++c)
                    acc[r * PANEL + c] = multiply_add(x, weights.b[p][c], acc[r * PANEL + c]);
            }
    }
}

template <typename Step>
void decode_steps(const char* panel, int64_t steps, const Codebook* book, char* to) {
    for (int64_t s = 0; s < steps; ++s) {
        Step weights;
        weights.load(panel, s, book);
        bf16* out = reinterpret_cast<bf16*>(to + s * 256);
        for (int c = 0; c < PANEL; ++c)
            for (int p = 0; p < 2; ++p) out[2 * c + p] = to_bf16(weights.b[p][c]);
    }
}

#endif

}  // namespace baton
