// Products of up to 32 rows by tiles of AMX, for matrices (multiply.cpp) and for attention (attention_tile.h).
//
// Weights, keys and values lie as everywhere: step s of a panel is 64 columns of four bytes, two bfloat16 along
// k. Sixteen steps of sixteen columns are a tile as they stand. An element's sum is a chain over tiles
// of sixteen steps that begin at multiples of sixteen, the same for every number of rows.
#pragma once

#include "amx.h"
#include "simd.h"

#if BATON_AMX
namespace baton::amx {

constexpr int COLUMNS = 64, STEP_BYTES = 256;
constexpr int ROWS_MAX = 2 * TILE_HEIGHT;

// What tiles are in force on this thread: those of `configure`, or of `configure_columns`. All zero: none.
struct Configured {
    int upper = 0, lower = 0, columns = 0;
};
inline thread_local Configured configured;

// Up to 16 rows: tiles 0 … 3 are the sums of all columns, 4 activations, 5 … 7 weights. With more: tiles 0 and 1
// are those of the upper rows and half of the columns, 2 and 3 of the lower ones, 4 and 5 activations, 6 and 7 weights.
inline void configure(int upper, int lower) {
    if (configured.upper == upper && configured.lower == lower) return;
    TileConfig config;
    for (int t = 0; t < 8; ++t) {
        config.row_bytes[t] = TILE_ROW_BYTES;
        config.rows[t] = static_cast<uint8_t>(upper);
    }
    if (lower) config.rows[2] = config.rows[3] = config.rows[5] = static_cast<uint8_t>(lower);
    config.rows[6] = config.rows[7] = TILE_DEPTH;
    if (!lower) config.rows[5] = TILE_DEPTH;
    BATON_TILE_CONFIG(&config);
    configured = {upper, lower, 0};
}

// Tiles 0 … 3 are the sums of sixteen rows each by up to sixteen columns, 4 and 5 the rows, 6 and 7 the columns.
inline void configure_columns(int columns) {
    if (configured.columns == columns) return;
    TileConfig config;
    for (int t = 0; t < 8; ++t) {
        config.row_bytes[t] = static_cast<uint16_t>(t == 4 || t == 5 ? TILE_ROW_BYTES : 4 * columns);
        config.rows[t] = TILE_HEIGHT;
    }
    BATON_TILE_CONFIG(&config);
    configured = {0, 0, columns};
}

// Tiles are given back when a thread ends a task: what they hold makes a switch of threads dearer.
inline void release() {
    if (!configured.upper && !configured.columns) return;
    BATON_TILE_RELEASE();
    configured = {};
}

// What is fetched into the caches meanwhile. Spread evenly over the products: in bursts it takes the buffers that
// their own loads need. A processor fetches ahead by itself within a page of memory, and so in several pages at once
// only if several are being read: in turn from them, a core reads up to a third more per second than from one.
struct Fetched {
    const char* from;  // null: nothing
    int lines;         // per tile of weights, sixteen steps
    int64_t first = 0;  // of the lines of `from` that are fetched
    int pages = 1;      // that take turns, where the lines are those of a block
    bool is_stream = false;  // lines of the pieces after `from`, which is read meanwhile: see `fetch_pieces`
};

constexpr int PIECES = 8;
constexpr int PAGE_LINES = 64;

// The lines `begin` to `end` of as many as a piece has. While one piece is read, each of the PIECES after it gets
// another PIECES-th part: the nearest its last one, the farthest its first.
BATON_INLINE void fetch_pieces(const char* here, int lines, int begin, int end) {
    const int each = lines / PIECES;
    for (int i = begin; i < end; ++i) {
        const int k = i % PIECES;
        __builtin_prefetch(here + (lines * (1 + k) + each * (PIECES - 1 - k) + i / PIECES) * 64, 0, 3);
    }
}

// `done` lines are fetched; now those that follow, from number `begin` to `end`. Of a stream: of its piece at `done`.
BATON_INLINE void fetch_lines(const Fetched& fetched, int64_t done, int begin, int end) {
    if (!fetched.from) return;
    done += fetched.first;
    if (fetched.is_stream) return fetch_pieces(fetched.from + done * 64, fetched.lines, begin, end);
    if (fetched.pages == 1) {
        for (int i = begin; i < end; ++i) __builtin_prefetch(fetched.from + (done + i) * 64, 0, 2);
        return;
    }
    const auto at = static_cast<uint32_t>(done + begin), pages = static_cast<uint32_t>(fetched.pages);
    uint32_t line = at / pages, page = at % pages;
    for (int i = begin; i < end; ++i) {
        __builtin_prefetch(fetched.from + (page * PAGE_LINES + line) * 64, 0, 2);
        if (++page == pages) page = 0, ++line;
    }
}

// BYTES: of bytes, else of bfloat16.
#define BATON_TILE_PRODUCT(sum, a, b)     \
    do {                                  \
        if constexpr (BYTES)              \
            BATON_TILE_BYTES(sum, a, b);  \
        else                              \
            BATON_TILE_BF16(sum, a, b);   \
    } while (0)

template <bool BYTES>
void dot_few(const char* a, int64_t a_stride, int rows, const char* panel, int64_t steps, const char* before,
             char* sums, int64_t c_stride, Fetched fetched) {
    configure(rows, 0);
    const int quarter = fetched.lines / 4;
    if (before) {
        BATON_TILE_LOAD(0, before, c_stride);
        BATON_TILE_LOAD(1, before + 64, c_stride);
        BATON_TILE_LOAD(2, before + 128, c_stride);
        BATON_TILE_LOAD(3, before + 192, c_stride);
    } else {
        BATON_TILE_ZERO(0);
        BATON_TILE_ZERO(1);
        BATON_TILE_ZERO(2);
        BATON_TILE_ZERO(3);
    }
    for (int64_t s = 0; s < steps; s += TILE_DEPTH) {
        const char* b = panel + s * STEP_BYTES;
        const int64_t done = s / TILE_DEPTH * fetched.lines;
        BATON_TILE_LOAD(4, a + 4 * s, a_stride);
        BATON_TILE_LOAD(5, b, STEP_BYTES);
        BATON_TILE_PRODUCT(0, 4, 5);
        fetch_lines(fetched, done, 0, quarter);
        BATON_TILE_LOAD(6, b + 64, STEP_BYTES);
        BATON_TILE_PRODUCT(1, 4, 6);
        fetch_lines(fetched, done, quarter, 2 * quarter);
        BATON_TILE_LOAD(7, b + 128, STEP_BYTES);
        BATON_TILE_PRODUCT(2, 4, 7);
        fetch_lines(fetched, done, 2 * quarter, 3 * quarter);
        BATON_TILE_LOAD(5, b + 192, STEP_BYTES);
        BATON_TILE_PRODUCT(3, 4, 5);
        fetch_lines(fetched, done, 3 * quarter, fetched.lines);
    }
    BATON_TILE_STORE(0, sums, c_stride);
    BATON_TILE_STORE(1, sums + 64, c_stride);
    BATON_TILE_STORE(2, sums + 128, c_stride);
    BATON_TILE_STORE(3, sums + 192, c_stride);
}

template <bool BYTES>
void dot_many(const char* a, int64_t a_stride, int rows, const char* panel, int64_t steps, const char* before,
              char* sums, int64_t c_stride, Fetched fetched) {
    configure(TILE_HEIGHT, rows - TILE_HEIGHT);
    const char* lower_a = a + TILE_HEIGHT * a_stride;
    const int lines = fetched.lines / 2;  // a step is passed twice
    for (int half = 0; half < 2; ++half) {
        char* upper = sums + 128 * half;
        char* lower = upper + TILE_HEIGHT * c_stride;
        if (before) {
            const char* upper_before = before + 128 * half;
            const char* lower_before = upper_before + TILE_HEIGHT * c_stride;
            BATON_TILE_LOAD(0, upper_before, c_stride);
            BATON_TILE_LOAD(1, upper_before + 64, c_stride);
            BATON_TILE_LOAD(2, lower_before, c_stride);
            BATON_TILE_LOAD(3, lower_before + 64, c_stride);
        } else {
            BATON_TILE_ZERO(0);
            BATON_TILE_ZERO(1);
            BATON_TILE_ZERO(2);
            BATON_TILE_ZERO(3);
        }
        for (int64_t s = 0; s < steps; s += TILE_DEPTH) {
            const char* b = panel + s * STEP_BYTES + 128 * half;
            const int64_t done = (half * steps + s) / TILE_DEPTH * lines;
            BATON_TILE_LOAD(4, a + 4 * s, a_stride);
            BATON_TILE_LOAD(6, b, STEP_BYTES);
            BATON_TILE_PRODUCT(0, 4, 6);
            fetch_lines(fetched, done, 0, lines / 2);
            BATON_TILE_LOAD(7, b + 64, STEP_BYTES);
            BATON_TILE_PRODUCT(1, 4, 7);
            BATON_TILE_LOAD(5, lower_a + 4 * s, a_stride);
            BATON_TILE_PRODUCT(2, 5, 6);
            BATON_TILE_PRODUCT(3, 5, 7);
            fetch_lines(fetched, done, lines / 2, lines);
        }
        BATON_TILE_STORE(0, upper, c_stride);
        BATON_TILE_STORE(1, upper + 64, c_stride);
        BATON_TILE_STORE(2, lower, c_stride);
        BATON_TILE_STORE(3, lower + 64, c_stride);
    }
}

// Between what vectors write and tiles read, and the reverse: the compiler does not see what the tiles' instructions
// read and write.
BATON_INLINE void settle_memory() { asm volatile("" ::: "memory"); }

// sums[r][c] = before[r][c] + sum over the steps, a multiple of 16; without `before`, from zero; the two may be one.
// Strides in bytes. The rows of `a` hold four bytes a step: two bfloat16, or four bytes without a sign, whose sums are
// integers.
template <bool BYTES = false>
void dot(const void* a, int64_t a_stride, int rows, const char* panel, int64_t steps, const void* before, void* sums,
         int64_t c_stride, Fetched fetched) {
    settle_memory();
    const char* from = static_cast<const char*>(a);
    const auto* old = static_cast<const char*>(before);
    char* to = static_cast<char*>(sums);
    if (rows > TILE_HEIGHT)
        dot_many<BYTES>(from, a_stride, rows, panel, steps, old, to, c_stride, fetched);
    else
        dot_few<BYTES>(from, a_stride, rows, panel, steps, old, to, c_stride, fetched);
    settle_memory();
}

// Part `part` of `parts` of the memory of sixteen rows. Spread between products: in bursts the requests wait for one
// another, and the products for them.
BATON_INLINE void fetch_rows(const char* from, int64_t row_bytes, int64_t part, int64_t parts) {
    if (!from) return;
    const int64_t bytes = TILE_HEIGHT * row_bytes / parts;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + part * bytes + i, 0, 3);
}

// A product of up to 32 rows and some panels, done a few tiles at a time: what vectors compute can go on between them.
// The panels are `panel_bytes` apart, their sums side by side. See `dot`.
class Unfinished {
  public:
    Unfinished() = default;
    Unfinished(const void* a, int64_t a_stride, int rows, const void* panels, int64_t panel_bytes, int panel_count,
               int64_t steps, void* sums, int64_t c_stride, bool accumulate)
        : a_(static_cast<const char*>(a)), a_stride_(a_stride), panels_(static_cast<const char*>(panels)),
          panel_bytes_(panel_bytes), steps_(steps), sums_(static_cast<char*>(sums)), c_stride_(c_stride), rows_(rows),
          half_end_(2 * panel_count), accumulate_(accumulate) {}

    // Pieces of work that are left.
    int64_t left() const { return (half_end_ - half_) * (steps_ / TILE_DEPTH) - step_ / TILE_DEPTH; }

    // Does one piece: a step's tiles of half a panel. False: nothing is left.
    BATON_INLINE bool advance() {
        if (half_ == half_end_) return false;
        const char* b = panels_ + half_ / 2 * panel_bytes_ + half_ % 2 * 128;
        char* sums = sums_ + 128 * half_;
        if (rows_ <= TILE_HEIGHT) return advance_whole_panel(b, sums);
        if (step_ == 0) begin(sums);
        b += step_ * STEP_BYTES;
        BATON_TILE_LOAD(4, a_ + 4 * step_, a_stride_);
        BATON_TILE_LOAD(6, b, STEP_BYTES);
        BATON_TILE_BF16(0, 4, 6);
        BATON_TILE_LOAD(7, b + 64, STEP_BYTES);
        BATON_TILE_BF16(1, 4, 7);
        BATON_TILE_LOAD(5, a_ + TILE_HEIGHT * a_stride_ + 4 * step_, a_stride_);
        BATON_TILE_BF16(2, 5, 6);
        BATON_TILE_BF16(3, 5, 7);
        step_ += TILE_DEPTH;
        if (step_ == steps_) end(sums);
        return true;
    }

  private:
    void begin(const char* sums) {
        configure(TILE_HEIGHT, rows_ - TILE_HEIGHT);
        if (accumulate_) {
            const char* lower = sums + TILE_HEIGHT * c_stride_;
            BATON_TILE_LOAD(0, sums, c_stride_);
            BATON_TILE_LOAD(1, sums + 64, c_stride_);
            BATON_TILE_LOAD(2, lower, c_stride_);
            BATON_TILE_LOAD(3, lower + 64, c_stride_);
        } else {
            BATON_TILE_ZERO(0);
            BATON_TILE_ZERO(1);
            BATON_TILE_ZERO(2);
            BATON_TILE_ZERO(3);
        }
    }

    void end(char* sums) {
        char* lower = sums + TILE_HEIGHT * c_stride_;
        BATON_TILE_STORE(0, sums, c_stride_);
        BATON_TILE_STORE(1, sums + 64, c_stride_);
        BATON_TILE_STORE(2, lower, c_stride_);
        BATON_TILE_STORE(3, lower + 64, c_stride_);
        step_ = 0;
        ++half_;
    }

    bool advance_whole_panel(const char* panel, char* sums) {
        dot_few<false>(a_, a_stride_, rows_, panel, steps_, accumulate_ ? sums : nullptr, sums, c_stride_, {nullptr, 0});
        half_ += 2;
        return true;
    }

    const char* a_ = nullptr;
    int64_t a_stride_ = 0;
    const char* panels_ = nullptr;
    int64_t panel_bytes_ = 0, steps_ = TILE_DEPTH;
    char* sums_ = nullptr;
    int64_t c_stride_ = 0, step_ = 0;
    int rows_ = 0, half_ = 0, half_end_ = 0;
    bool accumulate_ = false;
};

// Four groups of sixteen rows each; null: there is none.
struct Groups {
    const char* rows[4] = {};
};

// sums[g][r][c] = row r of group g times column c. Rows lie as they were stored, `row_bytes` apart; groups that there
// are come first. columns: step s of column c at [s][c]; their number is a multiple of 4. An element's chain is that
// of `dot`, where these rows would be columns: a product's factors may change places. `next` is fetched meanwhile.
inline void dot_stored(const Groups& groups, int64_t row_bytes, const char* columns, int column_count, int64_t steps,
                       char* sums, const Groups& next) {
    settle_memory();
    configure_columns(column_count);
    const int64_t stride = 4 * column_count, bytes = TILE_HEIGHT * stride;
#define BATON_GROUP_PRODUCT(group, rows_tile, columns_tile)                             \
    do {                                                                                \
        if (!groups.rows[group]) break;                                                 \
        BATON_TILE_ZERO(group);                                                         \
        for (int64_t s = 0; s < steps; s += TILE_DEPTH) {                               \
            BATON_TILE_LOAD(columns_tile, columns + s * stride, stride);                \
            BATON_TILE_LOAD(rows_tile, groups.rows[group] + 4 * s, row_bytes);          \
            BATON_TILE_BF16(group, rows_tile, columns_tile);                            \
            fetch_rows(next.rows[group], row_bytes, s / TILE_DEPTH, steps / TILE_DEPTH);\
        }                                                                               \
        BATON_TILE_STORE(group, sums + group * bytes, stride);                          \
    } while (0)
    BATON_GROUP_PRODUCT(0, 4, 6);
    BATON_GROUP_PRODUCT(1, 5, 7);
    BATON_GROUP_PRODUCT(2, 4, 6);
    BATON_GROUP_PRODUCT(3, 5, 7);
#undef BATON_GROUP_PRODUCT
    settle_memory();
}

}  // namespace baton::amx
#endif
