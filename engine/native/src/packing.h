// From rows in memory to panels.
//
// The inputs of one column lie far apart in a panel. So a few inputs of all columns are packed before the next ones: the
// places that they go to stay in the L1 cache.
//
// Included by matrix.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "matrix.h"
#include "quads.h"

namespace baton {

constexpr int64_t PACKED_K = BATON_FEW_SUMS ? 256 : 128;  // inputs of all columns at once: those of a strip are up to 32 KiB
constexpr int64_t ROWS_AHEAD = 2;  // that are fetched: the processor does not see which row comes next

template <typename T> void fetch_inputs(const Matrix* m, const T* rows, int64_t stride, int64_t row, int64_t first) {
    if (row >= m->n) return;
    const char* from = reinterpret_cast<const char*>(rows + row * stride + first);
    for (size_t at = 0; at < PACKED_K * sizeof(T); at += 64) __builtin_prefetch(from + at);
}

// Some inputs of a column: where they are, or a copy of them where some are not there, in whose place is `missing`.
template <typename T>
const T* some_inputs(const Matrix* m, const T* rows, int64_t stride, int64_t row, int64_t first, T missing, T* copy) {
    const T* from = rows + row * stride + first;
    if (row < m->n && first + PACKED_K <= m->k) return from;
    const int64_t present = row < m->n ? std::max<int64_t>(0, std::min(PACKED_K, m->k - first)) : 0;
    if (present) std::memcpy(copy, from, static_cast<size_t>(present) * sizeof(T));
    std::fill(copy + present, copy + PACKED_K, missing);
    return copy;
}

// Calls pack(column, inputs, first, count) for all inputs of a panel, those that fill up its last step included.
template <typename T, typename Pack>
void each_column(const Matrix* m, const T* rows, int64_t stride, int64_t panel, T missing, Pack&& pack) {
    const int64_t filled = m->steps * step_k(m->format);
    T copy[PACKED_K];
    for (int64_t first = 0; first < filled; first += PACKED_K)
        for (int64_t c = 0; c < PANEL; ++c) {
            fetch_inputs(m, rows, stride, panel * PANEL + c + ROWS_AHEAD, first);
            const T* inputs = some_inputs(m, rows, stride, panel * PANEL + c, first, missing, copy);
            pack(c, inputs, first, std::min(PACKED_K, filled - first));
        }
}

// Where a column's strip begins, of steps of `Place` for each column.
template <typename Place> Place* strip_of_column(const Matrix* m, int64_t panel, int64_t column) {
    return reinterpret_cast<Place*>(m->panels + panel * m->panel_bytes) + column / STRIP * m->steps * STRIP;
}

template <typename T> void pack_panel(Matrix* m, const T* weight, int64_t stride, int64_t panel) {
    using Place = uint32_t;  // of one float32, or of two bfloat16
    constexpr int64_t EACH = sizeof(Place) / sizeof(T);
    each_column(m, weight, stride, panel, T{0}, [&](int64_t c, const T* inputs, int64_t first, int64_t count) {
        Place* to = strip_of_column<Place>(m, panel, c) + first / EACH * STRIP + c % STRIP;
        for (int64_t s = 0; s < count / EACH; ++s) std::memcpy(to + s * STRIP, inputs + s * EACH, sizeof(Place));
    });
}

// What a panel holds of each byte: of a code of eight bits, or of an integer whose code is its sign and magnitude.
inline void packed_bytes(const Matrix* m, bool are_integers, uint8_t* packed) {
    for (int byte = 0; byte < 256; ++byte) {
        const int code = are_integers && byte > 0x80 ? 0x80 | (0x100 - byte) : byte;
        const int integer = code < 0x80 ? 0x80 + code : code == 0x80 ? 0 : 0x100 - code;  // the integer + 128
        packed[byte] = m->factors ? static_cast<uint8_t>(integer) : code8_packed(m->book, static_cast<uint8_t>(code));
    }
}

inline void pack_codes8(Matrix* m, const uint8_t* codes, bool are_integers, int64_t panel) {
    constexpr int64_t BYTES = strip_step_bytes(CODE8);
    uint8_t packed[256];
    packed_bytes(m, are_integers, packed);
    each_column(m, codes, m->k, panel, uint8_t{0}, [&](int64_t c, const uint8_t* inputs, int64_t first, int64_t count) {
        const int column = static_cast<int>(c % STRIP);
        uint8_t* to = reinterpret_cast<uint8_t*>(m->panels + panel * m->panel_bytes) +
                      (c / STRIP * m->steps + first / 2) * BYTES;
        uint8_t *even = to + code8_position(column, 0), *odd = to + code8_position(column, 1);
        for (int64_t s = 0; s < count / 2; ++s) {
            even[s * BYTES] = packed[inputs[2 * s]];
            odd[s * BYTES] = packed[inputs[2 * s + 1]];
        }
    });
}

#if BATON_FEW_SUMS
inline void pack_codes4(Matrix* m, const uint8_t* codes, int64_t panel, uint8_t code_of_zero) {
    uint8_t* panel_start = reinterpret_cast<uint8_t*>(m->panels + panel * m->panel_bytes);
    std::memset(panel_start, 0, static_cast<size_t>(m->panel_bytes));
    each_column(m, codes, m->k, panel, code_of_zero, [&](int64_t c, const uint8_t* inputs, int64_t first, int64_t count) {
        uint8_t* strip = panel_start + c / STRIP * m->steps * strip_step_bytes(CODE4);
        for (int64_t i = 0; i < count; ++i)
            strip[code4_byte(c % STRIP, first + i)] |=
                static_cast<uint8_t>((inputs[i] & 15) << code4_shift(first + i));
    });
}

// Codes whose values are sixteen integers in a row, in any order: the place of each code's value among them.
struct IntegerCodes {
    float least;
    uint8_t places[16];
    bool is_row;
};

inline IntegerCodes integer_codes(const bf16* values) {
    IntegerCodes found{to_float(values[0]), {}, true};
    for (int i = 1; i < 16; ++i) found.least = std::min(found.least, to_float(values[i]));
    unsigned seen = 0;
    for (int i = 0; i < 16 && found.is_row; ++i) {
        const float place = to_float(values[i]) - found.least;
        found.is_row = place >= 0 && place < 16 && place == std::floor(place);
        if (found.is_row) found.places[i] = static_cast<uint8_t>(place), seen |= 1u << found.places[i];
    }
    found.is_row = found.is_row && seen == 0xffff;
    return found;
}

// The codes of eight inputs, as a word of their places.
struct PlaceWords {
    const uint8_t* places;
    bool flips;  // whether each place is its code with the same bits turned over, as two's complement has it
    uint64_t turned;

    explicit PlaceWords(const uint8_t* of) : places(of), flips(true), turned(of[0] * 0x0101010101010101ull) {
        for (int code = 0; code < 16; ++code) flips = flips && of[code] == (code ^ of[0]);
    }

    uint32_t operator()(const uint8_t* codes) const {
        uint64_t bytes = 0;
        if (flips) {
            std::memcpy(&bytes, codes, 8);
            bytes = (bytes & 0x0f0f0f0f0f0f0f0full) ^ turned;
        } else {
            for (int i = 0; i < 8; ++i) bytes |= uint64_t{places[codes[i] & 15]} << 8 * i;
        }
        bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ffull;
        bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffull;
        return static_cast<uint32_t>(bytes | bytes >> 16);
    }
};

// What is missing has the first place, whatever its value: activations there are zeros.
inline void pack_lanes4(Matrix* m, const uint8_t* codes, const uint8_t* places, int64_t panel) {
    const PlaceWords word(places);
    const uint8_t missing = static_cast<uint8_t>(std::find(places, places + 16, 0) - places);
    each_column(m, codes, m->k, panel, missing, [&](int64_t c, const uint8_t* inputs, int64_t first, int64_t count) {
        uint32_t* to = strip_of_column<uint32_t>(m, panel, c) + first / 8 * STRIP + c % STRIP;
        for (int64_t s = 0; s < count / 8; ++s) to[s * STRIP] = word(inputs + 8 * s);
    });
}
#else
// A word holds the codes of four columns.
inline void pack_codes4(Matrix* m, const uint8_t* codes, int64_t panel, uint8_t code_of_zero) {
    uint16_t* to = reinterpret_cast<uint16_t*>(m->panels + panel * m->panel_bytes);
    uint8_t copies[4][PACKED_K];
    for (int64_t first = 0; first < m->steps * 2; first += PACKED_K)
        for (int64_t c = 0; c < 16; ++c) {
            const uint8_t* of[4];
            for (int j = 0; j < 4; ++j)
                of[j] = some_inputs(m, codes, m->k, panel * PANEL + c + 16 * j, first, code_of_zero, copies[j]);
            for (int64_t i = 0; i < std::min(PACKED_K, m->steps * 2 - first); ++i) {
                const unsigned word = (of[0][i] & 15u) | (of[1][i] & 15u) << 4 | (of[2][i] & 15u) << 8 | (of[3][i] & 15u) << 12;
                to[(first + i) / 2 * 32 + c * 2 + i % 2] = static_cast<uint16_t>(word);
            }
        }
}
#endif

// And minus the offset of activations times the sum of each column's weights, by group.
inline void pack_quads(Matrix* m, const int8_t* weight, int64_t panel) {
    uint32_t* to = reinterpret_cast<uint32_t*>(m->panels + panel * m->panel_bytes);
    each_column(m, weight, m->k, panel, int8_t{0}, [&](int64_t c, const int8_t* inputs, int64_t first, int64_t count) {
        for (int64_t s = 0; s < count / 4; ++s) std::memcpy(to + (first / 4 + s) * PANEL + c, inputs + 4 * s, 4);
    });
    for (int64_t c = 0; c < PANEL; ++c) {
        const int64_t row = panel * PANEL + c;
        for (int64_t g = 0; g < m->group_count; ++g) {
            int32_t sum = 0;  // of 2^17 inputs at most
            for (int64_t i = g * m->group_k; row < m->n && i < (g + 1) * m->group_k; ++i) sum += weight[row * m->k + i];
            m->offsets[(panel * m->group_count + g) * PANEL + c] = static_cast<int32_t>(-int64_t{BATON_QUAD_OFFSET} * sum);
        }
    }
}

}  // namespace baton
