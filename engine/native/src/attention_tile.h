// The products of attention: a few rows of queries (or weights) times one tile of keys (or values), which is
// packed so that sixteen results are neighbours.
//
// Everything is counted in *units* of four bytes: a float, or a pair of bfloat16 that one instruction
// multiplies and adds. A packed tile has `units` steps of PANEL columns. Each result is one chain of
// multiply-adds over the steps in order, by the same instruction however many rows and columns are
// computed with it: it does not depend on its company.
#pragma once

#include <algorithm>

#include "dot_amx.h"
#include "kv.h"
#include "simd.h"

namespace baton::attention {

using unit = uint32_t;

constexpr int TILE_KEYS = 64;  // keys per tile; tiles start at multiples of it
// bfloat16 by tiles of AMX (dot_amx.h).
#if BATON_AMX && BATON_BF16_PRODUCTS
#define BATON_TILED_PAIRS 1
#else
#define BATON_TILED_PAIRS 0
#endif
// A tile is as large as its sums fit into registers. More rows than a tile's are weighed at once where few fit.
#if BATON_SIMD512
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4, ROWS_MAX = TILE_ROWS, PANEL_VECTORS = 4;
#elif BATON_SIMD256
constexpr int TILE_ROWS = 3, TILE_VECTORS = 2, ROWS_MAX = 12, PANEL_VECTORS = 2;
#else
constexpr int TILE_ROWS = 3, TILE_VECTORS = 1, ROWS_MAX = 12, PANEL_VECTORS = 2;
#endif
constexpr int PANEL = PANEL_VECTORS * LANES;

// --- how numbers are multiplied ---

struct Float32Products {
    static constexpr int PER_UNIT = 1, ROWS = ROWS_MAX;
    static constexpr bool IS_TILED = false;

    using Vector = f32_register;

    static BATON_INLINE Vector load(const unit* from) { return loaded<Vector>(from); }
    static BATON_INLINE Vector same(unit a) { return splat_register(same_bits<float>(a)); }
    static BATON_INLINE f32_register add(f32_register sum, Vector a, Vector b) { return multiply_add(a, b, sum); }
    // Two vectors of sums over packed values, in the order of their columns.
    static BATON_INLINE void in_order(f32x16&, f32x16&) {}
    // Two vectors of numbers, as units.
    static BATON_INLINE void pack_row(unit* to, f32x16 first, f32x16 second) {
        store16(to, first);
        store16(to + LANES, second);
    }
};

#if BATON_BF16_PRODUCTS
struct Bf16Products {
    static constexpr bool IS_TILED = BATON_TILED_PAIRS;
    static constexpr int PER_UNIT = 2, ROWS = IS_TILED ? 32 : ROWS_MAX;

    using Vector = __m512i;

    static BATON_INLINE Vector load(const unit* from) { return _mm512_loadu_si512(from); }
    static BATON_INLINE Vector same(unit a) { return _mm512_set1_epi32(static_cast<int>(a)); }
    static BATON_INLINE f32x16 add(f32x16 sum, Vector a, Vector b) {
        return _mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
    // `pack_values` interleaves within quarters of a register.
    static BATON_INLINE void in_order(f32x16& a, f32x16& b) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        const __m512 x = (__m512)a, y = (__m512)b;
        a = _mm512_permutex2var_ps(x, first, y);
        b = _mm512_permutex2var_ps(x, second, y);
    }
    static BATON_INLINE void pack_row(unit* to, f32x16 first, f32x16 second) {
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
    }
};
#endif

// To the L2 cache where it was measured to be better (2), elsewhere to the L1 cache (3): a tile's keys and values, packed,
// fill that.
constexpr int FETCHED_TO = BATON_SIMD512 && !BATON_BF16_PRODUCTS ? 2 : 3;

// Data fetched into the cache while other data is computed: the memory of two groups of keys (or
// their values). Memory is read at full speed only if requests never cease.
struct Fetch {
    const char* from[2] = {nullptr, nullptr};  // null: nothing
    int64_t lines = 0;                          // of each

    BATON_INLINE void lines_of(int64_t part, int64_t per_part) const {
        const int64_t end = (part + 1) * per_part;
        for (int64_t i = part * per_part; i < (end < lines ? end : lines); ++i) {
            __builtin_prefetch(from[0] + i * 64, 0, FETCHED_TO);
            __builtin_prefetch(from[1] + i * 64, 0, FETCHED_TO);
        }
    }
};

// c[r][j] = alpha[r] * c[r][j] + sum over s < units of a[r][s] * b[s][j]; without alpha c starts at 0.
struct Product {
    const unit* a;
    int64_t a_stride;
    const unit* b;  // steps are PANEL units apart
    int64_t units;
    float* c;
    int64_t c_stride;
    const float* alpha;
    Fetch fetch;
};

// Without the pragmas the compiler passes sums through memory before and after the steps.
template <typename Products, int ROWS, int VECTORS> void multiply_tile(const Product& p) {
    constexpr int WIDTH = REGISTER_LANES, COLUMNS = VECTORS * LANES / WIDTH;
    f32_register c[ROWS][COLUMNS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < COLUMNS; ++v) {
            const f32_register before = loaded<f32_register>(p.c + r * p.c_stride + v * WIDTH);
            c[r][v] = p.alpha ? before * splat_register(p.alpha[r]) : f32_register{};
        }
    auto step = [&](int64_t s) __attribute__((always_inline)) {
        using Vector = typename Products::Vector;
        if constexpr (ROWS < COLUMNS) {  // of two factors the fewer stay in registers
            Vector a[ROWS];
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) a[r] = Products::same(p.a[r * p.a_stride + s]);
#pragma GCC unroll 16
            for (int v = 0; v < COLUMNS; ++v) {
                Vector b = Products::load(p.b + s * PANEL + v * WIDTH);
                pin(b);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r) c[r][v] = Products::add(c[r][v], a[r], b);
            }
        } else {
            Vector b[COLUMNS];
#pragma GCC unroll 16
            for (int v = 0; v < COLUMNS; ++v) {
                b[v] = Products::load(p.b + s * PANEL + v * WIDTH);
                pin(b[v]);
            }
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const Vector a = Products::same(p.a[r * p.a_stride + s]);
#pragma GCC unroll 16
                for (int v = 0; v < COLUMNS; ++v) c[r][v] = Products::add(c[r][v], a, b[v]);
            }
        }
    };
    int64_t s = 0;
    for (; s < std::min(p.units, p.fetch.lines); ++s) step(s), p.fetch.lines_of(s, 1);
    for (; s < p.units; ++s) step(s);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < COLUMNS; ++v) store_bits(p.c + r * p.c_stride + v * WIDTH, c[r][v]);
}

template <typename Products, int ROWS> BATON_INLINE void multiply_rows(Product p, int vectors) {
    for (; vectors > TILE_VECTORS; vectors -= TILE_VECTORS) {
        multiply_tile<Products, ROWS, TILE_VECTORS>(p);
        p.b += TILE_VECTORS * LANES, p.c += TILE_VECTORS * LANES, p.fetch = {};
    }
    if (vectors == 1) return multiply_tile<Products, ROWS, 1>(p);
#if BATON_SIMD512
    if (vectors == 3) return multiply_tile<Products, ROWS, 3>(p);
    if (vectors == 4) return multiply_tile<Products, ROWS, 4>(p);
#endif
#if BATON_SIMD512 || BATON_SIMD256
    multiply_tile<Products, ROWS, 2>(p);
#endif
}

template <typename Products> BATON_INLINE void multiply_tile_rows(const Product& p, int rows, int vectors) {
    switch (rows) {
        case 1: return multiply_rows<Products, 1>(p, vectors);
        case 2: return multiply_rows<Products, 2>(p, vectors);
#if BATON_SIMD512
        case 3: return multiply_rows<Products, 3>(p, vectors);
        case 4: return multiply_rows<Products, 4>(p, vectors);
        case 5: return multiply_rows<Products, 5>(p, vectors);
#endif
        default: return multiply_rows<Products, TILE_ROWS>(p, vectors);
    }
}

#if BATON_TILED_PAIRS
// All columns of the panel, so that an element's chain is the same whatever is wanted. Units: a multiple of 16.
inline void multiply_by_tiles(const Product& p, int rows) {
    for (int64_t s = 0; s < p.fetch.lines; ++s) p.fetch.lines_of(s, 1);
    for (int r = 0; p.alpha && r < rows; ++r)
        for (int v = 0; v < PANEL_VECTORS && p.alpha[r] != 1.0f; ++v) {
            float* c = p.c + r * p.c_stride + v * LANES;
            store16(c, load16(c) * splat(p.alpha[r]));
        }
    amx::dot(p.a, p.a_stride * 4, rows, reinterpret_cast<const char*>(p.b), p.units,
             p.alpha ? p.c : nullptr, p.c, p.c_stride * 4, {nullptr, 0});
}
#endif

// rows <= Products::ROWS, vectors <= PANEL_VECTORS.
template <typename Products> BATON_INLINE void multiply(Product p, int rows, int vectors) {
#if BATON_TILED_PAIRS
    if constexpr (Products::IS_TILED) return multiply_by_tiles(p, rows);
#endif
    for (int first = 0; first < rows; first += TILE_ROWS) {
        multiply_tile_rows<Products>(p, std::min(TILE_ROWS, rows - first), vectors);
        p.a += TILE_ROWS * p.a_stride, p.c += TILE_ROWS * p.c_stride, p.fetch = {};
        if (p.alpha) p.alpha += TILE_ROWS;
    }
}

// Any number of columns: panels are `panel_units` units apart.
template <typename Products> BATON_INLINE void multiply_panels(Product p, int rows, int vectors, int64_t panel_units) {
    for (; vectors > 0; vectors -= PANEL_VECTORS) {
        multiply<Products>(p, rows, std::min(PANEL_VECTORS, vectors));
        p.b += panel_units, p.c += PANEL;
        p.fetch.from[0] += p.units * 64, p.fetch.from[1] += p.units * 64;
        p.fetch.lines = std::max<int64_t>(0, p.fetch.lines - p.units);
    }
}

}  // namespace baton::attention
