// Products of rows and packed matrices, shared out over the threads.
//
// A task is a chunk of rows times a range of panels. Within it, for each panel, tiles of up to TILE_ROWS rows
// run over k one after another; where k is large, over a part of it for several panels, then over the next part.
// Neither the cutting into chunks, tiles and parts nor the number of threads changes the order in which an element is
// summed.
#include <algorithm>

#include "coded_tiles.h"
#include "dot_amx.h"
#include "matrix.h"
#include "quads.h"
#include "vmath.h"

namespace baton {
namespace {

enum ScratchSlot { ACC, TOTAL, UP, DECODED, WIDENED, PREPARED, SUMS, WIDE_OUT, FINISHED };
static_assert(FINISHED < SCRATCH_SLOTS, "one place for each");

// Of activations: these and a panel stay in the L2 cache, of which every processor with AMX has 2 MiB a core, and Intel's
// servers with AVX512 before them 1 MiB or more. Those of codes with AVX2 may be more.
constexpr int64_t CHUNK_BYTES = BATON_AMX ? 1 << 20 : BATON_WIDE && !BATON_FEW_SUMS ? 768 << 10 : 384 << 10;
constexpr int64_t CHUNK_ROWS_MAX = BATON_AMX ? 1024 : 40 * TILE_ROWS;
// Weights are read, and widened, once for the rows of a chunk. If fewer than these would share them, inputs are divided
// into parts, and the sums of several panels are kept while the parts take turns.
constexpr int64_t SHARING_ROWS_MIN = !BATON_WIDE ? 48 : BATON_FEW_SUMS ? 24 : 128;
constexpr int64_t PART_UNIT = 128;      // inputs; a part of a matrix's only group is some of these
constexpr int64_t KEPT_BYTES = 512 << 10;  // of sums
constexpr int64_t BLOCK_STEPS = 1024;   // over k, per pass: 256 KiB of a panel
constexpr int64_t QUAD_STEPS = 512;     // of bytes: 128 KiB
constexpr int64_t DECODE_STEPS = BATON_AMX ? 128 : 512;  // of a coded panel at once: 128 KiB, as bfloat16
constexpr int64_t DECODE_STEPS_OF_FEW = 64;  // where up to FEW_TILES tiles of rows read them, from the L1 cache
constexpr int64_t FEW_TILES = 3;
constexpr int64_t DECODE_STEPS_OF_TILE = 32;  // where one tile of rows takes them: memory is read while others are decoded
constexpr int64_t WIDEN_K = 96;         // inputs of a panel at once, as float32: 24 KiB
constexpr int64_t WIDENED_BYTES = 32 << 10;  // of a panel or strip at once, as float32, at most
constexpr int64_t TILE_STEPS = 96;      // of a panel that several tiles of rows share: 24 KiB
constexpr int64_t TILE_STEPS_ALONE = 64;  // of a panel that one tile of rows goes over twice
constexpr int64_t AMX_ROWS = 32;        // of two tiles
constexpr int64_t FIRST_ROWS_MIN = 4;   // of the first of several tiles, where it decodes for the others
constexpr int64_t KEEPING_ROWS_MIN = 3;  // of one that does so with sums of groups, or of strips; none has fewer
constexpr int64_t TASKS_PER_THREAD = 8;
constexpr int64_t TASKS_OF_SHARING = 4;  // per thread, at least, where more rows could share what is read or decoded
constexpr int64_t ROWS_OF_THREAD_MIN = 96;  // with fewer, threads share out the weights: each reads a part of them
constexpr int64_t AHEAD_DECODED = 4096;  // behind the block that was decoded
constexpr int64_t AHEAD_BYTES = 4096;   // how far a single pass over the weights is prefetched
constexpr double PARALLEL_SECONDS_MIN = 8e-6;  // below, waking a thread costs more than it brings

// A product with its activations as the kernels want them.
struct Job {
    const Matrix* m;
    Rows rows;
    Output out;
    const float* sums;  // per row and group, of the activations; where the matrix has zeros
    const float* row_scales;  // of rounded activations
    int64_t tile_count, chunk_count, tiles_per_chunk;
    int64_t panel_count, panels_per_task, tasks;
    int64_t part;  // groups, or steps of the only one, whose activations are in the L2 cache at once; 0: not in parts

    bool by_tiles;  // of AMX

    // Tiles of AMX are full but for the last, the others about as high as one another.
    int64_t row_of_tile(int64_t tile) const {
        return by_tiles ? std::min(tile * AMX_ROWS, rows.count) : tile * rows.count / tile_count;
    }
};

// Bytes are multiplied by tiles where groups begin at a tile; the others' sums are the same.
bool takes_tiles(const Matrix& m, int32_t dtype) {
    if (m.format == QUAD8) return BATON_AMX && (m.group_count == 1 || m.group_k % 64 == 0);
    return BATON_AMX && dtype == BF16 && m.format != DENSE_F32;
}

bool is_coded(const Matrix& m) { return m.format == CODE8 || m.format == CODE4 || m.format == LANES4; }

// Inputs of a group as the kernels read them, filled up with zeros.
int64_t padded_group(const Matrix& m, bool by_tiles) {
    if (by_tiles) return (m.group_k + 31) / 32 * 32;
    return m.group_count > 1 ? m.group_k : m.steps * step_k(m.format);
}

int64_t padded_k(const Matrix& m, bool by_tiles) {
    return by_tiles ? m.group_count * padded_group(m, true) : m.steps * step_k(m.format);
}

// Groups from `first` on, or steps of a matrix's only group.
struct Part {
    int64_t first, end;
};

int64_t part_units(const Matrix& m) { return m.group_count > 1 ? m.group_count : m.steps; }

inline size_t element_bytes(int dtype) { return dtype == F32 ? 4 : dtype == BF16 ? 2 : QUAD_BYTES; }

inline const char* row_pointer(const Rows& rows, int64_t i) {
    const int64_t row = rows.index ? rows.index[i] : i;
    return static_cast<const char*>(rows.base) + row * rows.stride * static_cast<int64_t>(element_bytes(rows.dtype));
}

// --- one tile ---

// Some steps of a panel, as the tiles read them: where and in which format.
struct Block {
    const char* data;
    int format;
    int64_t strip_bytes = 0, first = 0;  // of dot_wide.h's panels
};

// Where a tile's activations from input k on are: those of each row, or of all rows side by side (dot_wide.h).
inline void inputs_of(const Job& job, int64_t row, int64_t rows, int64_t k, const void** a) {
    const int64_t bytes = k * static_cast<int64_t>(element_bytes(job.rows.dtype));
    if (BATON_WIDE)
        a[0] = row_pointer(job.rows, row) + bytes * rows;
    else
        for (int64_t r = 0; r < rows; ++r) a[r] = row_pointer(job.rows, row + r) + bytes;
}

#if BATON_WIDE
template <int ROWS>
void dot_rows(const Block& block, const void* const* tile, int64_t steps, const Codebook* book, float* acc,
              bool accumulate, Prefetch prefetch) {
    const float* a = static_cast<const float*>(*tile);
    const Panel panel{block.data, block.strip_bytes, book, block.first};
    switch (block.format) {
        case DENSE_F32: return dot_tile<ROWS, StepF32>(a, panel, steps, acc, accumulate, prefetch);
        case DENSE_BF16: return dot_tile<ROWS, StepBF16>(a, panel, steps, acc, accumulate, prefetch);
        case CODE8: return dot_tile<ROWS, StepCode8>(a, panel, steps, acc, accumulate, prefetch);
#if BATON_FEW_SUMS
        case LANES4: return dot_tile<ROWS, StepLanes4>(a, panel, steps, acc, accumulate, prefetch);
#endif
        default: return dot_tile<ROWS, StepCode4>(a, panel, steps, acc, accumulate, prefetch);
    }
}
#else
template <int ROWS>
void dot_rows(const Block& block, const void* const* a, int64_t steps, const Codebook* book, float* acc,
              bool accumulate, Prefetch prefetch) {
    const bf16* const* pairs = reinterpret_cast<const bf16* const*>(a);
    const char* panel = block.data;
    switch (block.format) {
        case DENSE_F32:
            return dot_tile<ROWS, StepF32>(reinterpret_cast<const float* const*>(a), panel, steps, book, acc,
                                           accumulate, prefetch);
        case DENSE_BF16: return dot_tile<ROWS, StepBF16>(pairs, panel, steps, book, acc, accumulate, prefetch);
        case CODE8: return dot_tile<ROWS, StepCode8>(pairs, panel, steps, book, acc, accumulate, prefetch);
        default: return dot_tile<ROWS, StepCode4>(pairs, panel, steps, book, acc, accumulate, prefetch);
    }
}
#endif

void dot(int64_t rows, const Block& block, const void* const* a, int64_t steps, const Codebook* book, float* acc,
         bool accumulate, Prefetch prefetch) {
    static_assert(TALL_ROWS == 12, "one case each");
    switch (rows) {
        case 1: return dot_rows<1>(block, a, steps, book, acc, accumulate, prefetch);
        case 2: return dot_rows<2>(block, a, steps, book, acc, accumulate, prefetch);
        case 3: return dot_rows<3>(block, a, steps, book, acc, accumulate, prefetch);
        case 4: return dot_rows<4>(block, a, steps, book, acc, accumulate, prefetch);
        case 5: return dot_rows<5>(block, a, steps, book, acc, accumulate, prefetch);
        case 6: return dot_rows<6>(block, a, steps, book, acc, accumulate, prefetch);
#if !BATON_FEW_SUMS
        case 7: return dot_rows<7>(block, a, steps, book, acc, accumulate, prefetch);
        case 8: return dot_rows<8>(block, a, steps, book, acc, accumulate, prefetch);
        case 9: return dot_rows<9>(block, a, steps, book, acc, accumulate, prefetch);
        case 10: return dot_rows<10>(block, a, steps, book, acc, accumulate, prefetch);
        case 11: return dot_rows<11>(block, a, steps, book, acc, accumulate, prefetch);
        case 12: return dot_rows<12>(block, a, steps, book, acc, accumulate, prefetch);
#endif
    }
}

#if BATON_AVX512
// A tile times steps of a coded panel, which it decodes to `kept`.
template <int ROWS>
void dot_rows_and_keep(int format, const void* const* a, const char* panel, int64_t steps, const Codebook* book,
                       float* acc, bool accumulate, Prefetch prefetch, char* kept) {
    const bf16* const* pairs = reinterpret_cast<const bf16* const*>(a);
    if (format == CODE8)
        dot_columns<ROWS, StepCode8, 0, 4, true>(pairs, panel, steps, book, acc, accumulate, prefetch, kept);
    else
        dot_columns<ROWS, StepCode4, 0, 4, true>(pairs, panel, steps, book, acc, accumulate, prefetch, kept);
}

// The first of several tiles, of FIRST_ROWS_MIN to TILE_ROWS rows, times steps of a panel that it decodes to `kept`.
void dot_first_tile(const Matrix& m, int64_t rows, const void* const* a, const char* panel, int64_t first, int64_t steps,
                    float* acc, bool accumulate, Prefetch prefetch, char* kept) {
    static_assert(FIRST_ROWS_MIN == 4 && TILE_ROWS == 6, "one case each");
    const char* const block = panel + first * step_bytes(m.format);
    switch (rows) {
        case 4: return dot_rows_and_keep<4>(m.format, a, block, steps, &m.book, acc, accumulate, prefetch, kept);
        case 5: return dot_rows_and_keep<5>(m.format, a, block, steps, &m.book, acc, accumulate, prefetch, kept);
        default: return dot_rows_and_keep<6>(m.format, a, block, steps, &m.book, acc, accumulate, prefetch, kept);
    }
}
#elif BATON_WIDE && !BATON_FEW_SUMS
// A tile times a block of a panel, which it widens to `kept`. Widened before the first tile, it takes the time of its
// loads and stores, a quarter of the products' with 32 rows; as it is multiplied these cost little.
template <typename Step>
void widen_and_dot(int64_t rows, const float* a, const Panel& block, int64_t steps, float* acc, bool accumulate,
                   Prefetch prefetch, float* kept) {
    static_assert(FIRST_ROWS_MIN == 4 && TILE_ROWS == 6, "one case each");
    switch (rows) {
        case 4: return dot_columns<4, Step, 0, VECTORS, true>(a, block, steps, acc, accumulate, prefetch, kept);
        case 5: return dot_columns<5, Step, 0, VECTORS, true>(a, block, steps, acc, accumulate, prefetch, kept);
        default: return dot_columns<6, Step, 0, VECTORS, true>(a, block, steps, acc, accumulate, prefetch, kept);
    }
}

// The same.
void dot_first_tile(const Matrix& m, int64_t rows, const void* const* tile, const char* panel, int64_t first,
                    int64_t steps, float* acc, bool accumulate, Prefetch prefetch, char* kept) {
    const float* a = static_cast<const float*>(*tile);
    const Panel block{panel, 0, &m.book, first};
    float* const to = reinterpret_cast<float*>(kept);
    switch (m.format) {
        case DENSE_BF16: return widen_and_dot<StepBF16>(rows, a, block, steps, acc, accumulate, prefetch, to);
        case CODE8: return widen_and_dot<StepCode8>(rows, a, block, steps, acc, accumulate, prefetch, to);
        default: return widen_and_dot<StepCode4>(rows, a, block, steps, acc, accumulate, prefetch, to);
    }
}
#else  // classes whose tiles decode nothing for one another: `first_tile_decodes`
template <typename... Arguments> void dot_first_tile(Arguments&&...) {}
#endif

// --- what becomes of sums ---

void add_bias(const Matrix& m, int64_t panel, float* sums, int64_t rows) {
    if (!m.bias) return;
    const float* bias = m.bias + panel * PANEL;
    for (int64_t r = 0; r < rows; ++r)
        for (int c = 0; c < PANEL; ++c) sums[r * ROW_SUMS + c] += bias[c];
}

template <typename T>
void store_rows(const Output& out, int64_t row_first, int64_t rows, int64_t column, int64_t columns, float* sums) {
    for (int64_t r = 0; r < rows; ++r, sums += ROW_SUMS) {
        const int64_t at = (row_first + r) * out.stride + column;
        if (out.residual) {
            const T* residual = static_cast<const T*>(out.residual) + at;
            for (int64_t c = 0; c < columns; ++c) sums[c] += to_float(residual[c]);
        }
        store_row(static_cast<T*>(out.base) + at, sums, columns);
    }
}

void store(const Output& out, int64_t row_first, int64_t rows, int64_t column, int64_t columns, float* sums) {
    if (out.dtype == F32)
        store_rows<float>(out, row_first, rows, column, columns, sums);
    else
        store_rows<bf16>(out, row_first, rows, column, columns, sums);
}

// Makes results of a panel's sums as soon as those of some rows are complete.
struct PanelEnd {
    const Job* job;
    int64_t panel;
    float* gate;       // sums of gate where these are of up: rows from `gate_row` on; or null
    int64_t gate_row;

    // Rows from `row` on; changes the sums.
    void operator()(int64_t row, int64_t rows, float* sums) const {
        const Matrix& m = *job->m;
        int64_t columns = m.n;
        add_bias(m, gate ? panel + job->panel_count : panel, sums, rows);
        if (gate) {
            columns = m.n / 2;
            float* gated = gate + (row - gate_row) * ROW_SUMS;
            add_bias(m, panel, gated, rows);
            for (int64_t r = 0; r < rows; ++r)
                gate_rows(job->out.activation, gated + r * ROW_SUMS, sums + r * ROW_SUMS, PANEL);
            sums = gated;
        }
        store(job->out, row, rows, panel * PANEL, std::min<int64_t>(PANEL, columns - panel * PANEL), sums);
    }
};

// --- one panel times one chunk of rows ---

// Where blocks of a panel are decoded.
char* decoded_block() {
    if (BATON_WIDE) return static_cast<char*>(thread_scratch(WIDENED, WIDENED_BYTES));
    return static_cast<char*>(thread_scratch(DECODED, DECODE_STEPS * 256));
}

#if BATON_WIDE
// Codes in a table that is no row of integers are not looked up in registers.
bool is_decoded(const Matrix& m, bool many, bool) {
    return (many && m.format != DENSE_F32) || (m.format == CODE8 && !m.book.is_integer);
}

int64_t decode_steps_max(const Matrix& m, bool, int64_t) { return WIDEN_K / step_k(m.format); }

// A strip of a block of a panel, as float32.
void widen(const Matrix& m, const Panel& strip, int64_t steps, float* to) {
    switch (m.format) {
        case DENSE_BF16: return widen_strip<StepBF16>(strip, steps, to);
        case CODE4: return widen_strip<StepCode4>(strip, steps, to);
#if BATON_FEW_SUMS
        case LANES4: return widen_strip<StepLanes4>(strip, steps, to);
#endif
        default:
            if (m.book.is_integer) return widen_strip<StepCode8>(strip, steps, to);
            widen_strip<StepTable8>(strip, steps, to);
    }
}

Block block_of(const Matrix& m, const char* panel, int64_t first, int64_t count, bool decode, bool) {
    const int64_t strip_bytes = m.steps * strip_step_bytes(m.format);
    if (!decode) return {panel, m.format, strip_bytes, first};
    float* to = reinterpret_cast<float*>(decoded_block());
    const int64_t numbers = count * step_k(m.format) * STRIP;
    const Panel block{panel, strip_bytes, &m.book, first};
    for (int strip = 0; strip < PANEL / STRIP; ++strip)
        widen(m, block.of_strip(strip), count, to + strip * numbers);
    return {reinterpret_cast<const char*>(to), DENSE_F32, numbers * 4};
}
#else
bool is_decoded(const Matrix& m, bool many, bool wide) { return m.format >= CODE8 && (many || wide); }

int64_t decode_steps_max(const Matrix&, bool wide, int64_t tiles) {
    return !wide && tiles <= FEW_TILES ? DECODE_STEPS_OF_FEW : DECODE_STEPS;
}

void widen(const char* pairs, int64_t steps, float* to) {
    const bf16* from = reinterpret_cast<const bf16*>(pairs);
    for (int64_t s = 0; s < steps; ++s)
        for (int c = 0; c < PANEL; ++c) {
            to[(2 * s) * PANEL + c] = to_float(from[s * 2 * PANEL + 2 * c]);
            to[(2 * s + 1) * PANEL + c] = to_float(from[s * 2 * PANEL + 2 * c + 1]);
        }
}

#if BATON_SCALED
// Integers of a matrix that has factors, as float32.
void widen_integers(const char* from, int64_t steps, float* to) {
    const __m512 middle = _mm512_set1_ps(128.0f);
    const __m512i low = _mm512_set1_epi32(0xffff);
    for (int64_t s = 0; s < steps; ++s, to += 2 * PANEL)
        for (int j = 0; j < 4; ++j) {
            const __m512i codes = _mm512_load_si512(from + s * step_bytes(CODE8) + j / 2 * 64);
            const __m512i pairs = j % 2 ? _mm512_unpackhi_epi8(codes, _mm512_setzero_si512())
                                        : _mm512_unpacklo_epi8(codes, _mm512_setzero_si512());
            const __m512i even = _mm512_and_si512(pairs, low), odd = _mm512_srli_epi32(pairs, 16);
            _mm512_storeu_ps(to + 16 * j, _mm512_sub_ps(_mm512_cvtepi32_ps(even), middle));
            _mm512_storeu_ps(to + PANEL + 16 * j, _mm512_sub_ps(_mm512_cvtepi32_ps(odd), middle));
        }
}
#endif

Block block_of(const Matrix& m, const char* panel, int64_t first, int64_t count, bool decode, bool wide) {
    const char* from = panel + first * step_bytes(m.format);
    if (!decode) return {from, m.format};
#if BATON_SCALED
    if (wide && m.factors && m.format == CODE8) {
        float* widened = static_cast<float*>(thread_scratch(WIDENED, DECODE_STEPS * 512));
        widen_integers(from, count, widened);
        return {reinterpret_cast<const char*>(widened), DENSE_F32};
    }
#endif
    char* decoded = decoded_block();
    if (m.format == CODE8)
        decode_steps<StepCode8>(from, count, &m.book, decoded);
    else
        decode_steps<StepCode4>(from, count, &m.book, decoded);
    if (!wide) return {decoded, DENSE_BF16};
    float* widened = static_cast<float*>(thread_scratch(WIDENED, DECODE_STEPS * 512));
    widen(decoded, count, widened);
    return {reinterpret_cast<const char*>(widened), DENSE_F32};
}
#endif

// A single tile streams the panel: prefetch what it comes to next. With more, the panel comes from the cache
// from the second tile on: the memory's time is used for the next panel.
Prefetch prefetch_for(const Matrix& m, const char* here, const char* next_panel_here, int64_t steps, int64_t tile,
                      int64_t tiles) {
    const int64_t lines = step_bytes(m.format) / 64;
    if (tiles == 1) return {here + AHEAD_BYTES, static_cast<int>(lines)};
    const int64_t per_step = std::max<int64_t>(1, lines / tiles);
    if (!next_panel_here || tile * per_step >= lines) return {nullptr, 0};
    return {next_panel_here + tile * per_step * 64 * steps, static_cast<int>(per_step)};
}

#if BATON_WIDE && !BATON_FEW_SUMS
// What several tiles fetch while they share a block: each its part of the block that follows. Blocks may be a group of 32
// inputs, beside whose product a division shows: there is none where nothing is fetched, and mostly none for each tile.
class Following {
  public:
    Following(const char* from, int64_t bytes, int64_t tiles)
        : from_(from), lines_((bytes + 63) / 64), share_(from ? (lines_ + tiles - 1) / tiles : 0) {}

    // Of one tile, whose product takes so many steps.
    Prefetch during(int64_t tile, int64_t steps) const {
        if (!from_ || tile * share_ >= lines_) return {nullptr, 0};
        const char* from = from_ + tile * share_ * 64;
        if (share_ <= steps) return {from, 1, static_cast<int>(share_)};
        const int64_t per_step = (share_ + steps - 1) / steps;
        return {from, static_cast<int>(per_step), static_cast<int>((share_ + per_step - 1) / per_step)};
    }

  private:
    const char* from_;
    int64_t lines_, share_;
};
#endif

#if BATON_AMX
// Whether so many rows pass over blocks of a panel, one after another, and not over the panel at once. Tiles of more
// than sixteen rows go over a block twice, half of the columns at a time; coded weights are decoded once for all tiles.
bool goes_by_blocks(const Matrix& m, int64_t rows) {
    return rows > (m.format == CODE8 || m.format == CODE4 ? AMX_ROWS : TILE_HEIGHT);
}

// What tiles of rows fetch while they are multiplied by a panel: a single pass what it comes to next, others their
// parts of the block that follows, here or in the next panel, since all of a block is needed at once.
struct PanelFetch {
    const Matrix& m;
    int64_t panel;
    const char* next_panel;
    int64_t rows, tiles;
    int64_t block_max;  // steps

    // For one of the tiles, during `count` steps from `first` on.
    amx::Fetched during(int64_t first, int64_t count, int64_t tile) const {
        const int64_t bytes = step_bytes(m.format), tile_steps = (count + TILE_DEPTH - 1) / TILE_DEPTH;
        const char* here = m.panels + panel * m.panel_bytes + first * bytes;
        if (!goes_by_blocks(m, rows)) {
            const bool is_decoded = m.format == CODE8 || m.format == CODE4;  // and was read then
            const int lines = static_cast<int>((count * bytes / 64 + tile_steps - 1) / tile_steps);
            if (rows <= TILE_HEIGHT && !is_decoded) return {here, lines, 0, 1, true};
            return {is_decoded ? here + count * bytes + AHEAD_DECODED : here + AHEAD_BYTES, lines};
        }
        const int64_t left = m.steps - first - count;
        const char* from = left > 0 ? here + count * bytes : next_panel;
        const int64_t lines = std::min(block_max, left > 0 ? left : m.steps) * bytes / 64;
        const int64_t pairs = 2 * tiles * tile_steps;  // even shares: more than sixteen rows pass a step twice
        const int64_t share = (lines + pairs - 1) / pairs * 2;
        if (!from || tile * share * tile_steps >= lines) return {nullptr, 0};
        const int pages = lines % amx::PAGE_LINES ? 1 : static_cast<int>(lines / amx::PAGE_LINES);
        return {from, static_cast<int>(share), tile * share * tile_steps, pages};
    }
};
#endif

// total (+)= scale * (acc - zero * sum), by the same two fused operations as where groups are summed in registers.
void fold_group(const Matrix& m, int64_t panel, int64_t group, const float* acc, float* total, int64_t rows,
                const float* sums) {
    const int64_t at = (panel * m.group_count + group) * PANEL;
    for (int c = 0; c < PANEL; c += LANES) {
        const f32x16 scale = load16(m.scales + at + c);
        const bool has_zero = m.zeros || m.code_offset != 0;
        const f32x16 zero = m.zeros ? -load16(m.zeros + at + c) : splat(m.code_offset);
        for (int64_t r = 0; r < rows; ++r) {
            f32x16 value = load16(acc + r * ROW_SUMS + c);
            if (has_zero) value = multiply_add(zero, splat(sums[r * m.group_count + group]), value);
            float* to = total + r * ROW_SUMS + c;
            store16(to, group ? multiply_add(scale, value, load16(to)) : scale * value);
        }
    }
}

#if BATON_AVX512 || BATON_WIDE
#if BATON_WIDE
using GroupInput = float;
constexpr int64_t GROUP_K_MAX = BATON_FEW_SUMS ? 256 : 128;
constexpr int64_t ROWS_OF_GROUPS_MIN = BATON_FEW_SUMS ? TILE_ROWS + 1 : TALL_ROWS + 1;
int64_t groups_k_at_once(int64_t) { return GROUP_K_MAX; }
template <int ROWS>
BATON_INLINE void dot_rows_of_groups(const float* const* a, const char* block, const Groups& groups, float* total,
                                     bool accumulate, Prefetch prefetch) {
    dot_groups<ROWS, StepF32, 0, STRIP_VECTORS>(*a, {block, 0, nullptr}, groups, total, accumulate, prefetch);
}
#else
using GroupInput = bf16;
constexpr int64_t GROUP_K_MAX = 2 * DECODE_STEPS;
constexpr int64_t ROWS_OF_GROUPS_MIN = TILE_ROWS + 1;
// Few rows are done before long: what was decoded for them is still in the L1 cache.
int64_t groups_k_at_once(int64_t tiles) { return tiles > 5 ? 256 : 64; }
template <int ROWS>
BATON_INLINE void dot_rows_of_groups(const bf16* const* a, const char* block, const Groups& groups, float* total,
                                     bool accumulate, Prefetch prefetch) {
    dot_groups<ROWS>(a, block, groups, total, accumulate, prefetch);
}
#endif

BATON_INLINE void dot_groups_of(int64_t rows, const GroupInput* const* a, const char* block, const Groups& groups,
                                float* total, bool accumulate, Prefetch prefetch) {
    static_assert(TILE_ROWS == 6, "one case each");
    switch (rows) {
        case 1: return dot_rows_of_groups<1>(a, block, groups, total, accumulate, prefetch);
        case 2: return dot_rows_of_groups<2>(a, block, groups, total, accumulate, prefetch);
        case 3: return dot_rows_of_groups<3>(a, block, groups, total, accumulate, prefetch);
        case 4: return dot_rows_of_groups<4>(a, block, groups, total, accumulate, prefetch);
        case 5: return dot_rows_of_groups<5>(a, block, groups, total, accumulate, prefetch);
        default: return dot_rows_of_groups<6>(a, block, groups, total, accumulate, prefetch);
    }
}

#if BATON_WIDE
// Returns where a block, or a strip of one, is decoded.
float* decoded_strip() { return reinterpret_cast<float*>(decoded_block()); }
#endif

#if BATON_FEW_SUMS
// Returns whether the first of several tiles, of so many rows, decodes a strip as it multiplies by it, and keeps it for
// those after it: the units that decode are mostly others than those that multiply.
bool decodes_while_multiplying(const Matrix& m, int64_t rows) {
    return rows >= KEEPING_ROWS_MIN && (m.format == LANES4 || (m.format == CODE8 && m.book.is_integer));
}

// Returns a strip of a coded panel, from step `first` on.
Panel coded_strip(const Matrix& m, const char* panel, int64_t first, int64_t strip) {
    const int64_t strip_bytes = m.steps * strip_step_bytes(m.format);
    return Panel{panel, strip_bytes, &m.book, first}.of_strip(static_cast<int>(strip));
}

// A tile times some groups of a strip, which it decodes to `decoded_strip`.
template <typename Step>
void dot_and_keep_groups(int64_t rows, const float* a, const Panel& strip, const Groups& groups, float* total,
                         bool accumulate, Prefetch prefetch) {
    static_assert(TILE_ROWS == 6 && KEEPING_ROWS_MIN == 3, "one case each");
    constexpr int COUNT = STRIP_VECTORS;
    float* const kept = decoded_strip();
    switch (rows) {
        case 3: return dot_groups<3, Step, 0, COUNT, true>(a, strip, groups, total, accumulate, prefetch, kept);
        case 4: return dot_groups<4, Step, 0, COUNT, true>(a, strip, groups, total, accumulate, prefetch, kept);
        case 5: return dot_groups<5, Step, 0, COUNT, true>(a, strip, groups, total, accumulate, prefetch, kept);
        default: return dot_groups<6, Step, 0, COUNT, true>(a, strip, groups, total, accumulate, prefetch, kept);
    }
}

// The first of several tiles times some groups of a strip. Returns where the strip is now, decoded.
const char* dot_coded_groups(const Matrix& m, int64_t rows, const float* const* a, const char* panel, int64_t first,
                             int64_t strip, const Groups& groups, float* total, bool accumulate, Prefetch prefetch) {
    const Panel codes = coded_strip(m, panel, first, strip);
    if (m.format == LANES4)
        dot_and_keep_groups<StepLanes4>(rows, *a, codes, groups, total, accumulate, prefetch);
    else
        dot_and_keep_groups<StepCode8>(rows, *a, codes, groups, total, accumulate, prefetch);
    return reinterpret_cast<const char*>(decoded_strip());
}
#elif BATON_AVX512
// Returns whether the first of several tiles, of so many rows, decodes a block as it multiplies by it. The tables of
// bytes leave registers for the sums of fewer rows.
bool decodes_while_multiplying(const Matrix& m, int64_t rows) {
    return rows >= KEEPING_ROWS_MIN && rows <= (m.format == CODE8 ? StepCode8::WIDE_ROWS : StepCode4::WIDE_ROWS);
}

// A tile times some groups of a panel, which it decodes to `kept`.
template <typename Step>
void dot_and_keep_groups(int64_t rows, const bf16* const* a, const char* block, const Groups& groups, float* total,
                         bool accumulate, Prefetch prefetch, const Codebook* book, char* kept) {
    static_assert(KEEPING_ROWS_MIN == 3 && TILE_ROWS == 6, "one case each");
    switch (rows) {
        case 3: return dot_groups<3, Step, true>(a, block, groups, total, accumulate, prefetch, book, kept);
        case 4: return dot_groups<4, Step, true>(a, block, groups, total, accumulate, prefetch, book, kept);
        case 5: return dot_groups<5, Step, true>(a, block, groups, total, accumulate, prefetch, book, kept);
        default:
            if constexpr (Step::WIDE_ROWS == TILE_ROWS)
                dot_groups<6, Step, true>(a, block, groups, total, accumulate, prefetch, book, kept);
    }
}

// The first of several tiles times some groups of a panel. Returns where they are now, decoded.
const char* dot_coded_groups(const Matrix& m, int64_t rows, const bf16* const* a, const char* panel, int64_t first,
                             int64_t, const Groups& groups, float* total, bool accumulate, Prefetch prefetch) {
    const char* const block = panel + first * step_bytes(m.format);
    char* const kept = decoded_block();
    if (m.format == CODE8)
        dot_and_keep_groups<StepCode8>(rows, a, block, groups, total, accumulate, prefetch, &m.book, kept);
    else
        dot_and_keep_groups<StepCode4>(rows, a, block, groups, total, accumulate, prefetch, &m.book, kept);
    return kept;
}
#else
bool decodes_while_multiplying(const Matrix&, int64_t) { return false; }

template <typename... Arguments> const char* dot_coded_groups(Arguments&&...) { return nullptr; }
#endif

// A strip of a block, as `dot_groups` reads it.
const char* strip_of(const Matrix& m, const char* panel, int64_t first, int64_t count, int strip) {
#if BATON_WIDE
    float* to = decoded_strip();
    const Panel block{panel, m.steps * strip_step_bytes(m.format), &m.book, first};
    widen(m, block.of_strip(strip), count, to);
    return reinterpret_cast<const char*>(to);
#else
    return block_of(m, panel, first, count, true, false).data;
#endif
}

// What the tiles fetch while they are multiplied by `count` groups before `end`: the same strip of the groups that come
// next, or of the next panel.
Prefetch fetch_groups(const Matrix& m, const char* panel, const char* next_panel, const Part& part, int64_t end,
                      int64_t column, int64_t tile, int64_t count) {
    const int64_t steps = m.group_k / step_k(m.format), bytes = steps * step_bytes(m.format);
    if (end == part.end && !next_panel) return {nullptr, 0};
    const char* next = (end < part.end ? panel + end * bytes * STRIP / PANEL
                                       : next_panel + part.first * bytes * STRIP / PANEL);
    if (BATON_FEW_SUMS) {
        const char* strip = next + column / STRIP * m.steps * strip_step_bytes(m.format);
        return {tile ? nullptr : strip, static_cast<int>((bytes * STRIP / PANEL + 63) / 64)};
    }
    // A line for each step, so that memory is as busy as it can be and not more.
    return {tile < step_bytes(m.format) / 64 ? next + tile * count * steps * 64 : nullptr, 1};
}

// Several tiles times a panel whose groups are short, of which some are decoded at once. While the first tiles are
// multiplied by these the next ones are fetched from memory.
void panel_sums_of_groups(const Job& job, int64_t tile_first, int64_t tile_end, int64_t panel, const Part& part,
                          const char* next_panel, float* result) {
    const Matrix& m = *job.m;
    const int64_t row_first = job.row_of_tile(tile_first), group_steps = m.group_k / step_k(m.format);
    const int64_t at_once = std::max<int64_t>(1, groups_k_at_once(tile_end - tile_first) / m.group_k);
    const char* weights = m.panels + panel * m.panel_bytes;
    for (int64_t first = part.first; first < part.end; first += at_once) {
        const int64_t count = std::min(at_once, part.end - first), end = first + count;
        for (int64_t column = 0; column < PANEL; column += STRIP) {
            const bool keeps = decodes_while_multiplying(m, job.row_of_tile(tile_first + 1) - row_first);
            const char* block =
                keeps ? nullptr : strip_of(m, weights, first * group_steps, count * group_steps, column / STRIP);
            const int64_t at = (panel * m.group_count + first) * PANEL + column;
            for (int64_t tile = tile_first; tile < tile_end; ++tile) {
                const int64_t row = job.row_of_tile(tile), tile_rows = job.row_of_tile(tile + 1) - row;
                const void* a[TALL_ROWS];
                inputs_of(job, row, tile_rows, first * m.group_k, a);
                const Groups groups{count, m.group_k, m.scales + at, m.zeros ? m.zeros + at : nullptr,
                                    job.sums ? job.sums + row * m.group_count + first : nullptr, m.group_count,
                                    m.code_offset};
                const Prefetch prefetch = fetch_groups(m, weights, next_panel, part, end, column, tile - tile_first,
                                                       count);
                float* const to = result + (row - row_first) * ROW_SUMS + column;
                const GroupInput* const* const x = reinterpret_cast<const GroupInput* const*>(a);
                if (block)
                    dot_groups_of(tile_rows, x, block, groups, to, first > 0, prefetch);
                else
                    block = dot_coded_groups(m, tile_rows, x, weights, first * group_steps, column / STRIP, groups,
                                             to, first > 0, prefetch);
            }
        }
    }
}
#endif

// Whether so many rows pass over groups that were decoded for all of them.
bool decodes_groups(const Matrix& m, int64_t rows, int32_t dtype) {
#if BATON_AVX512 || BATON_WIDE
    return rows >= ROWS_OF_GROUPS_MIN && (BATON_WIDE || dtype == BF16) && is_coded(m) &&
           m.group_count > 1 && m.group_count * m.group_k == m.k && m.group_k <= GROUP_K_MAX;
#else
    return false;
#endif
}

#if BATON_FEW_SUMS
// Groups that several tiles share are decoded once, by the first of them or before it; a tile alone does so as it comes
// to them.
bool has_whole_groups(const Matrix& m) {
    const bool is_decoded_at_once = is_coded(m) && (m.format != CODE8 || m.book.is_integer);
    return m.group_count > 1 && m.group_count * m.group_k == m.k && is_decoded_at_once;
}

template <int ROWS>
BATON_INLINE void dot_groups_of_tile(const Matrix& m, const float* a, const Panel& panel, const Groups& groups,
                                     float* total) {
    switch (m.format) {
        case CODE4: return dot_groups_alone<ROWS, StepCode4>(a, panel, groups, total);
        case LANES4: return dot_groups_alone<ROWS, StepLanes4>(a, panel, groups, total);
        default: return dot_groups_alone<ROWS, StepCode8>(a, panel, groups, total);
    }
}

// One tile times a panel whose groups are whole.
void tile_sums_of_groups(const Job& job, int64_t row, int64_t rows, int64_t panel, float* result) {
    static_assert(TILE_ROWS == 6, "one case each");
    const Matrix& m = *job.m;
    const float* a = reinterpret_cast<const float*>(row_pointer(job.rows, row));
    const Panel weights{m.panels + panel * m.panel_bytes, m.steps * strip_step_bytes(m.format), &m.book};
    const int64_t at = panel * m.group_count * PANEL;
    const Groups groups{m.group_count, m.group_k, m.scales + at, m.zeros ? m.zeros + at : nullptr,
                        job.sums ? job.sums + row * m.group_count : nullptr, m.group_count, m.code_offset};
    switch (rows) {
        case 1: return dot_groups_of_tile<1>(m, a, weights, groups, result);
        case 2: return dot_groups_of_tile<2>(m, a, weights, groups, result);
        case 3: return dot_groups_of_tile<3>(m, a, weights, groups, result);
        case 4: return dot_groups_of_tile<4>(m, a, weights, groups, result);
        case 5: return dot_groups_of_tile<5>(m, a, weights, groups, result);
        default: return dot_groups_of_tile<6>(m, a, weights, groups, result);
    }
}

template <typename Step>
BATON_INLINE void dot_strip(int64_t rows, const float* a, const char* strip, int64_t steps, float* sums, bool accumulate,
                            Prefetch prefetch) {
    static_assert(TILE_ROWS == 6, "one case each");
    const Panel panel{strip, 0, nullptr};
    constexpr int COUNT = STRIP_VECTORS;
    switch (rows) {
        case 1: return dot_columns<1, Step, 0, COUNT>(a, panel, steps, sums, accumulate, prefetch);
        case 2: return dot_columns<2, Step, 0, COUNT>(a, panel, steps, sums, accumulate, prefetch);
        case 3: return dot_columns<3, Step, 0, COUNT>(a, panel, steps, sums, accumulate, prefetch);
        case 4: return dot_columns<4, Step, 0, COUNT>(a, panel, steps, sums, accumulate, prefetch);
        case 5: return dot_columns<5, Step, 0, COUNT>(a, panel, steps, sums, accumulate, prefetch);
        default: return dot_columns<6, Step, 0, COUNT>(a, panel, steps, sums, accumulate, prefetch);
    }
}

// A tile times some steps of a strip, which it decodes to `decoded_strip`.
template <typename Step>
void dot_and_keep_strip(int64_t rows, const float* a, const Panel& strip, int64_t steps, float* sums, bool accumulate,
                        Prefetch prefetch) {
    static_assert(TILE_ROWS == 6 && KEEPING_ROWS_MIN == 3, "one case each");
    constexpr int COUNT = STRIP_VECTORS;
    float* const kept = decoded_strip();
    switch (rows) {
        case 3: return dot_columns<3, Step, 0, COUNT, true>(a, strip, steps, sums, accumulate, prefetch, kept);
        case 4: return dot_columns<4, Step, 0, COUNT, true>(a, strip, steps, sums, accumulate, prefetch, kept);
        case 5: return dot_columns<5, Step, 0, COUNT, true>(a, strip, steps, sums, accumulate, prefetch, kept);
        default: return dot_columns<6, Step, 0, COUNT, true>(a, strip, steps, sums, accumulate, prefetch, kept);
    }
}

// Several tiles times some steps of a strip, the first of which fetches what comes next.
template <typename Step>
void strip_sums(const Job& job, int64_t tile_first, int64_t tile_end, const char* strip, int64_t first, int64_t count,
                float* result, const char* next) {
    const int64_t row_first = job.row_of_tile(tile_first);
    for (int64_t tile = tile_first; tile < tile_end; ++tile) {
        const int64_t row = job.row_of_tile(tile), rows = job.row_of_tile(tile + 1) - row;
        const float* a = reinterpret_cast<const float*>(row_pointer(job.rows, row)) + first * Step::K * rows;
        dot_strip<Step>(rows, a, strip, count, result + (row - row_first) * ROW_SUMS, first > 0,
                        {tile == tile_first ? next : nullptr, 1});
    }
}

// The same of codes, of one group: sums before their scale.
void panel_sums_by_decoded_strips(const Job& job, int64_t tile_first, int64_t tile_end, int64_t panel,
                                  const Part& part, const char* next_panel, float* result) {
    const Matrix& m = *job.m;
    const int64_t step_inputs = step_k(m.format), steps = STRIP_STEPS / step_inputs;
    const int64_t bytes = strip_step_bytes(m.format);
    const char* weights = m.panels + panel * m.panel_bytes;
    const int64_t row = job.row_of_tile(tile_first), rows = job.row_of_tile(tile_first + 1) - row;
    const bool keeps = decodes_while_multiplying(m, rows);
    // Strips take turns on the same inputs, whose activations then stay in the L2 cache.
    for (int64_t first = part.first; first < part.end; first += steps)
        for (int64_t strip = 0; strip < PANEL / STRIP; ++strip) {
            const int64_t count = std::min(steps, part.end - first), k_first = step_inputs * first;
            const char* following = first + count < part.end ? weights + (first + count) * bytes
                                    : next_panel             ? next_panel + part.first * bytes
                                                             : nullptr;
            const char* next = following ? following + strip * m.steps * bytes : nullptr;
            float* const sums = result + strip * STRIP;
            if (!keeps) {
                const char* block = strip_of(m, weights, first, count, static_cast<int>(strip));
                strip_sums<StepF32>(job, tile_first, tile_end, block, k_first, step_inputs * count, sums, next);
                continue;
            }
            const float* a = reinterpret_cast<const float*>(row_pointer(job.rows, row)) + k_first * rows;
            const Panel codes = coded_strip(m, weights, first, strip);
            if (m.format == LANES4)
                dot_and_keep_strip<StepLanes4>(rows, a, codes, count, sums, first > 0, {next, 1});
            else
                dot_and_keep_strip<StepCode8>(rows, a, codes, count, sums, first > 0, {next, 1});
            strip_sums<StepF32>(job, tile_first + 1, tile_end, reinterpret_cast<const char*>(decoded_strip()), k_first,
                                step_inputs * count, sums + rows * ROW_SUMS, nullptr);
        }
}

// Several tiles times a panel that lies in strips. Each widens bfloat16 for itself, which its multiplications hide.
void panel_sums_by_strips(const Job& job, int64_t tile_first, int64_t tile_end, int64_t panel, const Part& part,
                          const char* next_panel, float* result) {
    const Matrix& m = *job.m;
    const char* strip = m.panels + panel * m.panel_bytes;
    constexpr int64_t BYTES = strip_step_bytes(DENSE_BF16);
    static_assert(BYTES == strip_step_bytes(DENSE_F32), "of either");
    for (int64_t column = 0; column < PANEL; column += STRIP, strip += m.steps * BYTES)
        for (int64_t first = part.first; first < part.end; first += STRIP_STEPS) {
            const int64_t count = std::min(STRIP_STEPS, part.end - first);
            const char* block = strip + first * BYTES;
            const char* following = column + STRIP < PANEL ? strip + m.steps * BYTES : next_panel;
            const char* next = first + count < part.end ? block + count * BYTES
                               : following              ? following + part.first * BYTES
                                                        : nullptr;
            if (m.format == DENSE_F32)
                strip_sums<StepF32>(job, tile_first, tile_end, block, first, count, result + column, next);
            else
                strip_sums<StepBF16>(job, tile_first, tile_end, block, first, count, result + column, next);
        }
}
#endif

// Whether the first of several tiles, of so many rows, decodes a block as it multiplies by it, for those after it.
bool first_tile_decodes(const Matrix& m, bool decode, bool wide, int64_t tiles, int64_t rows) {
    if (BATON_FEW_SUMS || !(BATON_AVX512 || BATON_WIDE) || !decode || tiles == 1 || rows < FIRST_ROWS_MIN) return false;
    return BATON_WIDE ? m.format != CODE8 || m.book.is_integer : !wide;
}

// Sums of the rows of some tiles times a part of one panel into `result` [rows][ROW_SUMS], which holds those of the
// parts before.
void panel_sums(const Job& job, int64_t tile_first, int64_t tile_end, int64_t panel, const Part& part,
                const char* next_panel, float* result) {
    const Matrix& m = *job.m;
    const int64_t row_first = job.row_of_tile(tile_first), rows = job.row_of_tile(tile_end) - row_first;
    const int64_t tiles = tile_end - tile_first;
    const bool coded = m.format >= CODE8, wide = job.rows.dtype == F32;
    const bool decode = is_decoded(m, tiles > 1, wide);
#if BATON_AVX512 || BATON_WIDE
    if (tiles > 1 && decodes_groups(m, job.rows.count, job.rows.dtype))
        return panel_sums_of_groups(job, tile_first, tile_end, panel, part, next_panel, result);
#endif
    const bool is_last = part.end == part_units(m);
#if BATON_FEW_SUMS
    if (tiles > 1 && !coded) return panel_sums_by_strips(job, tile_first, tile_end, panel, part, next_panel, result);
    if (tiles == 1 && has_whole_groups(m)) {  // the last tile of many may be alone in its chunk: it takes all at once
        if (is_last) tile_sums_of_groups(job, row_first, rows, panel, result);
        return;
    }
    if (tiles > 1 && m.group_count == 1) {
        panel_sums_by_decoded_strips(job, tile_first, tile_end, panel, part, next_panel, result);
        if (is_last) fold_group(m, panel, 0, result, result, rows, job.sums ? job.sums + row_first : nullptr);
        return;
    }
#endif
    const char* weights = m.panels + panel * m.panel_bytes;
    const int64_t group_steps = m.group_count > 1 ? m.group_k / step_k(m.format) : m.steps;
    const int64_t block_max = decode ? decode_steps_max(m, wide, tiles) : tiles > 1 ? BLOCK_STEPS : m.steps;
    float* acc = m.group_count > 1
                     ? static_cast<float*>(thread_scratch(ACC, static_cast<size_t>(rows) * ROW_SUMS * 4))
                     : result;
    char* const kept = first_tile_decodes(m, decode, wide, tiles, job.row_of_tile(tile_first + 1) - row_first)
                           ? decoded_block()
                           : nullptr;
    const bool has_groups = m.group_count > 1;
    [[maybe_unused]] const int64_t part_first = has_groups ? part.first * group_steps : part.first;
    [[maybe_unused]] const int64_t part_end = has_groups ? std::min(m.steps, part.end * group_steps) : part.end;
    for (int64_t group = has_groups ? part.first : 0; group < (has_groups ? part.end : m.group_count); ++group) {
        const int64_t group_first = has_groups ? group * group_steps : part.first;
        const int64_t group_end = has_groups ? std::min(m.steps, (group + 1) * group_steps) : part.end;
        for (int64_t first = group_first; first < group_end; first += block_max) {
            const int64_t count = std::min(block_max, group_end - first);
            const Block block =
                kept ? Block{kept, BATON_WIDE ? DENSE_F32 : DENSE_BF16} : block_of(m, weights, first, count, decode, wide);
            const int64_t k_first = first * step_k(m.format);
            const int64_t steps = block.format == DENSE_F32 ? count * step_k(m.format) : count;
#if BATON_WIDE && !BATON_FEW_SUMS
            const bool is_here = first + count < part_end;
            const int64_t next_first = is_here ? first + count : part_first;
            const char* const next = tiles == 1 ? nullptr : is_here ? weights : next_panel;
            const Following following(next ? next + next_first * step_bytes(m.format) : nullptr,
                                      std::min(block_max, part_end - next_first) * step_bytes(m.format), tiles);
#endif
            int64_t row = row_first, tile_rows = 0;
            for (int64_t tile = tile_first; tile < tile_end; ++tile, row += tile_rows) {
                tile_rows = job.row_of_tile(tile + 1) - row;
                const void* a[TALL_ROWS];
                inputs_of(job, row, tile_rows, k_first, a);
                const int64_t offset = first * step_bytes(m.format);
                const bool keeps = kept && tile == tile_first;
#if BATON_WIDE && !BATON_FEW_SUMS
                const Prefetch prefetch = tiles == 1 ? prefetch_for(m, weights + offset, nullptr, count, 0, 1)
                                                     : following.during(tile - tile_first, keeps ? count : steps);
#else
                const Prefetch prefetch =
                    prefetch_for(m, weights + offset, next_panel ? next_panel + offset : nullptr, count,
                                 tile - tile_first, tiles);
#endif
                float* sums = acc + (row - row_first) * ROW_SUMS;
                const bool accumulate = first > group * group_steps;
                if (keeps)
                    dot_first_tile(m, tile_rows, a, weights, first, count, sums, accumulate, prefetch, kept);
                else
                    dot(tile_rows, block, a, steps, &m.book, sums, accumulate, prefetch);
            }
        }
        if (coded && (has_groups || is_last))
            fold_group(m, panel, group, acc, result, rows,
                       job.sums ? job.sums + row_first * m.group_count : nullptr);
    }
}

#if BATON_AMX
// Groups of whole tiles, of which several are decoded at once.
bool has_groups_of_tiles(const Matrix& m) {
    return m.group_count > 1 && m.format >= CODE8 && m.group_k % 32 == 0 && m.group_count * m.group_k == m.k &&
           m.group_k <= DECODE_STEPS;
}

constexpr int GROUPS_TOGETHER = 2;  // of which a tile's sums are added up at once: these, of 16 KiB, stay in the L1 cache

// total (+)= scale * (acc - zero * sum), group after group, of AMX_ROWS rows of sums per group.
template <int COUNT>
void fold_tile(const Matrix& m, int64_t panel, int64_t group, const float* acc, float* total, int64_t rows,
               const float* sums) {
    constexpr int VECTORS = 2;
    const float* scales = m.scales + (panel * m.group_count + group) * PANEL;
    const float* zeros = m.zeros ? m.zeros + (panel * m.group_count + group) * PANEL : nullptr;
    for (int c = 0; c < PANEL; c += VECTORS * LANES) {
        f32x16 scale[COUNT][VECTORS], zero[COUNT][VECTORS];
        for (int g = 0; g < COUNT; ++g)
            for (int v = 0; v < VECTORS; ++v) {
                scale[g][v] = load16(scales + g * PANEL + c + v * LANES);
                zero[g][v] = zeros ? -load16(zeros + g * PANEL + c + v * LANES) : f32x16{};
            }
        for (int64_t r = 0; r < rows; ++r) {
            f32x16 value[VECTORS];
            float* to = total + r * PANEL + c;
            for (int v = 0; v < VECTORS; ++v) value[v] = group ? load16(to + v * LANES) : f32x16{};
            for (int g = 0; g < COUNT; ++g) {
                const f32x16 sum = zeros ? splat(sums[r * m.group_count + group + g]) : f32x16{};
                for (int v = 0; v < VECTORS; ++v) {
                    f32x16 x = load16(acc + (g * AMX_ROWS + r) * PANEL + c + v * LANES);
                    if (zeros) x = multiply_add(zero[g][v], sum, x);
                    value[v] = multiply_add(scale[g][v], x, value[v]);
                }
            }
            for (int v = 0; v < VECTORS; ++v) store16(to + v * LANES, value[v]);
        }
    }
}

// A tile of rows passes through all groups that are decoded before the next one.
void panel_sums_of_tiled_groups(const Job& job, int64_t tile_first, int64_t tile_end, int64_t panel,
                                const char* next_panel, float* result, const PanelEnd* end) {
    const Matrix& m = *job.m;
    const int64_t row_first = job.row_of_tile(tile_first), tiles = tile_end - tile_first;
    const char* weights = m.panels + panel * m.panel_bytes;
    const int64_t group_steps = m.group_k / 2;
    const int64_t at_once = (tiles > 1 ? DECODE_STEPS : std::max(DECODE_STEPS_OF_TILE, group_steps)) / group_steps;
    const PanelFetch fetch{m, panel, next_panel, job.row_of_tile(tile_end) - row_first, tiles, at_once * group_steps};
    float* acc = static_cast<float*>(thread_scratch(ACC, GROUPS_TOGETHER * AMX_ROWS * PANEL * 4));
    for (int64_t first = 0; first < m.group_count; first += at_once) {
        const int64_t count = std::min(at_once, m.group_count - first), steps = count * group_steps;
        const Block block = block_of(m, weights, first * group_steps, steps, true, false);
        for (int64_t tile = tile_first; tile < tile_end; ++tile) {
            const int64_t row = job.row_of_tile(tile), tile_rows = job.row_of_tile(tile + 1) - row;
            amx::Fetched fetched = fetch.during(first * group_steps, steps, tile - tile_first);
            float* total = result + (row - row_first) * PANEL;
            const float* sums = job.sums ? job.sums + row * m.group_count : nullptr;
            for (int64_t group = first; group < first + count; group += GROUPS_TOGETHER) {
                const int together = static_cast<int>(std::min<int64_t>(GROUPS_TOGETHER, first + count - group));
                for (int g = 0; g < together; ++g) {
                    amx::dot(row_pointer(job.rows, row) + (group + g) * m.group_k * 2, job.rows.stride * 2,
                             static_cast<int>(tile_rows), block.data + (group + g - first) * group_steps * 256,
                             group_steps, nullptr, acc + g * AMX_ROWS * PANEL, PANEL * 4, fetched);
                    fetched.first += group_steps / TILE_DEPTH * fetched.lines;
                }
                static_assert(GROUPS_TOGETHER == 2, "one case each");
                if (together == GROUPS_TOGETHER)
                    fold_tile<GROUPS_TOGETHER>(m, panel, group, acc, total, tile_rows, sums);
                else
                    fold_tile<1>(m, panel, group, acc, total, tile_rows, sums);
            }
            if (end && first + count == m.group_count) (*end)(row, tile_rows, total);
        }
    }
}

// Sums of scaled weights, which are parts of their columns' factors, to what they are.
void unfold_factors(const Matrix& m, int64_t panel, float* sums, int64_t rows) {
    const float* factors = m.factors + panel * PANEL;
    for (int c = 0; c < PANEL; c += LANES) {
        const f32x16 factor = load16(factors + c);
        for (int64_t r = 0; r < rows; ++r) store16(sums + r * PANEL + c, load16(sums + r * PANEL + c) * factor);
    }
}

// Whether a panel's sums are scaled when they are complete.
bool is_scaled_once(const Matrix& m) { return m.group_count == 1 || m.factors; }

void scale_sums(const Job& job, int64_t row, int64_t panel, float* sums, int64_t rows) {
    const Matrix& m = *job.m;
    if (m.factors)
        unfold_factors(m, panel, sums, rows);
    else
        fold_group(m, panel, 0, sums, sums, rows, job.sums ? job.sums + row : nullptr);
}

// What is to be done with the steps of a coded panel.
template <typename Do> void with_steps(const Matrix& m, int64_t panel, Do&& act) {
#if BATON_SCALED
    if (m.factors && m.format == CODE8) return act(amx::ScaledSteps<CODE8>(m, panel));
    if (m.factors) return act(amx::ScaledSteps<CODE4>(m, panel));
#endif
    if (m.format == CODE8) return act(amx::PlainSteps<StepCode8>(m, panel));
    act(amx::PlainSteps<StepCode4>(m, panel));
}

// Up to sixteen rows times a coded panel that has one group, or several of whole tiles.
void panel_sums_of_few(const Job& job, int64_t row, int64_t rows, int64_t panel, float* result, const PanelEnd* end) {
    const Matrix& m = *job.m;
    const bool once = is_scaled_once(m);
    const int64_t tiles = (m.steps + TILE_DEPTH - 1) / TILE_DEPTH;
    const int lines = static_cast<int>(TILE_DEPTH * step_bytes(m.format) / 64);
    const amx::Fetched fetched{m.panels + panel * m.panel_bytes + lines * 64, lines, 0, 1, true};
    float* const acc = once ? result : static_cast<float*>(thread_scratch(ACC, AMX_ROWS * PANEL * 4));
    const float* const sums = job.sums ? job.sums + row * m.group_count : nullptr;
    with_steps(m, panel, [&](auto steps) {
        amx::dot_few_coded(row_pointer(job.rows, row), job.rows.stride * 2, static_cast<int>(rows), steps, tiles,
                           once ? tiles : m.group_k / (2 * TILE_DEPTH), reinterpret_cast<char*>(acc), PANEL * 4, fetched,
                           [&](int64_t group) {
                               if (!once) fold_tile<1>(m, panel, group, acc, result, rows, sums);
                           });
    });
    if (once) scale_sums(job, row, panel, result, rows);
    if (end) (*end)(row, rows, result);
}

// Steps of a panel as tiles read them: others than of bfloat16 are decoded first, and filled up with zeros.
const char* tiles_of(const Matrix& m, int64_t panel, int64_t first, int64_t count) {
    if (m.factors) {
        char* decoded = decoded_block();
        with_steps(m, panel, [&](auto steps) {
            amx::decode_tiles(steps, first / TILE_DEPTH, count / TILE_DEPTH, decoded);
        });
        return decoded;
    }
    const char* block = block_of(m, m.panels + panel * m.panel_bytes, first, count, m.format != DENSE_BF16, false).data;
    if (const int64_t beyond = (count + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH - count; beyond > 0)
        std::memset(const_cast<char*>(block) + count * 256, 0, static_cast<size_t>(beyond) * 256);
    return block;
}

// The same by tiles of AMX, which read bfloat16 weights: others are decoded first, blocks filled up with zeros.
void panel_sums_by_tiles(const Job& job, int64_t tile_first, int64_t tile_end, int64_t panel, const char* next_panel,
                         float* result, const PanelEnd* end) {
    const Matrix& m = *job.m;
    const int64_t row_first = job.row_of_tile(tile_first), rows = job.row_of_tile(tile_end) - row_first;
    const int64_t tiles = tile_end - tile_first;
    const bool coded = m.format >= CODE8, once = is_scaled_once(m);
    if (coded && rows <= TILE_HEIGHT && (once || has_groups_of_tiles(m)))
        return panel_sums_of_few(job, row_first, rows, panel, result, end);
    if (!once && has_groups_of_tiles(m))
        return panel_sums_of_tiled_groups(job, tile_first, tile_end, panel, next_panel, result, end);
    const int64_t groups = once ? 1 : m.group_count, group_steps = once ? m.steps : m.group_k / 2;
    const int64_t decode_max = tiles > 1 ? DECODE_STEPS : DECODE_STEPS_OF_TILE;
    const int64_t block_max = std::min(group_steps, coded                      ? decode_max
                                                    : !goes_by_blocks(m, rows) ? m.steps
                                                    : tiles > 1                ? TILE_STEPS
                                                                               : TILE_STEPS_ALONE);
    const PanelFetch fetch{m, panel, next_panel, rows, tiles, block_max};
    const int64_t a_stride = job.rows.stride * 2;
    float* acc = once ? result : static_cast<float*>(thread_scratch(ACC, static_cast<size_t>(rows) * PANEL * 4));
    // Complete sums of one tile of rows, if they go on to their results at once: these stay in the L1 cache.
    float* const finished = end ? static_cast<float*>(thread_scratch(FINISHED, AMX_ROWS * PANEL * 4)) : nullptr;
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t group_first = group * group_steps, group_end = std::min(m.steps, group_first + group_steps);
        for (int64_t first = group_first; first < group_end; first += block_max) {
            const int64_t count = std::min(block_max, group_end - first);
            const int64_t steps = (count + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH;
            const char* block = tiles_of(m, panel, first, count);
            const int64_t k_first = group * padded_group(m, true) + (first - group_first) * 2;
            const bool finishes = end && once && first + count == group_end;
            for (int64_t tile = tile_first; tile < tile_end; ++tile) {
                const int64_t row = job.row_of_tile(tile), tile_rows = job.row_of_tile(tile + 1) - row;
                float* const sums = acc + (row - row_first) * PANEL;
                float* const to = finishes ? finished : sums;
                amx::dot(row_pointer(job.rows, row) + k_first * 2, a_stride, static_cast<int>(tile_rows), block, steps,
                         first > group_first ? sums : nullptr, to, PANEL * 4,
                         fetch.during(first, count, tile - tile_first));
                if (!finishes) continue;
                if (coded) scale_sums(job, row, panel, to, tile_rows);
                (*end)(row, tile_rows, to);
            }
        }
        if (!once)
            fold_group(m, panel, group, acc, result, rows,
                       job.sums ? job.sums + row_first * m.group_count : nullptr);
        else if (coded && !end)
            scale_sums(job, row_first, panel, result, rows);
    }
    if (end && !once) (*end)(row_first, rows, result);
}
#endif

// The same of bytes.
void panel_sums_of_quads(const Job& job, int64_t tile_first, int64_t tile_end, int64_t panel, const char* next_panel,
                         float* result) {
    const Matrix& m = *job.m;
    const int64_t row_first = job.row_of_tile(tile_first), rows = job.row_of_tile(tile_end) - row_first;
    const int64_t tiles = tile_end - tile_first;
    const char* weights = m.panels + panel * m.panel_bytes;
    const int64_t group_steps = m.group_count > 1 ? m.group_k / 4 : m.steps;
    int64_t block_max = std::min(group_steps, tiles > 1 ? QUAD_STEPS : m.steps);
#if BATON_AMX
    if (job.by_tiles && goes_by_blocks(m, rows))
        block_max = std::min(group_steps, tiles > 1 ? TILE_STEPS : TILE_STEPS_ALONE);
    const PanelFetch fetch{m, panel, next_panel, rows, tiles, block_max};
#endif
    int32_t* acc = static_cast<int32_t*>(thread_scratch(ACC, static_cast<size_t>(rows) * ROW_SUMS * 4));
    for (int64_t group = 0; group < m.group_count; ++group) {
        const int64_t group_first = group * group_steps, group_end = group_first + group_steps;
        for (int64_t first = group_first; first < group_end; first += block_max) {
            const int64_t count = std::min(block_max, group_end - first);
            const int64_t offset = first * 256;
            for (int64_t tile = tile_first; tile < tile_end; ++tile) {
                const int64_t row = job.row_of_tile(tile), tile_rows = job.row_of_tile(tile + 1) - row;
                int32_t* sums = acc + (row - row_first) * ROW_SUMS;
#if BATON_AMX
                if (job.by_tiles) {
                    amx::dot<true>(row_pointer(job.rows, row) + first * QUAD_BYTES, job.rows.stride * QUAD_BYTES,
                                   static_cast<int>(tile_rows), weights + offset, count,
                                   first > group_first ? sums : nullptr, sums, PANEL * 4,
                                   fetch.during(first, count, tile - tile_first));
                    continue;
                }
#endif
                const Prefetch prefetch =
                    prefetch_for(m, weights + offset, next_panel ? next_panel + offset : nullptr, count,
                                 tile - tile_first, tiles);
                const char* a[TALL_ROWS];
                for (int64_t r = 0; r < tile_rows; ++r) a[r] = row_pointer(job.rows, row + r) + first * QUAD_BYTES;
                dot_quads(tile_rows, a, weights + offset, count, sums, first > group_first, prefetch);
            }
        }
        fold_quads(m, panel, group, acc, result, rows, job.row_scales + row_first,
                   job.sums ? job.sums + row_first * m.group_count : nullptr);
    }
}

// Sums of the rows of some tiles times one panel: into `result` [rows][ROW_SUMS], or on to `end`, which sees every row
// once and may find `result` in use.
void sum_panel(const Job& job, int64_t tile_first, int64_t tile_end, int64_t panel, const char* next_panel,
               float* result, const PanelEnd* end) {
#if BATON_AMX
    if (job.by_tiles && job.m->format != QUAD8)
        return panel_sums_by_tiles(job, tile_first, tile_end, panel, next_panel, result, end);
#endif
    if (job.m->format == QUAD8)
        panel_sums_of_quads(job, tile_first, tile_end, panel, next_panel, result);
    else
        panel_sums(job, tile_first, tile_end, panel, {0, part_units(*job.m)}, next_panel, result);
    const int64_t row_first = job.row_of_tile(tile_first);
    if (end) (*end)(row_first, job.row_of_tile(tile_end) - row_first, result);
}

// The sums of some panels are kept while the parts of the inputs take turns; then their results are made.
void run_parts(const Job& job, int64_t tile_first, int64_t tile_end, int64_t panel_first, int64_t panel_end) {
    const Matrix& m = *job.m;
    const int64_t row_first = job.row_of_tile(tile_first), rows = job.row_of_tile(tile_end) - row_first;
    const bool gated = job.out.activation >= 0;
    const int64_t numbers = rows * ROW_SUMS, halves = gated ? 2 : 1, units = part_units(m);
    const int64_t kept = std::clamp<int64_t>(KEPT_BYTES / (halves * numbers * 4), 1, panel_end - panel_first);
    float* const sums = static_cast<float*>(thread_scratch(TOTAL, static_cast<size_t>(kept * numbers) * 4));
    float* const up = gated ? static_cast<float*>(thread_scratch(UP, static_cast<size_t>(kept * numbers) * 4)) : nullptr;
    for (int64_t first = panel_first; first < panel_end; first += kept) {
        const int64_t end = std::min(panel_end, first + kept);
        for (Part part{0, 0}; part.end < units; part.first = part.end) {
            part.end = std::min(units, part.first + job.part);
            for (int64_t panel = first; panel < end; ++panel) {
                const char* weights = m.panels + panel * m.panel_bytes;
                const char* up_weights = weights + job.panel_count * m.panel_bytes;
                const char* next = panel + 1 < end ? weights + m.panel_bytes : nullptr;
                const int64_t at = (panel - first) * numbers;
                panel_sums(job, tile_first, tile_end, panel, part, gated ? up_weights : next, sums + at);
                if (gated) panel_sums(job, tile_first, tile_end, panel + job.panel_count, part, next, up + at);
            }
        }
        for (int64_t panel = first; panel < end; ++panel) {
            const int64_t at = (panel - first) * numbers;
            const PanelEnd finish{&job, panel, gated ? sums + at : nullptr, row_first};
            finish(row_first, rows, (gated ? up : sums) + at);
        }
    }
}

void run_task(const Job& job, int64_t task) {
    const Matrix& m = *job.m;
    const int64_t ranges = (job.panel_count + job.panels_per_task - 1) / job.panels_per_task;
    const int64_t tile_first = task / ranges * job.tiles_per_chunk;
    const int64_t tile_end = std::min(job.tile_count, tile_first + job.tiles_per_chunk);
    const int64_t row_first = job.row_of_tile(tile_first), rows = job.row_of_tile(tile_end) - row_first;
    const int64_t panel_first = task % ranges * job.panels_per_task;
    const int64_t panel_end = std::min(job.panel_count, panel_first + job.panels_per_task);
    if (job.part) return run_parts(job, tile_first, tile_end, panel_first, panel_end);
    const bool gated = job.out.activation >= 0;
    const size_t bytes = static_cast<size_t>(rows) * ROW_SUMS * 4;
    float* sums = static_cast<float*>(thread_scratch(TOTAL, bytes));
    float* up = gated ? static_cast<float*>(thread_scratch(UP, bytes)) : nullptr;
    for (int64_t panel = panel_first; panel < panel_end; ++panel) {
        const char* weights = m.panels + panel * m.panel_bytes;
        const char* next = panel + 1 < job.panel_count ? weights + m.panel_bytes : nullptr;
        const char* up_weights = weights + job.panel_count * m.panel_bytes;
        const PanelEnd end{&job, panel, gated ? sums : nullptr, row_first};
        sum_panel(job, tile_first, tile_end, panel, gated ? up_weights : next, sums, gated ? nullptr : &end);
        if (gated) sum_panel(job, tile_first, tile_end, panel + job.panel_count, next, up, &end);
    }
#if BATON_AMX
    amx::release();
#endif
}

// --- all products ---

// Activations in the matrix's order, as the kernels read them: bfloat16 or float32, groups filled up with zeros.
template <typename T, typename To> void prepare_row(const Matrix& m, const T* from, To* to, bool by_tiles) {
    const int64_t padded = padded_group(m, by_tiles), total = padded_k(m, by_tiles);
    for (int64_t g = 0, start = 0; start < total; ++g, start += padded) {
        const int64_t first = g * m.group_k, end = std::min(m.k, first + m.group_k);
        int64_t i = first;
        To* at = to + start - first;
        if (!m.order) {
            load_row(at + i, from + i, end - i);
            i = end;
        }
        for (; i < end; ++i) {
            const T x = from[m.order[i]];
            if constexpr (std::is_same<T, To>::value)
                at[i] = x;
            else
                at[i] = to_float(x);
        }
        for (; i < first + std::min(padded, total - start); ++i) at[i] = To{0};
    }
}

// Activations for words of eight codes (dot_wide.h).
void divide_for_lanes(const Matrix& m, float* row, int64_t count) {
#if BATON_FEW_SUMS
    if (m.format != LANES4) return;
    constexpr int64_t K = step_k(LANES4);
    static constexpr float FACTORS[K] = {lanes4_factor(0), lanes4_factor(1), lanes4_factor(2), lanes4_factor(3),
                                         lanes4_factor(4), lanes4_factor(5), lanes4_factor(6), lanes4_factor(7)};
    for (int64_t i = 0; i < count; i += K)
        for (int64_t j = 0; j < K; ++j) row[i + j] *= FACTORS[j];
#endif
}
inline void divide_for_lanes(const Matrix&, bf16*, int64_t) {}

// stride: between the groups of a row, which has all k in order.
template <typename T> void sum_groups(const Matrix& m, const T* row, int64_t stride, float* sums) {
    for (int64_t g = 0; g < m.group_count; ++g) {
        f32x16 sum{};
        const int64_t count = std::min(m.k - g * m.group_k, m.group_k);
        for (int64_t i = 0; i < count; i += LANES) sum = sum + load_floats(row + g * stride + i, count - i);
        sums[g] = sum_of(sum);
    }
}

struct Needs {
    bool copy, sums;
    int32_t dtype;  // of the copy
    size_t copy_bytes, sum_bytes;
};

Needs needs_of(const Product& p) {
    const Matrix& m = *p.matrix;
    Needs needs{};
    const bool by_tiles = takes_tiles(m, p.rows.dtype);
    const int64_t k_padded = padded_k(m, by_tiles);
    needs.dtype = BATON_WIDE ? F32 : p.rows.dtype;
    const auto bytes = [](size_t n) { return (n + 63) / 64 * 64; };
    if (m.format == QUAD8) {
        needs.copy = true, needs.sums = m.zeros != nullptr, needs.dtype = QUADS;
        needs.copy_bytes = bytes(static_cast<size_t>(p.rows.count * m.steps * QUAD_BYTES));
        // The rows' scales come before the sums of groups.
        needs.sum_bytes = bytes(static_cast<size_t>(p.rows.count * (1 + (needs.sums ? m.group_count : 0))) * 4);
        return needs;
    }
    needs.copy = m.order || k_padded != m.k || needs.dtype != p.rows.dtype || (by_tiles && p.rows.index) ||
                 (BATON_WIDE && p.rows.count > 1) || m.format == LANES4;
    needs.sums = (m.zeros || m.code_offset != 0) && !(by_tiles && m.factors);  // else the weights have them
    if (needs.copy) needs.copy_bytes = bytes(static_cast<size_t>(p.rows.count * k_padded) * element_bytes(needs.dtype));
    if (needs.sums) needs.sum_bytes = bytes(static_cast<size_t>(p.rows.count * m.group_count) * 4);
    return needs;
}

int64_t tile_count_of(const Matrix& m, int64_t rows, int32_t dtype) {
    const bool by_tiles = takes_tiles(m, dtype);
    const bool is_low = (BATON_FEW_SUMS && dtype != QUADS) || decodes_groups(m, rows, dtype);
    const int64_t rows_of_one = by_tiles ? AMX_ROWS : is_low ? TILE_ROWS : TALL_ROWS;
    const int64_t tile_rows = by_tiles ? AMX_ROWS : TILE_ROWS;
    return rows <= rows_of_one ? 1 : (rows + tile_rows - 1) / tile_rows;
}

// The rows of a tile, `stride` apart, side by side: to[k * rows + r].
template <typename T> void interleave(const T* from, int64_t stride, int64_t rows, int64_t count, T* to) {
    int64_t k = 0;
#if BATON_SIMD256 || BATON_SIMD512
    if (rows > 2 && rows <= 8 && sizeof(T) == 4)
        for (; k + 16 <= count; k += 8) {  // the last numbers of each column are those of the next one's first rows
            const char* at[8];
            for (int64_t r = 0; r < 8; ++r)
                at[r] = reinterpret_cast<const char*>(from + std::min(r, rows - 1) * stride + k);
            __m256i columns[8];
            turn_eight(at, columns);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) _mm256_storeu_si256((__m256i*)(to + (k + i) * rows), columns[i]);
        }
#endif
    for (; k < count; ++k)
        for (int64_t r = 0; r < rows; ++r) to[k * rows + r] = from[r * stride + k];
}

template <typename T, typename To> void prepare(const Product& p, const Needs& needs, To* copy, float* sums) {
    const Matrix& m = *p.matrix;
    const bool by_tiles = takes_tiles(m, p.rows.dtype), is_interleaved = BATON_WIDE && needs.copy;
    const int64_t k_padded = padded_k(m, by_tiles);
    const auto prepare_one = [&](int64_t i, To* to) {
        const T* row = reinterpret_cast<const T*>(row_pointer(p.rows, i));
        if (needs.copy) prepare_row(m, row, to, by_tiles);
        if (needs.sums && m.order)
            sum_groups(m, to, padded_group(m, by_tiles), sums + i * m.group_count);
        else if (needs.sums)
            sum_groups(m, row, m.group_k, sums + i * m.group_count);
        if (needs.copy) divide_for_lanes(m, to, k_padded);
    };
    if (!is_interleaved) {
        parallel_for(p.rows.count, [&](int64_t i, int) { prepare_one(i, copy + i * k_padded); });
        return;
    }
    const int64_t tiles = tile_count_of(m, p.rows.count, p.rows.dtype);
    parallel_for(tiles, [&](int64_t tile, int) {
        const int64_t row = tile * p.rows.count / tiles, rows = (tile + 1) * p.rows.count / tiles - row;
        const size_t bytes = static_cast<size_t>(rows * k_padded) * sizeof(To);
        To* const apart = rows > 1 ? static_cast<To*>(thread_scratch(TOTAL, bytes)) : copy + row * k_padded;
        for (int64_t r = 0; r < rows; ++r) prepare_one(row + r, apart + r * k_padded);
        if (rows > 1) interleave(apart, k_padded, rows, k_padded, copy + row * k_padded);
    });
}

// Rows of activations rounded to 8 bits, with their scales, and sums where the matrix has zeros.
template <typename T> void prepare_quads(const Product& p, char* copy, float* row_scales) {
    const Matrix& m = *p.matrix;
    const int64_t padded = m.steps * 4;
    parallel_for(p.rows.count, [&](int64_t i, int) {
        const T* row = reinterpret_cast<const T*>(row_pointer(p.rows, i));
        quad_input* to = reinterpret_cast<quad_input*>(copy + i * m.steps * QUAD_BYTES);
        if (m.order) {
            T* ordered = static_cast<T*>(thread_scratch(TOTAL, static_cast<size_t>(m.k) * sizeof(T)));
            for (int64_t j = 0; j < m.k; ++j) ordered[j] = row[m.order[j]];
            row = ordered;
        }
        row_scales[i] = round_row(row, m.k, padded, to);
        if (!m.zeros) return;
        float* sums = row_scales + p.rows.count + i * m.group_count;
        for (int64_t g = 0; g < m.group_count; ++g) sums[g] = sum_quads(to + g * m.group_k, m.group_k);
    });
}

bool supported(const Product& p) {
    const Matrix& m = *p.matrix;
    if (m.format == DENSE_F32) return p.rows.dtype == F32;
    if (m.format == DENSE_BF16) return p.rows.dtype == BF16;
    return p.rows.dtype == F32 || p.rows.dtype == BF16;
}

// Groups, or steps, whose activations of so many rows fill the L2 cache as far as they may.
int64_t part_of(const Matrix& m, int64_t rows, int32_t dtype) {
    const int64_t inputs = CHUNK_BYTES / (rows * static_cast<int64_t>(element_bytes(dtype)));
    if (m.group_count > 1) return std::max<int64_t>(1, inputs / m.group_k);
    return std::max<int64_t>(1, inputs / PART_UNIT) * PART_UNIT / step_k(m.format);
}

Job job_of(const Product& p) {
    Job job{};
    job.m = p.matrix, job.rows = p.rows, job.out = p.out;
    const int64_t row_elements = p.rows.dtype == QUADS ? p.matrix->steps : p.matrix->k;
    const int64_t row_bytes = std::max<int64_t>(1, row_elements * static_cast<int64_t>(element_bytes(p.rows.dtype)));
    const int64_t rows_of_all = CHUNK_BYTES / row_bytes;
    const int64_t threads = thread_count();
    job.by_tiles = takes_tiles(*p.matrix, p.rows.dtype);
    const bool in_parts = !job.by_tiles && p.matrix->format != QUAD8 &&
                          rows_of_all < std::min(SHARING_ROWS_MIN, p.rows.count) && p.rows.count > TALL_ROWS;
    const int64_t rows_max = std::clamp<int64_t>(rows_of_all, TALL_ROWS, CHUNK_ROWS_MAX);
    job.tile_count = tile_count_of(*p.matrix, p.rows.count, p.rows.dtype);
    job.panel_count = p.out.activation >= 0 ? p.matrix->panel_count / 2 : p.matrix->panel_count;
    int64_t chunks = (p.rows.count + rows_max - 1) / rows_max;
    if (in_parts || (BATON_FEW_SUMS && is_coded(*p.matrix))) {
        // A chunk reads or decodes the weights once, which is worth more than its activations in the L2 cache, but not
        // more than work for every thread.
        const int64_t fewest = (p.rows.count + CHUNK_ROWS_MAX - 1) / CHUNK_ROWS_MAX;
        const int64_t wanted = (TASKS_OF_SHARING * threads + job.panel_count - 1) / job.panel_count;
        chunks = std::max(fewest, std::min(chunks, wanted));
    }
    // Each thread's rows are those that it computed in the kernel before.
    if (p.rows.count >= threads * ROWS_OF_THREAD_MIN) chunks = (chunks + threads - 1) / threads * threads;
    job.tiles_per_chunk = (job.tile_count + chunks - 1) / chunks;
    job.chunk_count = (job.tile_count + job.tiles_per_chunk - 1) / job.tiles_per_chunk;
    job.part = in_parts ? part_of(*p.matrix, job.tiles_per_chunk * TILE_ROWS, p.rows.dtype) : 0;
    return job;
}

double seconds_estimate(const Job& job) {
    const double bytes = static_cast<double>(job.m->panel_count) * static_cast<double>(job.m->panel_bytes);
    const double flops = 2.0 * static_cast<double>(job.rows.count * job.m->n * job.m->k);
    return bytes / 40e9 + flops / 400e9;
}

void run_jobs(Job* jobs, int64_t count) {
    double seconds = 0;
    int64_t chunks = 0;
    for (int64_t i = 0; i < count; ++i) seconds += seconds_estimate(jobs[i]), chunks += jobs[i].chunk_count;
    const int threads = seconds < PARALLEL_SECONDS_MIN ? 1 : thread_count();
    const int64_t ranges = threads == 1 ? 1 : std::max<int64_t>(1, (TASKS_PER_THREAD * threads + chunks - 1) / chunks);
    int64_t tasks = 0;
    for (int64_t i = 0; i < count; ++i) {
        Job& job = jobs[i];
        job.panels_per_task = std::max<int64_t>(1, (job.panel_count + ranges - 1) / ranges);
        job.tasks = job.chunk_count * ((job.panel_count + job.panels_per_task - 1) / job.panels_per_task);
        tasks += job.tasks;
    }
    const auto run = [&](int64_t task, int) {
        const Job* job = jobs;
        for (; task >= job->tasks; ++job) task -= job->tasks;
        run_task(*job, task);
    };
    if (threads == 1)
        for (int64_t task = 0; task < tasks; ++task) run(task, 0);
    else
        parallel_for(tasks, run);
}

// Case in which gate and up do not both begin at a panel: the plain product in float32, then the activation.
bool is_split(const Product& p) { return p.out.activation >= 0 && p.matrix->n / 2 % PANEL != 0; }

void gate_wide(const Product& p, const float* wide) {
    const int64_t half = p.matrix->n / 2;
    parallel_for(p.rows.count, [&](int64_t i, int) {
        float* gate = const_cast<float*>(wide) + i * 2 * half;
        gate_rows(p.out.activation, gate, gate + half, half);
        const int64_t at = i * p.out.stride;
        if (p.out.dtype == F32)
            store_row(static_cast<float*>(p.out.base) + at, gate, half);
        else
            store_row(static_cast<bf16*>(p.out.base) + at, gate, half);
    });
}

}  // namespace

bool multiply(const Product* products, int64_t count) {
    constexpr int64_t BATCH = 128;
    if (count > BATCH) return multiply(products, BATCH) && multiply(products + BATCH, count - BATCH);
    Job jobs[BATCH];
    size_t copy_bytes = 0, sum_bytes = 0, wide_bytes = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (!supported(products[i])) return false;
        const Needs needs = needs_of(products[i]);
        copy_bytes += needs.copy_bytes, sum_bytes += needs.sum_bytes;
        if (is_split(products[i])) wide_bytes += static_cast<size_t>(products[i].rows.count * products[i].matrix->n) * 4;
    }
    char* copy = copy_bytes ? static_cast<char*>(thread_scratch(PREPARED, copy_bytes)) : nullptr;
    char* sums = sum_bytes ? static_cast<char*>(thread_scratch(SUMS, sum_bytes)) : nullptr;
    float* wide = wide_bytes ? static_cast<float*>(thread_scratch(WIDE_OUT, wide_bytes)) : nullptr;
    int64_t job_count = 0;
    for (int64_t i = 0; i < count; ++i) {
        Product p = products[i];
        if (p.rows.count == 0 || p.matrix->n == 0) continue;
        const Needs needs = needs_of(p);
        if (needs.dtype == QUADS) {
            float* const row_scales = reinterpret_cast<float*>(sums);
            if (p.rows.dtype == F32)
                prepare_quads<float>(p, copy, row_scales);
            else
                prepare_quads<bf16>(p, copy, row_scales);
        } else if (needs.copy || needs.sums) {
            float* const group_sums = reinterpret_cast<float*>(sums);
            if (p.rows.dtype == F32)
                prepare<float>(p, needs, reinterpret_cast<float*>(copy), group_sums);
            else if (needs.dtype == F32)
                prepare<bf16>(p, needs, reinterpret_cast<float*>(copy), group_sums);
            else
                prepare<bf16>(p, needs, reinterpret_cast<bf16*>(copy), group_sums);
        }
        const bool by_tiles = takes_tiles(*p.matrix, p.rows.dtype);
        const int64_t stride = needs.dtype == QUADS ? p.matrix->steps : padded_k(*p.matrix, by_tiles);
        if (needs.copy) p.rows = {copy, p.rows.count, stride, nullptr, needs.dtype};
        if (is_split(p)) p.out = {wide, p.matrix->n, F32, nullptr, -1}, wide += p.rows.count * p.matrix->n;
        Job& job = jobs[job_count++] = job_of(p);
        const float* const found = reinterpret_cast<const float*>(sums);
        job.row_scales = needs.dtype == QUADS ? found : nullptr;
        job.sums = !needs.sums ? nullptr : needs.dtype == QUADS ? found + p.rows.count : found;
        copy += needs.copy_bytes, sums += needs.sum_bytes;
    }
    run_jobs(jobs, job_count);
    wide = wide_bytes ? static_cast<float*>(thread_scratch(WIDE_OUT, wide_bytes)) : nullptr;
    for (int64_t i = 0; wide && i < count; ++i)
        if (is_split(products[i])) {
            gate_wide(products[i], wide);
            wide += products[i].rows.count * products[i].matrix->n;
        }
    return true;
}

}  // namespace baton

// out [rows, n] = x [rows, k] @ W.T + bias (+ residual), or with activation >= 0 [rows, n / 2]. Strides in
// elements. Returns 0, or 1 when x's dtype does not go with the matrix.
BATON_API int32_t baton_linear(const void* matrix, const void* x, int64_t rows, int64_t x_stride, int32_t x_dtype,
                               void* out, int64_t out_stride, int32_t out_dtype, const void* residual,
                               int32_t activation) {
    const baton::Product product{static_cast<const baton::Matrix*>(matrix),
                                 {x, rows, x_stride, nullptr, x_dtype},
                                 {out, out_stride, out_dtype, residual, activation}};
    return baton::multiply(&product, 1) ? 0 : 1;
}
