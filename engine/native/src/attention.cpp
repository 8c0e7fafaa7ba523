// Causal attention straight from the paged pool.
//
// Flash attention (arXiv 2205.14135, 2307.08691) over tiles of keys that start at multiples of TILE_KEYS, with
// the running maximum and sum in fp32. Tiles are grouped into splits that start at multiples of
// SPLIT_KEYS; each split's softmax is computed by itself and the splits are merged in order, so that a
// long context can be shared out over the threads (flash-decoding) without changing a bit.
//
// A query's result is a function of its position and its sequence's keys alone. Tiles and splits lie at
// absolute positions, products do not depend on their company (attention_tile.h), and keys a query must
// not see change nothing where others of its tile of queries see them: their weight is exactly 0, and a
// tile of such keys leaves maximum, sum and result as they are.
#include "attention_pack.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>
#include <vector>

namespace baton::attention {
namespace {

#if BATON_BF16_PRODUCTS
using PairProducts = Bf16Products;
#else
using PairProducts = Float32Products;
#endif

constexpr int ROWS_OF_TASK = BATON_TILED_PAIRS ? 192 : 96;  // at most; keys are packed once for them
constexpr int64_t SPLIT_KEYS = 512;
constexpr int TILES_OF_SPLIT = SPLIT_KEYS / TILE_KEYS;
constexpr int FEW_ROWS = 16;  // at most, of tasks whose keys are multiplied as they lie: `Attend::attend_stored`
// Rows whose scores or weights are kept at once. With tiles these are two parts, or few rows by all tiles of a split.
constexpr int ROWS_AT_ONCE = BATON_TILED_PAIRS ? TILES_OF_SPLIT * FEW_ROWS : std::max(Float32Products::ROWS, PairProducts::ROWS);
static_assert(!BATON_TILED_PAIRS || ROWS_AT_ONCE >= 2 * PairProducts::ROWS, "two parts");
constexpr float EMPTY = -1e38f;  // a maximum of nothing; finite, so that differences are no NaN
constexpr float LOG2_E = 1.44269504088896341f;
constexpr int GROUPS = TILE_KEYS / LANES;
constexpr int64_t ROW_BYTES_MAX = 8192;
alignas(64) const char ZEROS[ROW_BYTES_MAX] = {};

struct Call {
    const char* q;  // [T, H, D], tokens q_stride elements apart
    int64_t q_stride;
    char* out;           // [T, H, value_dim]
    const float* sinks;  // [H] or null
    int64_t layer, heads, window;
    float scale, softcap;
};

// Query rows of one sequence and key-value head: row r is query head r % group of token r / group.
struct Task {
    int32_t span, head;
    int32_t row, row_end;
    int32_t split, split_end;
    int64_t partial;  // where its splits' results go, in rows of `Job::partials`; below 0: it is whole
};

int64_t rounded_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

struct Job {
    const KvPool& pool;
    const Batch& batch;
    const Call& call;
    int64_t group;         // query heads per key-value head
    int64_t rows_max;      // per task
    int64_t units;         // of a key, filled up to whole tiles where they are used
    int64_t filled_units;  // that it has
    int64_t result_width;  // value_dim, up to whole panels
    bool is_paired;        // computed with PairProducts
    float* partials = nullptr;

    // A result with its maximum and sum, in floats.
    int64_t partial_width() const { return result_width + 2; }
};

int64_t position_of(const Job& job, const Span& span, int64_t row) {
    return span.first_position + row / job.group;
}

// The oldest key that a task's rows see.
int64_t oldest_key(const Job& job, const Span& span, int64_t row) {
    const int64_t first = position_of(job, span, row), window = job.call.window;
    return window && first >= window ? first - window + 1 : 0;
}

// Start of a task's keys.
int64_t first_tile(const Job& job, const Task& task) {
    const int64_t oldest = oldest_key(job, job.batch.spans[task.span], task.row);
    return std::max(oldest / TILE_KEYS * TILE_KEYS, task.split * SPLIT_KEYS);
}

// Softmax over some keys: results are not divided by the sums yet.
struct State {
    float* maxima;   // [rows], of scores in units of log 2
    float* sums;     // [rows]
    float* results;  // [rows, result_width]
};

struct Scratch {
    unit* queries;
    unit* keys;
    unit* values;
    float* scores;           // [ROWS_AT_ONCE, TILE_KEYS]
    unit* weights;           // [ROWS_AT_ONCE, TILE_KEYS]
    unit* columns;           // [units, FEW_ROWS]: the queries of a few rows, as columns
    float* turned_scores;    // [SPLIT_KEYS, FEW_ROWS]
    float* lane_sums;        // [rows, LANES]
    float* score_factors;    // [TILE_KEYS]
    float* value_factors;    // [TILE_KEYS]
    const char** key_rows;   // [TILE_KEYS]
    State whole, split;
};

class Carver {
  public:
    explicit Carver(char* memory) : memory_(memory) {}
    template <typename T> T* take(int64_t count) {
        char* start = memory_ ? memory_ + used_ : nullptr;
        used_ += rounded_up(count * static_cast<int64_t>(sizeof(T)), 64);
        return reinterpret_cast<T*>(start);
    }
    int64_t used() const { return used_; }

  private:
    char* memory_;
    int64_t used_ = 0;
};

State carve_state(Carver& carver, const Job& job) {
    return {carver.take<float>(job.rows_max), carver.take<float>(job.rows_max),
            carver.take<float>(job.rows_max * job.result_width)};
}

Scratch carve(Carver& carver, const Job& job) {
    Scratch s;
    s.queries = carver.take<unit>(job.rows_max * job.units);
    s.keys = carver.take<unit>(TILE_KEYS * job.units);
    s.values = carver.take<unit>(TILE_KEYS * job.result_width);
    s.scores = carver.take<float>(ROWS_AT_ONCE * TILE_KEYS);
    s.weights = carver.take<unit>(ROWS_AT_ONCE * TILE_KEYS);
    s.columns = carver.take<unit>(BATON_TILED_PAIRS ? job.units * FEW_ROWS : 0);
    s.turned_scores = carver.take<float>(BATON_TILED_PAIRS ? SPLIT_KEYS * FEW_ROWS : 0);
    s.lane_sums = carver.take<float>(job.rows_max * LANES);
    s.score_factors = carver.take<float>(TILE_KEYS);
    s.value_factors = carver.take<float>(TILE_KEYS);
    s.key_rows = carver.take<const char*>(TILE_KEYS);
    s.whole = carve_state(carver, job);
    s.split = carve_state(carver, job);
    return s;
}

// total (+)= part, row by row; both stay unnormalised. An empty side changes nothing, bit for bit.
void merge_row(float& maximum, float& sum, float* result, float part_maximum, float part_sum, const float* part,
               int64_t width) {
    const float both = maximum > part_maximum ? maximum : part_maximum;
    const float keep = exp2_1(maximum - both), add = exp2_1(part_maximum - both);
    maximum = both;
    sum = sum * keep + part_sum * add;
    for (int64_t c = 0; c < width; c += LANES)
        store16(result + c, load16(result + c) * splat(keep) + load16(part + c) * splat(add));
}

template <typename T> void write_result(T* out, const float* result, float factor, int64_t width, bool is_paired) {
    for (int64_t c = 0; c < width; c += 2 * LANES) {
        f32x16 a = load16(result + c), b = load16(result + c + LANES);
        if (is_paired) PairProducts::in_order(a, b);
        store_floats(out + c, a * splat(factor), width - c);
        if (width - c > LANES) store_floats(out + c + LANES, b * splat(factor), width - c - LANES);
    }
}

// Divides by the sum, sink included, and writes the row where it belongs.
void finish_row(const Job& job, const Task& task, int64_t row, float maximum, float sum, const float* result) {
    const Call& call = job.call;
    const Span& span = job.batch.spans[task.span];
    const int64_t head = task.head * job.group + row % job.group;
    float factor;
    if (call.sinks) {
        const float sink = call.sinks[head] * LOG2_E;
        const float both = maximum > sink ? maximum : sink;
        const float keep = exp2_1(maximum - both);
        factor = keep / (sum * keep + exp2_1(sink - both));
    } else {
        factor = 1.0f / sum;
    }
    const int64_t width = job.pool.value_dim;
    const int64_t at = ((span.first_row + row / job.group) * call.heads + head) * width;
    if (job.pool.dtype == BF16)
        write_result(reinterpret_cast<bf16*>(call.out) + at, result, factor, width, job.is_paired);
    else
        write_result(reinterpret_cast<float*>(call.out) + at, result, factor, width, job.is_paired);
}

// What else is done while the scores of a part of rows become weights: `between` is called so often meanwhile.
constexpr int TIMES_BETWEEN = 4;
struct NothingBeside {
    void between() {}
};
#if BATON_TILED_PAIRS
class ProductsBeside {
  public:
    ProductsBeside(const amx::Unfinished& first, const amx::Unfinished& second)
        : first_(first), second_(second), at_once_((first.left() + second.left() + TIMES_BETWEEN - 1) / TIMES_BETWEEN) {}
    BATON_INLINE void between() {
        for (int64_t i = 0; i < at_once_; ++i)
            if (!first_.advance()) second_.advance();
    }
    void finish() {
        while (first_.advance()) {
        }
        while (second_.advance()) {
        }
    }

  private:
    amx::Unfinished first_, second_;
    int64_t at_once_;
};
#endif

template <typename Products, typename Activation, typename Stored> class Attend {
  public:
    // following: what this thread is likely to compute next, or null.
    Attend(const Job& job, const Task& task, const Task* following)
        : job_(job), task_(task), pool_(job.pool), span_(job.batch.spans[task.span]),
          table_(job.batch.tables + span_.first_block), following_(following) {
        Carver sizes(nullptr);
        carve(sizes, job);
        Carver carver(static_cast<char*>(thread_scratch(0, static_cast<size_t>(sizes.used()))));
        scratch_ = carve(carver, job);
        newest_ = position_of(task.row_end - 1);
    }

    void run() {
        load_queries();
        if (is_stored_multiplied()) turn_queries();
        const int64_t rows = task_.row_end - task_.row;
        for (int64_t split = task_.split; split < task_.split_end; ++split) {
            const bool is_first = split == task_.split;
            State& state = task_.partial < 0 && is_first ? scratch_.whole : scratch_.split;
            attend_split(split, state);
            if (task_.partial >= 0)
                keep_partial(state, task_.partial + (split - task_.split) * rows);
            else if (!is_first)
                for (int64_t r = 0; r < rows; ++r)
                    merge_row(scratch_.whole.maxima[r], scratch_.whole.sums[r], result(scratch_.whole, r),
                              state.maxima[r], state.sums[r], result(state, r), job_.result_width);
        }
        if (task_.partial >= 0) return;
        const State& whole = scratch_.whole;
        for (int64_t r = 0; r < rows; ++r)
            finish_row(job_, task_, task_.row + r, whole.maxima[r], whole.sums[r], result(whole, r));
    }

  private:
    int64_t position_of(int64_t row) const { return baton::attention::position_of(job_, span_, row); }
    float* result(const State& state, int64_t row) const { return state.results + row * job_.result_width; }

    void load_queries() {
        const int64_t dim = pool_.head_dim;
        for (int64_t row = task_.row; row < task_.row_end; ++row) {
            const int64_t token = span_.first_row + row / job_.group;
            const int64_t head = task_.head * job_.group + row % job_.group;
            const Activation* from =
                reinterpret_cast<const Activation*>(job_.call.q) + token * job_.call.q_stride + head * dim;
            unit* to = scratch_.queries + (row - task_.row) * job_.units;
            const int64_t whole = dim / Products::PER_UNIT;
            std::memset(to + whole, 0, static_cast<size_t>(job_.units - whole) * 4);
            if constexpr (Products::PER_UNIT == 1)
                for (int64_t i = 0; i < dim; ++i) reinterpret_cast<float*>(to)[i] = to_float(from[i]);
            else
                std::memcpy(to, from, static_cast<size_t>(dim) * sizeof(Activation));
        }
    }

    void keep_partial(const State& state, int64_t at) {
        for (int64_t r = 0; r < task_.row_end - task_.row; ++r) {
            float* to = job_.partials + (at + r) * job_.partial_width();
            std::memcpy(to, result(state, r), static_cast<size_t>(job_.result_width) * 4);
            to[job_.result_width] = state.maxima[r];
            to[job_.result_width + 1] = state.sums[r];
        }
    }

    void attend_split(int64_t split, State& state) {
        const int64_t rows = task_.row_end - task_.row;
        for (int64_t r = 0; r < rows; ++r) state.maxima[r] = EMPTY;
        std::memset(scratch_.lane_sums, 0, static_cast<size_t>(rows * LANES) * 4);
        std::memset(state.results, 0, static_cast<size_t>(rows * job_.result_width) * 4);
        const int64_t end = std::min<int64_t>((split + 1) * SPLIT_KEYS, newest_ + 1);
        const int64_t start = std::max(split * SPLIT_KEYS, first_tile(job_, task_));
        if (is_stored_multiplied())
            attend_stored(split, start, end, state);
        else
            for (int64_t tile = start; tile < end; tile += TILE_KEYS) {
                find_rows(tile, end);
                find_next(tile + TILE_KEYS);
                attend_tile(tile, std::min<int64_t>(TILE_KEYS, end - tile), state);
            }
        for (int64_t r = 0; r < rows; ++r) state.sums[r] = sum_of(load16(scratch_.lane_sums + r * LANES));
    }

    // Rows that are multiplied at once: `slot` of the scratch on, of the tile's first `keys` keys.
    struct Part {
        int64_t row, slot;
        int rows;
        int64_t keys;
        bool is_masked;  // some of its rows must not see all of these keys
        int vectors() const { return static_cast<int>((keys + LANES - 1) / LANES); }
    };

    // --- few rows ---
    //
    // What decodes reads much and computes little. Its keys are not packed: sixteen of them are the rows of a tile of
    // AMX as they lie, and the queries its columns. Packing costs more than the products. A split's tiles of keys pass
    // through each stage together, so that none waits for what the one before has just written. An element's sums are
    // the same either way, bit for bit.

    bool is_stored_multiplied() const {
#if BATON_TILED_PAIRS
        if constexpr (Products::IS_TILED && std::is_same<Stored, bf16>::value)
            return task_.row_end - task_.row <= FEW_ROWS && pool_.positions % LANES == 0 && job_.filled_units == job_.units;
#endif
        return false;
    }

    int column_count() const {
        const int64_t rows = task_.row_end - task_.row;
        return rows <= 4 ? 4 : rows <= 8 ? 8 : 16;
    }

    void turn_queries() {
        const int64_t rows = task_.row_end - task_.row, columns = column_count();
        for (int64_t u = 0; u < job_.units; ++u)
            for (int64_t c = 0; c < columns; ++c)
                scratch_.columns[u * columns + c] = c < rows ? scratch_.queries[c * job_.units + u] : 0;
    }

    // Each tile's memory is fetched while the one before it is computed.
    void attend_stored(int64_t split, int64_t start, int64_t end, State& state) {
#if BATON_TILED_PAIRS
        const Run keys = {&span_, task_.head, start, std::min(newest_, end - 1), 0};
        const Run values = {&span_, task_.head, start, std::min(newest_, end - 1), value_offset()};
        const Run following = following_run(split);
        const int tiles = static_cast<int>((end - start + TILE_KEYS - 1) / TILE_KEYS);
        const int rows = static_cast<int>(task_.row_end - task_.row), columns = column_count();
        Part parts[TILES_OF_SPLIT];
        alignas(64) float alpha[TILES_OF_SPLIT][FEW_ROWS];
        for (int t = 0; t < tiles; ++t) {
            parts_of(start + t * TILE_KEYS, 0, rows, parts + t);
            parts[t].slot = t * rows;
            amx::dot_stored(groups_of(keys, t), pool_.vector_bytes(), reinterpret_cast<const char*>(scratch_.columns),
                            columns, job_.units, turned_scores(t),
                            t + 1 < tiles ? groups_of(keys, t + 1) : groups_of(values, 0));
        }
        NothingBeside nothing;
        for (int t = 0; t < tiles; ++t) {
            turn_scores(parts[t], t);
            load_factors(start + t * TILE_KEYS, parts[t].keys);
            weigh(start + t * TILE_KEYS, parts[t], state, alpha[t], nothing);
        }
        for (int t = 0; t < tiles; ++t) {
            const int64_t tile = start + t * TILE_KEYS;
            find_rows(tile, end);
            const amx::Groups next = t + 1 < tiles ? groups_of(values, t + 1) : groups_of(following, 0);
            pack_fetching(std::min<int64_t>(TILE_KEYS, end - tile), next);
            add_values(parts[t], state, alpha[t], whole_group(next.rows[GROUPS - 1]));
        }
#endif
    }

#if BATON_TILED_PAIRS
    // Keys that are read one after the other: of a span and head, from position `first` to `newest`; or their values.
    struct Run {
        const Span* span;  // null: there is none
        int64_t head, first, newest, offset;
    };

    Run following_run(int64_t split) const {
        if (split + 1 < task_.split_end) return {&span_, task_.head, (split + 1) * SPLIT_KEYS, newest_, 0};
        if (!following_) return {nullptr, 0, 0, 0, 0};
        const Span& span = job_.batch.spans[following_->span];
        return {&span, following_->head, first_tile(job_, *following_),
                baton::attention::position_of(job_, span, following_->row_end - 1), 0};
    }

    // The run's keys from tile number `tile` on, as far as they are in it.
    amx::Groups groups_of(const Run& run, int tile) const {
        amx::Groups groups;
        for (int g = 0; g < GROUPS && run.span; ++g) {
            const int64_t position = run.first + tile * TILE_KEYS + g * LANES;
            if (position <= run.newest) groups.rows[g] = key_row(*run.span, run.head, position) + run.offset;
        }
        return groups;
    }

    char* turned_scores(int tile) const {
        return reinterpret_cast<char*>(scratch_.turned_scores + tile * TILE_KEYS * column_count());
    }

    void turn_scores(const Part& part, int tile) {
        const int columns = column_count();
        const float* from = reinterpret_cast<const float*>(turned_scores(tile));
        for (int v = 0; v < part.vectors(); ++v)
            turn_sixteen(scratch_.scores + part.slot * TILE_KEYS + v * LANES, TILE_KEYS, from + v * LANES * columns,
                         columns, part.rows);
    }

    Fetch whole_group(const char* rows) const {
        if (!rows) return {};
        const int64_t half = LANES * pool_.vector_bytes() / 2;
        return {{rows, rows + half}, (half + 63) / 64};
    }

    // The tile's values, sixteen keys at a time, while three groups of others are fetched: the last one is while tiles
    // wait for what is packed here.
    void pack_fetching(int64_t keys, const amx::Groups& next) {
        for (int g = 0; g * LANES < keys; ++g)
            pack_values<Products, Stored>(scratch_.values + g * LANES / Products::PER_UNIT * PANEL,
                                          scratch_.key_rows + g * LANES, value_offset(), ZEROS,
                                          std::min<int64_t>(LANES, keys - g * LANES), pool_.value_dim,
                                          whole_group(g + 1 < GROUPS ? next.rows[g] : nullptr));
        clear_values(keys);
    }
#endif

    // --- tiles of keys ---

    // Addresses of the tile's keys. Those at `end` and beyond count as zeros, and are not read.
    void find_rows(int64_t tile, int64_t end) {
        const char** rows = scratch_.key_rows;
        const int64_t bytes = pool_.vector_bytes(), keys = std::min<int64_t>(TILE_KEYS, end - tile);
        int64_t i = 0;
        while (i < keys) {
            const int64_t limit = std::min(keys, i + pool_.positions - (tile + i) % pool_.positions);
            for (const char* row = key_row(span_, task_.head, tile + i); i < limit; ++i, row += bytes) rows[i] = row;
        }
        for (; i < TILE_KEYS; ++i) rows[i] = ZEROS;
    }

    const char* key_row(const Span& span, int64_t head, int64_t position) const {
        const int64_t block = job_.batch.tables[span.first_block + position / pool_.positions];
        const int64_t vector = pool_.first_vector(job_.call.layer, 0, head) + position % pool_.positions;
        return pool_.block(block) + vector * pool_.vector_bytes();
    }

    // The four groups of keys that are wanted after this tile: of the task's next tile, or the first one of
    // the task that follows.
    void find_next(int64_t tile) {
        const Span* span = &span_;
        int64_t head = task_.head, newest = newest_;
        if (tile > newest_ || tile >= task_.split_end * SPLIT_KEYS) {
            if (!following_) {
                next_[0] = nullptr;
                return;
            }
            span = &job_.batch.spans[following_->span], head = following_->head;
            tile = first_tile(job_, *following_), newest = baton::attention::position_of(job_, *span, following_->row_end - 1);
        }
        for (int g = 0; g < GROUPS; ++g)
            next_[g] = key_row(*span, head, std::min<int64_t>(newest, tile + g * LANES));
    }

    Fetch fetch(int group, int64_t offset) const {
        if (!next_[0]) return {};
        return {{next_[group] + offset, next_[group + 1] + offset}, (LANES * pool_.vector_bytes() + 63) / 64};
    }

    int64_t value_offset() const {
        return pool_.planes == 1 ? 0 : pool_.heads * pool_.positions * pool_.vector_bytes();
    }

    void attend_tile(int64_t tile, int64_t keys, State& state) {
        const int groups = static_cast<int>((keys + LANES - 1) / LANES);
        pack_keys<Products, Stored>(scratch_.keys, scratch_.key_rows, groups, job_.units, job_.filled_units,
                                    fetch(0, 0));
        pack_values<Products, Stored>(scratch_.values, scratch_.key_rows, value_offset(), ZEROS, keys,
                                      pool_.value_dim, fetch(0, value_offset()));
        if constexpr (Products::IS_TILED) clear_values(keys);
        load_factors(tile, keys);
        const int64_t count = task_.row_end - task_.row;
        if constexpr (Products::IS_TILED) return attend_by_tiles(tile, count, state);
        const int64_t parts = (count + Products::ROWS - 1) / Products::ROWS;
        for (int64_t part = 0; part < parts; ++part) {
            attend_rows(tile, count * part / parts, count * (part + 1) / parts, state);
            next_[0] = nullptr;
        }
    }

    // Tiles take all values of a tile of keys: those of keys that there are not must be numbers.
    void clear_values(int64_t keys) {
        constexpr int64_t STEPS = TILE_KEYS / Products::PER_UNIT;
        const int64_t steps = (keys + Products::PER_UNIT - 1) / Products::PER_UNIT;
        for (int64_t panel = 0; panel < job_.result_width / PANEL; ++panel)
            std::memset(scratch_.values + (panel * STEPS + steps) * PANEL, 0,
                        static_cast<size_t>((STEPS - steps) * PANEL) * 4);
    }

    // Factors of the scores and weights of each key.
    void load_factors(int64_t tile, int64_t keys) {
        if (!is_scaled_first()) return;
        const float scale = job_.call.softcap > 0 ? job_.call.scale / job_.call.softcap : job_.call.scale * LOG2_E;
        for (int64_t v = 0; v < TILE_KEYS; v += LANES) store16(scratch_.score_factors + v, splat(scale));
        if constexpr (std::is_same<Stored, int8_t>::value) {
            const int64_t key0 = pool_.first_vector(job_.call.layer, 0, task_.head);
            const int64_t value0 = pool_.first_vector(job_.call.layer, pool_.planes - 1, task_.head);
            std::memset(scratch_.value_factors, 0, TILE_KEYS * 4);
            for (int64_t i = 0; i < keys; ++i) {
                const int64_t position = tile + i, offset = position % pool_.positions;
                const char* block = pool_.block(table_[position / pool_.positions]);
                const float* scales = reinterpret_cast<const float*>(block + pool_.values_bytes);
                scratch_.score_factors[i] *= scales[key0 + offset];
                scratch_.value_factors[i] = scales[value0 + offset];
            }
        }
    }

    // The rows in parts. While vectors weigh one, tiles add the values of the part before it and multiply the keys of
    // the one after it: they wait for what vectors have just written, and the reverse, but here it was written a part ago.
    void attend_by_tiles(int64_t tile, int64_t rows, State& state) {
#if BATON_TILED_PAIRS
        Part parts[(ROWS_OF_TASK + Products::ROWS - 1) / Products::ROWS];
        const int count = parts_of(tile, 0, rows, parts);
        for (int i = 0; i < count; ++i) parts[i].slot = i % 2 * Products::ROWS;
        fetch_rest();
        amx::settle_memory();
        if (count) ProductsBeside({}, scores_of(parts[0])).finish();
        for (int i = 0; i < count; ++i) {
            alignas(64) float alpha[Products::ROWS + LANES];
            ProductsBeside beside(i ? values_of(parts[i - 1], state) : amx::Unfinished(),
                                  i + 1 < count ? scores_of(parts[i + 1]) : amx::Unfinished());
            weigh(tile, parts[i], state, alpha, beside);
            beside.finish();
            scale_results(parts[i], state, alpha);
            amx::settle_memory();
        }
        if (count) ProductsBeside(values_of(parts[count - 1], state), {}).finish();
        amx::settle_memory();
#endif
    }

#if BATON_TILED_PAIRS
    amx::Unfinished scores_of(const Part& part) const {
        return {scratch_.queries + part.row * job_.units, job_.units * 4, part.rows, scratch_.keys,
                job_.units * PANEL * 4,                   1,              job_.units,
                scratch_.scores + part.slot * TILE_KEYS,  TILE_KEYS * 4,  false};
    }

    amx::Unfinished values_of(const Part& part, const State& state) const {
        constexpr int64_t UNITS = TILE_KEYS / Products::PER_UNIT;
        return {scratch_.weights + part.slot * UNITS, UNITS * 4,
                part.rows,                            scratch_.values,
                UNITS * PANEL * 4,                    static_cast<int>(job_.result_width / PANEL),
                UNITS,                                result(state, part.row),
                job_.result_width * 4,                true};
    }

    void scale_results(const Part& part, const State& state, const float* alpha) {
        for (int r = 0; r < part.rows; ++r) {
            if (alpha[r] == 1.0f) continue;
            float* to = result(state, part.row + r);
            for (int64_t c = 0; c < job_.result_width; c += LANES) store16(to + c, load16(to + c) * splat(alpha[r]));
        }
    }

    // The groups of the next tile's keys and values that were not fetched while this one's were packed.
    void fetch_rest() {
        for (const Fetch& rest : {fetch(2, 0), fetch(2, value_offset())})
            for (int64_t i = 0; i < rest.lines; ++i) rest.lines_of(i, 1);
    }
#endif

    // Rows that are multiplied at once.
    void attend_rows(int64_t tile, int64_t row, int64_t row_end, State& state) {
        Part part;
        if (!parts_of(tile, row, row_end, &part)) return;
        multiply_panels<Products>({scratch_.queries + part.row * job_.units, job_.units, scratch_.keys, job_.units,
                                   scratch_.scores, TILE_KEYS, nullptr, fetch(2, 0)},
                                  part.rows, part.vectors(), job_.units * PANEL);
        float alpha[Products::ROWS + LANES];
        NothingBeside nothing;
        weigh(tile, part, state, alpha, nothing);
        add_values(part, state, alpha, fetch(2, value_offset()));
    }

    // Adds the tile's values, weighed, to the results of some rows.
    void add_values(const Part& part, State& state, const float* alpha, const Fetch& fetched) {
        constexpr int64_t UNITS = TILE_KEYS / Products::PER_UNIT;
        const int value_vectors = static_cast<int>((pool_.value_dim + 2 * LANES - 1) / (2 * LANES) * 2);
        const int64_t steps = Products::IS_TILED ? UNITS : (part.keys + Products::PER_UNIT - 1) / Products::PER_UNIT;
        multiply_panels<Products>({scratch_.weights + part.slot * UNITS, UNITS, scratch_.values, steps,
                                   result(state, part.row), job_.result_width, alpha, fetched},
                                  part.rows, value_vectors, UNITS * PANEL);
    }

    // The rows in as many parts as products take at once, without those that see nothing of the tile.
    int parts_of(int64_t tile, int64_t row, int64_t row_end, Part* parts) const {
        const int64_t rows = row_end - row, count = (rows + Products::ROWS - 1) / Products::ROWS;
        const int64_t window = job_.call.window;
        int used = 0;
        for (int64_t part = 0; part < count; ++part) {
            const int64_t first = row + rows * part / count, end = row + rows * (part + 1) / count;
            const int64_t newest = position_of(task_.row + end - 1), oldest = position_of(task_.row + first);
            if (newest < tile || (window && oldest - window >= tile + TILE_KEYS - 1)) continue;
            const int64_t keys = std::min<int64_t>(TILE_KEYS, newest + 1 - tile);
            const bool is_masked = oldest < tile + rounded_up(keys, LANES) - 1 || (window && newest - window >= tile);
            parts[used++] = {first, first - row, static_cast<int>(end - first), keys, is_masked};
        }
        return used;
    }

    template <typename Beside>
    void weigh(int64_t tile, const Part& part, State& state, float* alpha, Beside& beside) {
        switch (part.vectors()) {
            case 1: return weigh_rows<1>(tile, part, state, alpha, beside);
            case 2: return weigh_rows<2>(tile, part, state, alpha, beside);
            case 3: return weigh_rows<3>(tile, part, state, alpha, beside);
            default: return weigh_rows<4>(tile, part, state, alpha, beside);
        }
    }

    // Scores of some rows to weights; alpha: what their earlier results are multiplied with. Vectors beyond VECTORS
    // would add zeros to the sum. Maxima and factors of sixteen rows are computed at once: for one row alone they are a
    // long chain of instructions that wait for one another.
    template <int VECTORS, typename Beside>
    void weigh_rows(int64_t tile, const Part& part, State& state, float* alpha, Beside& beside) {
        const bool is_changed = part.is_masked || is_scaled_first();
        for (int first = 0; first < part.rows; first += LANES) {
            const int count = std::min(LANES, part.rows - first);
            const int64_t row = part.row + first, slot = part.slot + first;
            alignas(64) f32x16 largest[LANES];
            alignas(64) float maxima[LANES];
            if (is_changed)
                for (int r = 0; r < count; ++r) change_row<VECTORS>(tile, row + r, slot + r, part.is_masked);
            for (int r = 0; r < count; ++r) largest[r] = largest_of_row<VECTORS>(slot + r);
            const f32x16 before = load_floats(state.maxima + row, count);
            const f32x16 now = maximum(before, maxima_of(largest, count) * splat(late_factor()));
            store_floats(state.maxima + row, now, count);
            store16(alpha + first, exp2_16(before - now));
            store16(maxima, now);
            for (int r = 0; r < count; ++r) {
                weigh_row<VECTORS>(row + r, slot + r, maxima[r], alpha[first + r]);
                if (r % (2 * LANES / TIMES_BETWEEN) == 0) beside.between();
            }
        }
    }

    // Whether scores have a factor of their key, or are capped: these are in units of log 2 from then on.
    bool is_scaled_first() const { return std::is_same<Stored, int8_t>::value || job_.call.softcap > 0; }

    // To units of log 2, of scores that become weights.
    float late_factor() const { return is_scaled_first() ? 1.0f : job_.call.scale * LOG2_E; }

    // Scales and caps scores where that comes first. Those of keys that the row must not see become minus infinity.
    template <int VECTORS> void change_row(int64_t tile, int64_t row, int64_t slot, bool is_masked) {
        float* scores = scratch_.scores + slot * TILE_KEYS;
        f32x16 x[4];
        for (int v = 0; v < VECTORS; ++v) x[v] = load16(scores + v * LANES);
        if (is_scaled_first())
            for (int v = 0; v < VECTORS; ++v) x[v] = x[v] * load16(scratch_.score_factors + v * LANES);
        if (job_.call.softcap > 0)
            for (int v = 0; v < VECTORS; ++v) x[v] = capped(x[v]);
        const int64_t position = is_masked ? position_of(task_.row + row) : 0, window = job_.call.window;
        const int64_t newest = position - tile;  // the last key it may see, from the tile's start
        const int64_t oldest = window ? newest - window + 1 : 0;
        if (is_masked && (oldest > 0 || newest < VECTORS * LANES - 1)) {
            uint64_t seen = newest >= 63 ? ~uint64_t{0} : newest < 0 ? 0 : (uint64_t{2} << newest) - 1;
            if (oldest > 0) seen &= oldest > 63 ? 0 : ~uint64_t{0} << oldest;
            for (int v = 0; v < VECTORS; ++v)
                x[v] = choose(static_cast<uint32_t>(seen >> (v * LANES)) & 0xffff, x[v], splat(-INFINITY));
        }
        for (int v = 0; v < VECTORS; ++v) store16(scores + v * LANES, x[v]);
    }

    template <int VECTORS> BATON_INLINE f32x16 largest_of_row(int64_t slot) {
        const float* scores = scratch_.scores + slot * TILE_KEYS;
        f32x16 largest = load16(scores);
        for (int v = 1; v < VECTORS; ++v) largest = maximum(largest, load16(scores + v * LANES));
        return largest;
    }

    template <int VECTORS> BATON_INLINE void weigh_row(int64_t row, int64_t slot, float maximum, float alpha) {
        const f32x16 factor = splat(late_factor());
        f32x16 x[4];
        for (int v = 0; v < VECTORS; ++v)
            x[v] = exp2_16(multiply_add(load16(scratch_.scores + slot * TILE_KEYS + v * LANES), factor, splat(-maximum)));
        f32x16 sum = VECTORS > 1 ? x[0] + x[1] : x[0];
        if (VECTORS > 2) sum = sum + (VECTORS > 3 ? x[2] + x[3] : x[2]);
        float* sums = scratch_.lane_sums + row * LANES;
        store16(sums, multiply_add(load16(sums), splat(alpha), sum));
        if constexpr (std::is_same<Stored, int8_t>::value)
            for (int v = 0; v < VECTORS; ++v) x[v] = x[v] * load16(scratch_.value_factors + v * LANES);
        for (int v = VECTORS; v < 4; ++v) x[v] = f32x16{};
        constexpr int PACKED = Products::IS_TILED ? 4 : VECTORS;  // tiles take the weights of all keys
        unit* weights = scratch_.weights + slot * (TILE_KEYS / Products::PER_UNIT);
        for (int v = 0; v < PACKED; v += 2) Products::pack_row(weights + v * LANES / Products::PER_UNIT, x[v], x[v + 1]);
    }

    // c tanh(x) in units of log 2; tanh(x) = 1 - 2 / (e^2x + 1).
    BATON_INLINE f32x16 capped(f32x16 x) const {
        const f32x16 limited = maximum(splat(-20.0f), -maximum(-x, splat(-20.0f)));
        const f32x16 e = exp2_16(limited * splat(2.0f * LOG2_E));
        const f32x16 tanh = splat(1.0f) - splat(2.0f) / (e + splat(1.0f));
        return tanh * splat(job_.call.softcap * LOG2_E);
    }

    const Job& job_;
    const Task& task_;
    const KvPool& pool_;
    const Span& span_;
    const int32_t* table_;
    Scratch scratch_;
    const Task* following_;
    int64_t newest_;            // the last position the task's rows see
    const char* next_[GROUPS];  // null: nothing to fetch
};

// --- sharing out ---

void run_task(const Job& job, const Task& task, const Task* following) {
    const int stored = job.pool.stored;
#if BATON_TILED_PAIRS
    struct Release {
        ~Release() { amx::release(); }
    } release;
#endif
    if (job.pool.dtype == F32) {
        if (stored == STORED_INT8) return Attend<Float32Products, float, int8_t>(job, task, following).run();
        return Attend<Float32Products, float, float>(job, task, following).run();
    }
    if (stored == STORED_INT8) return Attend<PairProducts, bf16, int8_t>(job, task, following).run();
    Attend<PairProducts, bf16, bf16>(job, task, following).run();
}

void run_tasks(const Job& job, const std::vector<Task>& tasks) {
    const int64_t count = static_cast<int64_t>(tasks.size());
    parallel_for(count, [&](int64_t i, int) { run_task(job, tasks[i], i + 1 < count ? &tasks[i + 1] : nullptr); });
}

// Longest first, as far as the order of the spans tells.
std::vector<Task> share_out(const Job& job) {
    std::vector<Task> tasks;
    for (int64_t s = job.batch.span_count - 1; s >= 0; --s) {
        const Span& span = job.batch.spans[s];
        const int64_t rows = span.token_count * job.group, parts = (rows + job.rows_max - 1) / job.rows_max;
        for (int64_t part = parts - 1; part >= 0; --part) {
            const int64_t row = part * job.rows_max, row_end = std::min(rows, row + job.rows_max);
            const int64_t oldest = oldest_key(job, span, row), newest = position_of(job, span, row_end - 1);
            for (int64_t head = 0; head < job.pool.heads; ++head)
                tasks.push_back({static_cast<int32_t>(s), static_cast<int32_t>(head), static_cast<int32_t>(row),
                                 static_cast<int32_t>(row_end), static_cast<int32_t>(oldest / SPLIT_KEYS),
                                 static_cast<int32_t>(newest / SPLIT_KEYS + 1), -1});
        }
    }
    return tasks;
}

void merge_partials(const Job& job, const Task& task, int64_t first) {
    const int64_t rows = task.row_end - task.row, width = job.partial_width();
    for (int64_t r = 0; r < rows; ++r) {
        float* total = job.partials + (first + r) * width;
        for (int64_t split = 1; split < task.split_end - task.split; ++split) {
            const float* part = total + split * rows * width;
            merge_row(total[job.result_width], total[job.result_width + 1], total, part[job.result_width],
                      part[job.result_width + 1], part, job.result_width);
        }
        finish_row(job, task, task.row + r, total[job.result_width], total[job.result_width + 1], total);
    }
}

// Every split a task of its own; then the splits of each are merged.
bool run_by_split(Job& job, const std::vector<Task>& whole) {
    std::vector<Task> tasks;
    std::vector<int64_t> firsts;
    int64_t rows = 0;
    for (const Task& task : whole) {
        firsts.push_back(rows);
        for (int32_t split = task.split; split < task.split_end; ++split) {
            Task part = task;
            part.split = split, part.split_end = split + 1, part.partial = rows;
            tasks.push_back(part);
            rows += task.row_end - task.row;
        }
    }
    std::unique_ptr<float[]> partials(new (std::nothrow) float[static_cast<size_t>(rows * job.partial_width())]);
    if (!partials) return false;
    job.partials = partials.get();
    run_tasks(job, tasks);
    parallel_for(static_cast<int64_t>(whole.size()), [&](int64_t i, int) {
        merge_partials(job, whole[static_cast<size_t>(i)], firsts[static_cast<size_t>(i)]);
    });
    return true;
}

bool wants_splits(const std::vector<Task>& tasks) {
    const size_t threads = static_cast<size_t>(thread_count());
    if (threads == 1 || tasks.size() >= 2 * threads) return false;
    for (const Task& task : tasks)
        if (task.split_end - task.split > 1) return true;
    return false;
}

}  // namespace
}  // namespace baton::attention

// 0, or 1: a kind of pool or call that is not supported.
BATON_API int baton_attention(const baton::KvPool* pool, const baton::Batch* batch, const void* call_) {
    using namespace baton::attention;
    const Call& call = *static_cast<const Call*>(call_);
    if (pool->vector_bytes() > ROW_BYTES_MAX || call.heads % pool->heads) return 1;
    const int64_t rows_max = pool->value_dim > 128 ? ROWS_OF_TASK / 2 : ROWS_OF_TASK;
    Job job{*pool, *batch, call, call.heads / pool->heads, rows_max, 0, 0, 0, false};
    job.is_paired = pool->dtype == baton::BF16;
    const int64_t per_unit = job.is_paired ? PairProducts::PER_UNIT : 1;
    job.filled_units = job.units = (pool->head_dim + per_unit - 1) / per_unit;
    if (job.is_paired && PairProducts::IS_TILED) job.units = rounded_up(job.units, 16);
    job.result_width = rounded_up(pool->value_dim, PANEL);
    const std::vector<Task> tasks = share_out(job);
    if (wants_splits(tasks) && run_by_split(job, tasks)) return 0;
    run_tasks(job, tasks);
    return 0;
}
