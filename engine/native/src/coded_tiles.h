// Coded weights for tiles of AMX, decoded to bfloat16 while tiles multiply those that were decoded before.
//
// Weights in short groups are scaled before they are multiplied. If the sums of groups are scaled instead, they pass
// through memory once for each group, which takes as long as the products where a group has 32 inputs. So scale * code
// + offset is computed in half precision, as a part of the column's factor, which no weight of it reaches
// (Matrix::factors), and rounded to bfloat16. This changes a weight by up to 1.3 * 2^-8 of itself and 2^-11 of the
// column's largest; a weight of zero becomes 2^-15 of the factor.
#pragma once

#include <algorithm>

#include "dot_amx.h"
#include "matrix.h"

#if BATON_AMX
namespace baton::amx {

constexpr int QUARTERS = 4;  // of the sixteen steps that are a tile
constexpr int QUARTER_STEPS = TILE_DEPTH / QUARTERS;

// Steps of a panel as their codes say, without scales. Tiles are filled up with zeros.
template <typename Step> class PlainSteps {
  public:
    PlainSteps(const Matrix& m, int64_t panel)
        : codes_(m.panels + panel * m.panel_bytes), book_(&m.book), step_bytes_(step_bytes(m.format)),
          steps_(m.steps) {}

    BATON_INLINE void begin(int64_t tile) { first_ = tile * TILE_DEPTH; }

    // Quarter `quarter` of the tile that was begun.
    BATON_INLINE void decode(int quarter, char* tile) const {
        const int64_t first = first_ + quarter * QUARTER_STEPS;
        const int64_t count = std::clamp<int64_t>(steps_ - first, 0, QUARTER_STEPS);
        char* const to = tile + quarter * QUARTER_STEPS * STEP_BYTES;
        decode_steps<Step>(codes_ + first * step_bytes_, count, book_, to);
        if (count < QUARTER_STEPS)
            std::memset(to + count * STEP_BYTES, 0, static_cast<size_t>(QUARTER_STEPS - count) * STEP_BYTES);
    }

  private:
    const char* codes_;
    const Codebook* book_;
    int64_t step_bytes_, steps_, first_ = 0;
};

#if BATON_SCALED
// Steps of a panel with the scales and offsets of their groups, for a matrix that has factors.
template <int FORMAT> class ScaledSteps {
  public:
    ScaledSteps(const Matrix& m, int64_t panel)
        : codes_(m.panels + panel * m.panel_bytes), scales_(m.scales + panel * m.group_count * PANEL),
          zeros_(m.zeros ? m.zeros + panel * m.group_count * PANEL : nullptr),
          inverses_(m.factors + (m.panel_count + panel) * PANEL), group_tiles_(m.group_k / (2 * TILE_DEPTH)),
          table_(_mm512_loadu_si512(m.book.halves)), zero_factor_(_mm512_set1_ps(-1.0f / m.book.halves_unit)) {}

    BATON_INLINE void begin(int64_t tile) {
        from_ = codes_ + tile * TILE_DEPTH * step_bytes(FORMAT);
        const int64_t group = tile / group_tiles_ * PANEL;
        for (int j = 0; j < VECTORS; ++j) {
            const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(scales_ + group + 16 * j),
                                               _mm512_loadu_ps(inverses_ + 16 * j));
            scale_[j] = twice(scale);
            offset_[j] = _mm512_setzero_ph();
            if (!zeros_) continue;
            const __m512 zero = _mm512_mul_ps(_mm512_loadu_ps(zeros_ + group + 16 * j), zero_factor_);
            offset_[j] = twice(_mm512_mul_ps(scale, zero));
        }
    }

    BATON_INLINE void decode(int quarter, char* tile) const {
        const char* from = from_ + quarter * QUARTER_STEPS * step_bytes(FORMAT);
        char* to = tile + quarter * QUARTER_STEPS * STEP_BYTES;
        for (int s = 0; s < QUARTER_STEPS; ++s, from += step_bytes(FORMAT), to += STEP_BYTES) {
            __m512h code[VECTORS];
            read(from, code);
            for (int j = 0; j < VECTORS; ++j)
                _mm512_store_si512(to + 64 * j, rounded(_mm512_fmadd_ph(code[j], scale_[j], offset_[j])));
        }
    }

  private:
    static constexpr int VECTORS = PANEL / 16;  // of sixteen columns and two inputs of each

    // Sixteen numbers, each for both inputs of its column.
    static BATON_INLINE __m512h twice(__m512 x) {
        alignas(64) static constexpr int16_t PLACES[32] = {0, 0, 1, 1, 2,  2,  3,  3,  4,  4,  5,  5,  6,  6,  7,  7,
                                                           8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15};
        const __m512i halves = _mm512_castsi256_si512(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
        return (__m512h)_mm512_permutexvar_epi16(_mm512_load_si512(PLACES), halves);
    }

    // Codes of a step, in units of `halves_unit`.
    BATON_INLINE void read(const char* from, __m512h* code) const {
        if constexpr (FORMAT == CODE4) {
            const __m512i codes = _mm512_load_si512(from);
            for (int j = 0; j < VECTORS; ++j)
                code[j] = (__m512h)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * j), table_);
        } else {
            const __m512i eight = _mm512_set1_epi8(0x48);  // before the eight bits u: 8 + u / 128
            const __m512h nine = (__m512h)_mm512_set1_epi16(0x4880);
            for (int j = 0; j < VECTORS / 2; ++j) {
                const __m512i codes = _mm512_load_si512(from + 64 * j);
                code[2 * j] = _mm512_sub_ph((__m512h)_mm512_unpacklo_epi8(codes, eight), nine);
                code[2 * j + 1] = _mm512_sub_ph((__m512h)_mm512_unpackhi_epi8(codes, eight), nine);
            }
        }
    }

    // To the nearest bfloat16, halves away from zero. Magnitudes are below 2, so that an exponent has four bits at most
    // and the three that a bfloat16's has before them are the same for all.
    static BATON_INLINE __m512i rounded(__m512h x) {
        const __m512i shifted = _mm512_srai_epi16(_mm512_add_epi16((__m512i)x, _mm512_set1_epi16(4)), 3);
        const __m512i kept = _mm512_set1_epi16(static_cast<int16_t>(0x87ff)), exponent = _mm512_set1_epi16(0x3800);
        return _mm512_ternarylogic_epi32(shifted, kept, exponent, 0xea);  // shifted & kept | exponent
    }

    const char* codes_;
    const float* scales_;
    const float* zeros_;
    const float* inverses_;
    int64_t group_tiles_;
    __m512i table_;
    __m512 zero_factor_;
    const char* from_ = nullptr;
    __m512h scale_[VECTORS], offset_[VECTORS];
};
#endif

// Steps from a tile on, as many tiles as there are to decode.
template <typename Steps> void decode_tiles(Steps steps, int64_t first, int64_t count, char* to) {
    for (int64_t t = first; t < first + count; ++t, to += TILE_DEPTH * STEP_BYTES) {
        steps.begin(t);
        for (int q = 0; q < QUARTERS; ++q) steps.decode(q, to);
    }
}

// Products of up to sixteen rows and a whole panel, whose tiles are decoded one ahead. The sums of every `group_tiles`
// tiles are those of a group: they are in `sums` when `on_group` is called.
template <typename Steps, typename OnGroup>
void dot_few_coded(const char* a, int64_t a_stride, int rows, Steps steps, int64_t tiles, int64_t group_tiles,
                   char* sums, int64_t c_stride, Fetched fetched, OnGroup&& on_group) {
    alignas(64) char decoded[2][TILE_DEPTH * STEP_BYTES];
    const int quarter = fetched.lines / QUARTERS;
    decode_tiles(steps, 0, 1, decoded[0]);
    settle_memory();
    configure(rows, 0);
    const auto multiply = [&](int64_t t, auto has_next) __attribute__((always_inline)) {
        const char* b = decoded[t % 2];
        char* const next = decoded[(t + 1) % 2];
        const int64_t done = t * fetched.lines;
        const auto meanwhile = [&](int q) __attribute__((always_inline)) {
            if constexpr (has_next.value) steps.decode(q, next);
            fetch_lines(fetched, done, q * quarter, (q + 1) * quarter);
        };
        if constexpr (has_next.value) steps.begin(t + 1);
        BATON_TILE_LOAD(4, a + t * TILE_ROW_BYTES, a_stride);
        BATON_TILE_LOAD(5, b, STEP_BYTES);
        BATON_TILE_BF16(0, 4, 5);
        meanwhile(0);
        BATON_TILE_LOAD(6, b + 64, STEP_BYTES);
        BATON_TILE_BF16(1, 4, 6);
        meanwhile(1);
        BATON_TILE_LOAD(7, b + 128, STEP_BYTES);
        BATON_TILE_BF16(2, 4, 7);
        meanwhile(2);
        BATON_TILE_LOAD(5, b + 192, STEP_BYTES);
        BATON_TILE_BF16(3, 4, 5);
        meanwhile(3);
        settle_memory();
    };
    for (int64_t first = 0, group = 0; first < tiles; first += group_tiles, ++group) {
        const int64_t end = std::min(first + group_tiles, tiles);
        BATON_TILE_ZERO(0);
        BATON_TILE_ZERO(1);
        BATON_TILE_ZERO(2);
        BATON_TILE_ZERO(3);
        for (int64_t t = first; t < std::min(end, tiles - 1); ++t) multiply(t, std::true_type());
        if (end == tiles) multiply(tiles - 1, std::false_type());
        BATON_TILE_STORE(0, sums, c_stride);
        BATON_TILE_STORE(1, sums + 64, c_stride);
        BATON_TILE_STORE(2, sums + 128, c_stride);
        BATON_TILE_STORE(3, sums + 192, c_stride);
        settle_memory();
        on_group(group);
    }
}

}  // namespace baton::amx
#endif
