// Making matrices: from rows in memory to panels.
#include "matrix.h"

#include "packing.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace baton {
namespace {

constexpr size_t HUGE_PAGE = size_t{2} << 20;
constexpr size_t ARENA_BYTES = size_t{64} << 20;

// Memory of panels: large stretches in huge pages, filled in the order of packing. Weights are read from end to
// end at every step: huge pages spare the address translation, and what is prefetched beyond a matrix's end is
// the start of the one that was packed next, most likely the next to be read.
struct Arena {
    char* start;
    void* mapped;
    size_t mapped_bytes, bytes, used, live;
};
std::vector<Arena*> arenas;
std::mutex arenas_mutex;

Arena* new_arena(size_t bytes) {
    const size_t mapped_bytes = bytes + HUGE_PAGE;
    void* mapped = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    const uintptr_t start = (reinterpret_cast<uintptr_t>(mapped) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
#if defined(MADV_HUGEPAGE)
    madvise(reinterpret_cast<void*>(start), bytes, MADV_HUGEPAGE);
#endif
    return new Arena{reinterpret_cast<char*>(start), mapped, mapped_bytes, bytes, 0, 0};
}

char* take_panels(size_t bytes, Arena** owner) {
    bytes = (bytes + 63) / 64 * 64;
    std::lock_guard<std::mutex> lock(arenas_mutex);
    Arena* arena = arenas.empty() ? nullptr : arenas.back();
    if (!arena || arena->used + bytes > arena->bytes) {
        const size_t size = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        if (!(arena = new_arena(size > ARENA_BYTES ? size : ARENA_BYTES))) return nullptr;
        arenas.push_back(arena);
    }
    char* memory = arena->start + arena->used;
    arena->used += bytes, ++arena->live;
    *owner = arena;
    return memory;
}

void give_panels_back(Arena* arena) {
    std::lock_guard<std::mutex> lock(arenas_mutex);
    if (!arena || --arena->live > 0) return;
    arenas.erase(std::find(arenas.begin(), arenas.end(), arena));
    munmap(arena->mapped, arena->mapped_bytes);
    delete arena;
}

// What is packed from here on begins a stretch of its own, so that the matrices before it can be moved out of
// memory whole. Pages behind the last matrix are given back.
void end_arena() {
    std::lock_guard<std::mutex> lock(arenas_mutex);
    if (arenas.empty()) return;
    Arena* arena = arenas.back();
    const uintptr_t page = 4096, used = reinterpret_cast<uintptr_t>(arena->start + arena->used);
    const uintptr_t end = reinterpret_cast<uintptr_t>(arena->mapped) + arena->mapped_bytes;
    const uintptr_t kept = (used + page - 1) / page * page;
    if (kept < end) {
        munmap(reinterpret_cast<void*>(kept), end - kept);
        arena->mapped_bytes -= end - kept;
    }
    arena->bytes = arena->used;
}

char* allocate(size_t bytes) { return static_cast<char*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64)); }

float* allocate_floats(int64_t count) {
    return reinterpret_cast<float*>(allocate(static_cast<size_t>(count) * sizeof(float)));
}

// Frees what moves with the matrix, unless it lies in somebody else's memory.
void free_sections(Matrix* m) {
    if (m->is_placed) return;
    give_panels_back(static_cast<Arena*>(m->arena));
    std::free(m->scales);
    std::free(m->zeros);
    std::free(m->factors);
}

void destroy(Matrix* m) {
    if (!m) return;
    free_sections(m);
    std::free(m->bias);
    std::free(m->offsets);
    std::free(m->order);
    m->~Matrix();
    std::free(m);
}

Matrix* create(int format, int64_t n, int64_t k, const float* bias) {
    Matrix* m = new (allocate(sizeof(Matrix))) Matrix{};
    m->format = format, m->n = n, m->k = k;
    m->panel_count = (n + PANEL - 1) / PANEL;
    m->steps = (k + step_k(format) - 1) / step_k(format);
    // Tiles take sixteen steps at once; coded panels are filled up where they are decoded.
    if (BATON_AMX && (format == DENSE_BF16 || format == QUAD8)) m->steps = (m->steps + 15) / 16 * 16;
    if (BATON_FEW_SUMS && format == CODE4) m->steps = (m->steps + 1) / 2 * 2;  // two of them share their bytes
    m->panel_bytes = m->steps * step_bytes(format);
    m->group_count = 1, m->group_k = k;
    Arena* arena = nullptr;
    m->panels = take_panels(static_cast<size_t>(m->panel_count * m->panel_bytes), &arena);
    m->arena = arena;
    bool complete = m->panels != nullptr;
    if (bias && complete) {
        m->bias = allocate_floats(m->panel_count * PANEL);
        complete = m->bias != nullptr;
        for (int64_t i = 0; complete && i < m->panel_count * PANEL; ++i) m->bias[i] = i < n ? bias[i] : 0.0f;
    }
    if (complete) return m;
    destroy(m);
    return nullptr;
}

// [n][groups] to [panel][groups][PANEL]
float* pack_groups(const Matrix* m, const float* values) {
    float* to = allocate_floats(m->panel_count * m->group_count * PANEL);
    for (int64_t p = 0; to && p < m->panel_count; ++p)
        for (int64_t g = 0; g < m->group_count; ++g)
            for (int64_t c = 0; c < PANEL; ++c) {
                const int64_t row = p * PANEL + c;
                to[(p * m->group_count + g) * PANEL + c] = row < m->n ? values[row * m->group_count + g] : 0.0f;
            }
    return to;
}

#if BATON_SCALED
// Sums of larger groups are scaled themselves, which takes less time where few rows are multiplied.
constexpr int64_t SCALED_GROUP_MAX = 64;
// Zeros beyond this many times the largest code would make offsets that are large beside the weights' differences.
constexpr float ZERO_MAX = 2.0f;

// Factors for a matrix whose weights are scaled before they are multiplied: one of integers or of codes of four bits, in
// short groups of whole tiles, with finite scales. False: no memory.
bool add_factors(Matrix* m) {
    const bool is_whole = m->group_k % 32 == 0 && m->group_count * m->group_k == m->k;
    if (m->group_count == 1 || m->group_k > SCALED_GROUP_MAX || !is_whole || (m->format == CODE8 && !m->book.is_integer)) return true;
    float low = -128, high = 127;
    if (m->format == CODE4) {
        low = *std::min_element(m->book.wide, m->book.wide + 16);
        high = *std::max_element(m->book.wide, m->book.wide + 16);
        int exponent;
        std::frexp(std::max({-low, high, 0x1p-14f}), &exponent);
        m->book.halves_unit = std::ldexp(1.0f, exponent);
        for (int i = 0; i < 32; ++i)
            m->book.halves[i] = _cvtss_sh(m->book.wide[i % 16] / m->book.halves_unit, _MM_FROUND_TO_NEAREST_INT);
    } else {
        m->book.halves_unit = 128;
    }
    const int64_t columns = m->panel_count * PANEL;
    float* const factors = allocate_floats(2 * columns);
    if (!factors) return false;
    for (int64_t i = 0; i < columns; ++i) {
        float most = 0x1p-100f;
        for (int64_t g = 0; g < m->group_count; ++g) {
            const int64_t at = (i / PANEL * m->group_count + g) * PANEL + i % PANEL;
            const float zero = m->zeros ? m->zeros[at] : 0.0f;
            const float largest = std::fabs(m->scales[at]) * std::max(std::fabs(high - zero), std::fabs(low - zero));
            if (!(std::fabs(zero) <= ZERO_MAX * m->book.halves_unit && largest < 0x1p100f)) {
                std::free(factors);
                return true;
            }
            most = std::max(most, largest);
        }
        int exponent;
        std::frexp(most, &exponent);
        factors[i] = std::ldexp(1.0f, exponent);
        factors[columns + i] = m->book.halves_unit / factors[i];
    }
    m->factors = factors;
    return true;
}
#endif

void fill_book(Codebook& book, int format, const bf16* values) {
    if (format == CODE4 || format == LANES4) {
        for (int i = 0; i < 32; ++i) {
            book.nibble[i] = values[i % 16];
            book.nibble_low[i] = static_cast<uint8_t>(values[i % 16] & 0xff);
            book.nibble_high[i] = static_cast<uint8_t>(values[i % 16] >> 8);
        }
        for (int i = 0; i < 16; ++i) book.wide[i] = to_float(values[i]);
        return;
    }
    book.is_integer = to_float(values[128]) == -128.0f;
    for (int i = 0; i < 128; ++i) {
        book.is_integer = book.is_integer && to_float(values[i]) == static_cast<float>(i);
        book.low[i] = static_cast<uint8_t>(values[i] & 0xff);
        book.high[i] = static_cast<uint8_t>(values[i] >> 8);
    }
    std::memset(book.high_of_0x80, values[128] >> 8, sizeof(book.high_of_0x80));
}

}  // namespace
}  // namespace baton

using namespace baton;

// weight [n, k] with rows `stride` elements apart, of `dtype`; bias [n] or null. Null: no memory.
BATON_API void* baton_matrix_dense(const void* weight, int32_t dtype, int64_t n, int64_t k, int64_t stride,
                                   const float* bias) {
    Matrix* m = create(dtype == F32 ? DENSE_F32 : DENSE_BF16, n, k, bias);
    if (!m) return nullptr;
    parallel_for(m->panel_count, [&](int64_t panel, int) {
        if (dtype == F32)
            pack_panel(m, static_cast<const float*>(weight), stride, panel);
        else
            pack_panel(m, static_cast<const bf16*>(weight), stride, panel);
    });
    return m;
}

// codes [n, k], one a byte. bits = 8: values are 128 magnitudes and the value of code 0x80; bits = -8: the same, and
// instead of codes there are the integers themselves, which the values have to be; bits = 4: the values of the 16 codes,
// which are the lower bits. scales, zeros (or null): [n, groups], group g being columns g * group_k …; group_k
// is even. order [k] or null.
BATON_API void* baton_matrix_coded(const uint8_t* codes, int32_t bits, int64_t n, int64_t k, const bf16* values,
                                   int64_t group_k, const float* scales, const float* zeros,
                                   const int32_t* order, const float* bias) {
    int format = bits == 4 ? CODE4 : CODE8;
#if BATON_FEW_SUMS
    // No word of eight codes belongs to two groups.
    const IntegerCodes integers = bits == 4 ? integer_codes(values) : IntegerCodes{};
    if (integers.is_row && (group_k >= k || group_k % step_k(LANES4) == 0)) format = LANES4;
#endif
    Matrix* m = create(format, n, k, bias);
    if (!m) return nullptr;
    m->group_k = group_k;
    m->group_count = (k + group_k - 1) / group_k;
#if BATON_FEW_SUMS
    if (format == LANES4) m->code_offset = integers.least;
#endif
    fill_book(m->book, m->format, values);
    uint8_t code_of_zero = 0;
    for (int i = 0; bits == 4 && i < 16; ++i)
        if (values[i] == 0) code_of_zero = static_cast<uint8_t>(i);
    m->scales = pack_groups(m, scales);
    if (zeros) m->zeros = pack_groups(m, zeros);
    if (order && (m->order = reinterpret_cast<int32_t*>(allocate(static_cast<size_t>(k) * 4))))
        std::memcpy(m->order, order, static_cast<size_t>(k) * 4);
    if (!m->scales || (zeros && !m->zeros) || (order && !m->order)) {
        destroy(m);
        return nullptr;
    }
    if (zeros && m->code_offset != 0) {
        for (int64_t i = 0; i < m->panel_count * m->group_count * PANEL; ++i) m->zeros[i] -= m->code_offset;
        m->code_offset = 0;
    }
#if BATON_SCALED
    if (!add_factors(m)) {
        destroy(m);
        return nullptr;
    }
#endif
    parallel_for(m->panel_count, [&](int64_t panel, int) {
#if BATON_FEW_SUMS
        if (format == LANES4) return pack_lanes4(m, codes, integers.places, panel);
#endif
        if (bits == 4)
            pack_codes4(m, codes, panel, code_of_zero);
        else
            pack_codes8(m, codes, bits < 0, panel);
    });
    return m;
}

// Weights [n, k] of 8 bits, whose products round their activations to 8 bits per row. scales, zeros (or null):
// [n, groups], of group_k columns each: all of k, or a divisor of k and multiple of 4. k is at most 2^17, so that sums
// of a group fit into 32 bits. order [k] or null.
BATON_API void* baton_matrix_quads(const int8_t* weight, int64_t n, int64_t k, int64_t group_k, const float* scales,
                                   const float* zeros, const int32_t* order, const float* bias) {
    Matrix* m = create(QUAD8, n, k, bias);
    if (!m) return nullptr;
    m->group_k = group_k;
    m->group_count = k / group_k;
    m->scales = pack_groups(m, scales);
    if (zeros) m->zeros = pack_groups(m, zeros);
    m->offsets = reinterpret_cast<int32_t*>(allocate_floats(m->panel_count * m->group_count * PANEL));
    if (order && (m->order = reinterpret_cast<int32_t*>(allocate(static_cast<size_t>(k) * 4))))
        std::memcpy(m->order, order, static_cast<size_t>(k) * 4);
    if (!m->scales || (zeros && !m->zeros) || !m->offsets || (order && !m->order)) {
        destroy(m);
        return nullptr;
    }
    parallel_for(m->panel_count, [&](int64_t panel, int) { pack_quads(m, weight, panel); });
    return m;
}

// The memory that may be elsewhere: panels, scales, zeros and factors, with their sizes; null and 0 for what there is
// not.
BATON_API void baton_matrix_sections(const void* matrix, const void** starts, int64_t* sizes) {
    const Matrix* m = static_cast<const Matrix*>(matrix);
    const int64_t group_bytes = m->panel_count * m->group_count * PANEL * 4;
    starts[0] = m->panels, sizes[0] = m->panel_count * m->panel_bytes;
    starts[1] = m->scales, sizes[1] = m->scales ? group_bytes : 0;
    starts[2] = m->zeros, sizes[2] = m->zeros ? group_bytes : 0;
    starts[3] = m->factors, sizes[3] = m->factors ? 2 * m->panel_count * PANEL * 4 : 0;
}

// Use copies of all sections: section j of matrix i is at base + offsets[4 i + j]. What the matrices had of their
// own is freed the first time.
BATON_API void baton_matrices_place(void* const* matrices, int64_t count, char* base, const int64_t* offsets) {
    for (int64_t i = 0; i < count; ++i) {
        Matrix* m = static_cast<Matrix*>(matrices[i]);
        const int64_t* at = offsets + 4 * i;
        free_sections(m);
        m->is_placed = true;
        m->panels = base + at[0];
        if (m->scales) m->scales = reinterpret_cast<float*>(base + at[1]);
        if (m->zeros) m->zeros = reinterpret_cast<float*>(base + at[2]);
        if (m->factors) m->factors = reinterpret_cast<float*>(base + at[3]);
    }
}

BATON_API void baton_end_arena() { end_arena(); }

BATON_API void baton_matrix_free(void* matrix) { destroy(static_cast<Matrix*>(matrix)); }

// As `Format`: how the weights lie.
BATON_API int32_t baton_matrix_format(const void* matrix) { return static_cast<const Matrix*>(matrix)->format; }

BATON_API int64_t baton_matrix_bytes(const void* matrix) {
    const Matrix* m = static_cast<const Matrix*>(matrix);
    const int64_t per_group = (m->scales ? 4 : 0) + (m->zeros ? 4 : 0) + (m->offsets ? 4 : 0);
    return m->panel_count * (m->panel_bytes + PANEL * (per_group * m->group_count + (m->bias ? 4 : 0) + (m->factors ? 8 : 0)));
}
