// The products of attention: a few rows of queries (or weights) times one tile of keys (or values), which is
// packed so that sixteen results are neighbours.
//
// Everything is counted in *units* of four bytes: a float, or a pair of bfloat16 that one instruction
// multiplies and adds. A packed tile has `units` steps of PANEL columns. Each result is one chain of
// multiply-adds over the steps in order, by the same instruction however many rows and columns are
// computed with it: it does not depend on its company.
#pragma once

#include "kv.h"
#include "simd.h"

namespace baton::attention {

using unit = uint32_t;

constexpr int TILE_KEYS = 64;  // keys per tile; tiles start at multiples of it
#if BATON_SIMD512
constexpr int ROWS_MAX = 6, PANEL_VECTORS = 4;
#else
constexpr int ROWS_MAX = 2, PANEL_VECTORS = 2;
#endif
constexpr int PANEL = PANEL_VECTORS * LANES;

// --- how numbers are multiplied ---

struct Float32Products {
    static constexpr int PER_UNIT = 1;

    static BATON_INLINE f32x16 add(f32x16 sum, unit a, const unit* b) {
        float x;
        std::memcpy(&x, &a, 4);
        return multiply_add(splat(x), load_as<f32x16>(b), sum);
    }
    // Two vectors of numbers, as units.
    static BATON_INLINE void pack_row(unit* to, f32x16 first, f32x16 second) {
        std::memcpy(to, &first, sizeof first);
        std::memcpy(to + LANES, &second, sizeof second);
    }
};

#if BATON_BF16_PRODUCTS
struct Bf16Products {
    static constexpr int PER_UNIT = 2;

    static BATON_INLINE f32x16 add(f32x16 sum, unit a, const unit* b) {
        return _mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)),
                                (__m512bh)_mm512_loadu_si512(b));
    }
    static BATON_INLINE void pack_row(unit* to, f32x16 first, f32x16 second) {
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
    }
};
#endif

// c[r][j] = alpha[r] * c[r][j] + sum over s < units of a[r][s] * b[s][j]; without alpha c starts at 0.
struct Product {
    const unit* a;
    int64_t a_stride;
    const unit* b;  // steps are PANEL units apart
    int64_t units;
    float* c;
    int64_t c_stride;
    const float* alpha;
};

template <typename Products, int ROWS, int VECTORS> void multiply_tile(const Product& p) {
    f32x16 c[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v)
            c[r][v] = p.alpha ? load16(p.c + r * p.c_stride + v * LANES) * splat(p.alpha[r]) : f32x16{};
    for (int64_t s = 0; s < p.units; ++s) {
        const unit* b = p.b + s * PANEL;
        for (int r = 0; r < ROWS; ++r) {
            const unit a = p.a[r * p.a_stride + s];
            for (int v = 0; v < VECTORS; ++v) c[r][v] = Products::add(c[r][v], a, b + v * LANES);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) store16(p.c + r * p.c_stride + v * LANES, c[r][v]);
}

template <typename Products, int ROWS> void multiply_rows(const Product& p, int vectors) {
    if (vectors == 1) return multiply_tile<Products, ROWS, 1>(p);
    if (vectors == 2) return multiply_tile<Products, ROWS, 2>(p);
#if BATON_SIMD512
    if (vectors == 3) return multiply_tile<Products, ROWS, 3>(p);
    multiply_tile<Products, ROWS, 4>(p);
#endif
}

// rows <= ROWS_MAX, vectors <= PANEL_VECTORS.
template <typename Products> void multiply(const Product& p, int rows, int vectors) {
    switch (rows) {
        case 1: return multiply_rows<Products, 1>(p, vectors);
        case 2: return multiply_rows<Products, 2>(p, vectors);
#if BATON_SIMD512
        case 3: return multiply_rows<Products, 3>(p, vectors);
        case 4: return multiply_rows<Products, 4>(p, vectors);
        case 5: return multiply_rows<Products, 5>(p, vectors);
        case 6: return multiply_rows<Products, 6>(p, vectors);
#endif
    }
}

}  // namespace baton::attention
