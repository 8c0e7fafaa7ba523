// Keys and values from the pool's blocks into packed tiles.
#pragma once

#include "attention_tile.h"

namespace baton::attention {

template <typename Stored> const Stored* at(const char* row, int64_t column) {
    return reinterpret_cast<const Stored*>(row) + column;
}

// Sixteen units from column `column` of a row, of which the first `count` exist; the others are 0.
template <typename Products, typename Stored>
BATON_INLINE u32x16 load_units(const char* row, int64_t column, int64_t count) {
    const Stored* from = at<Stored>(row, column);
#if BATON_BF16_PRODUCTS
    if constexpr (Products::PER_UNIT == 2) {
        u32x16 units;
        if constexpr (std::is_same<Stored, bf16>::value) {
            const __mmask16 mask = static_cast<__mmask16>(count >= LANES ? 0xffff : (1u << count) - 1);
            const __m512i raw = _mm512_maskz_loadu_epi32(mask, from);
            std::memcpy(&units, &raw, sizeof units);
        } else {
            Products::pack_row(reinterpret_cast<unit*>(&units), load_floats(from, 2 * count),
                               load_floats(from + LANES, 2 * count - LANES));
        }
        return units;
    }
#endif
    return same_bits<u32x16>(load_floats(from, count));
}

// to[c * PANEL + r] = rows[r]'s unit c, for c < columns.
#if BATON_SIMD512
// turned[c]: in its lane r lane c of a[r], which is used up.
BATON_INLINE void turn_register(__m512i* a, __m512i* turned) {
    __m512i* const b = turned;
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // a[4 q + j] has in its lane l of four columns: column 4 l + j of rows 4 q … 4 q + 3.
    for (int j = 0; j < 4; ++j) {
        const __m512i even01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
        const __m512i odd01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        const __m512i even23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        const __m512i odd23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        b[j] = _mm512_shuffle_i32x4(even01, even23, 0x88);
        b[8 + j] = _mm512_shuffle_i32x4(even01, even23, 0xdd);
        b[4 + j] = _mm512_shuffle_i32x4(odd01, odd23, 0x88);
        b[12 + j] = _mm512_shuffle_i32x4(odd01, odd23, 0xdd);
    }
}

BATON_INLINE void store_transposed(unit* to, u32x16* rows, int64_t columns) {
    __m512i a[16], b[16];
    std::memcpy(a, rows, sizeof a);
    turn_register(a, b);
    if (columns >= 16)
        for (int c = 0; c < 16; ++c) _mm512_storeu_si512(to + c * PANEL, b[c]);
    else
        for (int c = 0; c < columns; ++c) _mm512_storeu_si512(to + c * PANEL, b[c]);
}
#else
#if BATON_SIMD256
BATON_INLINE void store_eight(unit* to, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }
#endif

BATON_INLINE void store_transposed(unit* to, const u32x16* rows, int64_t columns) {
#if BATON_SIMD256
    if (columns >= LANES) {
#pragma GCC unroll 2
        for (int r = 0; r < LANES; r += 8)
#pragma GCC unroll 2
            for (int c = 0; c < LANES; c += 8) {
                const char* from[8];
                for (int i = 0; i < 8; ++i) from[i] = reinterpret_cast<const char*>(rows + r + i) + c * 4;
                __m256i turned[8];
                turn_eight(from, turned);
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i) store_eight(to + (c + i) * PANEL + r, turned[i]);
            }
        return;
    }
#endif
    unit lanes[LANES][LANES];
    std::memcpy(lanes, rows, sizeof lanes);
    for (int64_t c = 0; c < (columns < LANES ? columns : LANES); ++c)
        for (int r = 0; r < LANES; ++r) to[c * PANEL + r] = lanes[r][c];
}
#endif

#if BATON_SIMD512 && !BATON_BF16_PRODUCTS
// Of sixteen keys WIDENED bfloat16 each from `column` on, as columns of floats: turned in pairs, then widened.
constexpr int64_t WIDENED = 32;
BATON_INLINE void store_widened(unit* to, const char* const* rows, int64_t column) {
    const __m512i upper = _mm512_set1_epi32(-65536);
    __m512i pairs[16], turned[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) pairs[i] = _mm512_loadu_si512(rows[i] + column * 2);
    turn_register(pairs, turned);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
        _mm512_storeu_si512(to + 2 * i * PANEL, _mm512_slli_epi32(turned[i], 16));
        _mm512_storeu_si512(to + (2 * i + 1) * PANEL, _mm512_and_si512(turned[i], upper));
    }
}
#elif BATON_SIMD256
constexpr int64_t WIDENED = 16;  // as above
BATON_INLINE void store_widened(unit* to, const char* const* rows, int64_t column) {
    const __m256i upper = _mm256_set1_epi32(-65536);
#pragma GCC unroll 2
    for (int r = 0; r < LANES; r += 8) {
        const char* from[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) from[i] = rows[r + i] + column * 2;
        __m256i pairs[8];
        turn_eight(from, pairs);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            store_eight(to + 2 * i * PANEL + r, _mm256_slli_epi32(pairs[i], 16));
            store_eight(to + (2 * i + 1) * PANEL + r, _mm256_and_si256(pairs[i], upper));
        }
    }
}
#endif

// Keys, as columns: panel p holds keys p * PANEL …; step u their unit u. `rows` has TILE_KEYS of them;
// those of the first `groups` groups of sixteen are packed. The first `filled` of `units` exist, others are 0.
template <typename Products, typename Stored>
void pack_keys(unit* to, const char* const* rows, int groups, int64_t units, int64_t filled, const Fetch& fetch) {
    const int64_t blocks = groups * ((units + LANES - 1) / LANES);
    const int64_t lines = (fetch.lines + blocks - 1) / blocks;
    int64_t done = 0;
    for (int g = 0; g < groups; ++g) {
        unit* panel = to + g / PANEL_VECTORS * (units * PANEL) + g % PANEL_VECTORS * LANES;
        for (int64_t u = 0; u < units; u += LANES) {
#if BATON_SIMD256 || (BATON_SIMD512 && !BATON_BF16_PRODUCTS)
            if constexpr (std::is_same<Stored, bf16>::value)
                if (units - u >= WIDENED && filled - u >= WIDENED) {
                    store_widened(panel + u * PANEL, rows + g * LANES, u);
                    for (int64_t end = done + WIDENED / LANES; done < end; ++done) fetch.lines_of(done, lines);
                    u += WIDENED - LANES;
                    continue;
                }
#endif
            u32x16 block[LANES];
            for (int r = 0; r < LANES; ++r)
                block[r] = load_units<Products, Stored>(rows[g * LANES + r], u * Products::PER_UNIT, filled - u);
            fetch.lines_of(done++, lines);
            store_transposed(panel + u * PANEL, block, units - u);
        }
    }
}

#if BATON_TILED_PAIRS
// to[r * to_stride + k] = from[k * columns + r], for sixteen k and the first `rows` of the columns, which are 4, 8 or 16.
BATON_INLINE void turn_sixteen(float* to, int64_t to_stride, const float* from, int columns, int rows) {
    if (columns > 4) {
        const __m512i at = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                              _mm512_set1_epi32(columns));
        for (int r = 0; r < rows; ++r) _mm512_storeu_ps(to + r * to_stride, _mm512_i32gather_ps(at, from + r, 4));
        return;
    }
    const __m512 a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + 16);
    const __m512 c = _mm512_loadu_ps(from + 32), d = _mm512_loadu_ps(from + 48);
    const __m512d ab_low = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
    const __m512d cd_low = _mm512_castps_pd(_mm512_unpacklo_ps(c, d)), cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
    // Lane l of each holds k = l, 4 + l, 8 + l, 12 + l.
    const __m512 turned[4] = {
        _mm512_castpd_ps(_mm512_unpacklo_pd(ab_low, cd_low)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab_low, cd_low)),
        _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high))};
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int r = 0; r < rows; ++r) _mm512_storeu_ps(to + r * to_stride, _mm512_permutexvar_ps(in_order, turned[r]));
}
#endif

// One step: the units of PER_UNIT keys (`row`, `row2`), 2 * LANES columns from `column` on, of which
// `count` exist.
template <typename Products, typename Stored>
BATON_INLINE void pack_value_columns(unit* to, const char* row, const char* row2, int64_t column, int64_t count) {
    const Stored* from = at<Stored>(row, column);
#if BATON_BF16_PRODUCTS
    if constexpr (Products::PER_UNIT == 2) {
        const Stored* from2 = at<Stored>(row2, column);
        __m512i first, second;  // 32 numbers of each key
        if constexpr (std::is_same<Stored, bf16>::value) {
            const __mmask32 mask = count >= 32 ? ~0u : (1u << count) - 1;
            first = _mm512_maskz_loadu_epi16(mask, from);
            second = _mm512_maskz_loadu_epi16(mask, from2);
        } else {
            Products::pack_row(reinterpret_cast<unit*>(&first), load_floats(from, count),
                               load_floats(from + LANES, count - LANES));
            Products::pack_row(reinterpret_cast<unit*>(&second), load_floats(from2, count),
                               load_floats(from2 + LANES, count - LANES));
        }
        _mm512_storeu_si512(to, _mm512_unpacklo_epi16(first, second));
        _mm512_storeu_si512(to + LANES, _mm512_unpackhi_epi16(first, second));
        return;
    }
#endif
    store16(to, load_floats(from, count));
    if (count > LANES) store16(to + LANES, load_floats(from + LANES, count - LANES));
}

// Values, as they lie: panel p holds columns p * PANEL …; step s the numbers of keys s * PER_UNIT …. Columns
// are in the order that `Products::in_order` undoes, in pairs of vectors.
// `rows` + `offset` are the first `keys`; a missing last one of a pair counts as zeros.
template <typename Products, typename Stored>
void pack_values(unit* to, const char* const* rows, int64_t offset, const char* zeros, int64_t keys, int64_t columns,
                 const Fetch& fetch) {
    constexpr int PER_UNIT = Products::PER_UNIT;
    const int64_t steps = (keys + PER_UNIT - 1) / PER_UNIT;
    const int64_t lines = (fetch.lines + steps - 1) / steps;
    constexpr int64_t PANEL_UNITS = TILE_KEYS / PER_UNIT * PANEL;
    for (int64_t s = 0; s < steps; ++s) {
        const char* row = rows[s * PER_UNIT] + offset;
        const char* row2 = s * PER_UNIT + 1 < keys ? rows[s * PER_UNIT + 1] + offset : zeros;
        fetch.lines_of(s, lines);
        for (int64_t c = 0; c < columns; c += 2 * LANES)
            pack_value_columns<Products, Stored>(to + c / PANEL * PANEL_UNITS + s * PANEL + c % PANEL, row, row2, c,
                                                 columns - c);
    }
}

}  // namespace baton::attention
