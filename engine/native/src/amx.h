// The tile instructions of AMX: the processor's (BATON_AMX=1), or their definition in C++ (BATON_AMX=2), so that
// the very code which uses them can be tested on any processor.
//
// The definition follows Intel's Software Developer's Manual, volume 2 (TDPBF16PS, TILELOADD, TILESTORED,
// LDTILECFG): with bfloat16, the products of even and of odd elements are two chains of fused multiply-adds that
// begin at zero, their sum is added to the destination; denormals count as zero, in and out.
#pragma once

#include "runtime.h"

#ifndef BATON_AMX
#define BATON_AMX 0
#endif

#if BATON_AMX
namespace baton {

constexpr int TILE_DEPTH = 16;      // rows of a tile of weights: steps of four bytes over k
constexpr int TILE_HEIGHT = 16;     // rows of a tile of activations
constexpr int TILE_ROW_BYTES = 64;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "LDTILECFG reads 64 bytes");

}  // namespace baton
#endif

#if BATON_AMX == 1
#include <immintrin.h>
// Not `_tile_loadconfig`: with GCC 12 it says that eight of the 64 bytes are read, and stores to the others may come
// later.
#define BATON_TILE_CONFIG(config) asm volatile("ldtilecfg\t%0" : : "m"(*(config)))
#define BATON_TILE_RELEASE() _tile_release()
#define BATON_TILE_ZERO(tile) _tile_zero(tile)
#define BATON_TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define BATON_TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define BATON_TILE_BF16(sum, a, b) _tile_dpbf16ps(sum, a, b)
#define BATON_TILE_BYTES(sum, a, b) _tile_dpbusd(sum, a, b)
#elif BATON_AMX == 2
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace baton::tiles {

struct Tile {
    alignas(64) uint8_t row[TILE_HEIGHT][TILE_ROW_BYTES];
};
inline thread_local Tile tile[8];
inline thread_local TileConfig config;

inline void load_config(const TileConfig* from) {
    config = *from;
    std::memset(tile, 0, sizeof tile);
}

inline void load(int t, const void* from, int64_t stride) {
    std::memset(&tile[t], 0, sizeof(Tile));
    for (int r = 0; r < config.rows[t]; ++r)
        std::memcpy(tile[t].row[r], static_cast<const char*>(from) + r * stride, config.row_bytes[t]);
}

inline void store(int t, void* to, int64_t stride) {
    for (int r = 0; r < config.rows[t]; ++r)
        std::memcpy(static_cast<char*>(to) + r * stride, tile[t].row[r], config.row_bytes[t]);
}

// While it lives, denormals count as zero, in and out: tiles do so whatever the processor's mode is.
struct DenormalsAreZero {
#if defined(__SSE__)
    unsigned before = _mm_getcsr();
    DenormalsAreZero() { _mm_setcsr(0x9fc0); }  // and all exceptions masked, rounding to nearest even
    ~DenormalsAreZero() { _mm_setcsr(before); }
#endif
};

inline void widen_row(const uint8_t* row, float* even, float* odd) {
    for (int n = 0; n < 16; ++n) {
        uint32_t pair;
        std::memcpy(&pair, row + 4 * n, 4);
        const uint32_t low = pair << 16, high = pair & 0xffff0000u;
        std::memcpy(even + n, &low, 4);
        std::memcpy(odd + n, &high, 4);
    }
}

// Not inlined: no arithmetic may move out of the mode in which it belongs.
__attribute__((noinline)) inline void multiply_tiles(Tile& sums, const Tile& a, const Tile& b, int rows, int steps) {
    float even_b[TILE_DEPTH][16], odd_b[TILE_DEPTH][16];
    for (int k = 0; k < steps; ++k) widen_row(b.row[k], even_b[k], odd_b[k]);
    for (int m = 0; m < rows; ++m) {
        float even_a[16], odd_a[16], even[16] = {}, odd[16] = {}, total[16];
        widen_row(a.row[m], even_a, odd_a);
        for (int k = 0; k < steps; ++k)
            for (int n = 0; n < 16; ++n) {
                even[n] = __builtin_fmaf(even_a[k], even_b[k][n], even[n]);
                odd[n] = __builtin_fmaf(odd_a[k], odd_b[k][n], odd[n]);
            }
        std::memcpy(total, sums.row[m], sizeof total);
        for (int n = 0; n < 16; ++n) total[n] += even[n] + odd[n];
        std::memcpy(sums.row[m], total, sizeof total);
    }
}

// All sixteen columns, which every configuration of ours has.
inline void bf16_products(int sum, int a, int b) {
    const DenormalsAreZero mode;
    multiply_tiles(tile[sum], tile[a], tile[b], config.rows[sum], config.row_bytes[a] / 4);
}

// TDPBUSD: bytes of `a` have no sign, those of `b` have one, and sums go round at 32 bits.
inline void byte_products(int sum, int a, int b) {
    for (int m = 0; m < config.rows[sum]; ++m)
        for (int k = 0; k < config.row_bytes[a] / 4; ++k)
            for (int n = 0; n < 16; ++n) {
                uint32_t total;
                std::memcpy(&total, tile[sum].row[m] + 4 * n, 4);
                for (int i = 0; i < 4; ++i)
                    total += static_cast<uint32_t>(tile[a].row[m][4 * k + i] *
                                                   static_cast<int8_t>(tile[b].row[k][4 * n + i]));
                std::memcpy(tile[sum].row[m] + 4 * n, &total, 4);
            }
}

}  // namespace baton::tiles

#define BATON_TILE_CONFIG(config) ::baton::tiles::load_config(config)
#define BATON_TILE_RELEASE() ((void)0)
#define BATON_TILE_ZERO(t) std::memset(&::baton::tiles::tile[t], 0, sizeof(::baton::tiles::Tile))
#define BATON_TILE_LOAD(t, from, stride) ::baton::tiles::load(t, from, stride)
#define BATON_TILE_STORE(t, to, stride) ::baton::tiles::store(t, to, stride)
#define BATON_TILE_BF16(sum, a, b) ::baton::tiles::bf16_products(sum, a, b)
#define BATON_TILE_BYTES(sum, a, b) ::baton::tiles::byte_products(sum, a, b)
#endif
