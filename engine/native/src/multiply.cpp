// Products of rows and packed matrices, shared out over the threads.
//
// A task is a chunk of rows times a range of panels. Within it, for each panel, tiles of up to TILE_ROWS rows
// run over k one after another. Neither the cutting into chunks and tiles nor the number of threads changes
// the order in which an element is summed.
#include <algorithm>

#include "matrix.h"
#include "vmath.h"

namespace baton {
namespace {

enum ScratchSlot { ACC, TOTAL, UP, DECODED, WIDENED, PREPARED, SUMS, WIDE_OUT };

constexpr int64_t CHUNK_BYTES = 384 << 10;  // of activations: these and a panel stay in the L2 cache
constexpr int64_t CHUNK_ROWS_MAX = 40 * TILE_ROWS;
constexpr int64_t BLOCK_STEPS = 1024;   // over k, per pass: 256 KiB of a panel
constexpr int64_t DECODE_STEPS = 128;   // of a coded panel at once: stays in the L1 cache
constexpr int64_t TASKS_PER_THREAD = 4;
constexpr int64_t AHEAD_BYTES = 4096;   // how far a single pass over the weights is prefetched
constexpr double PARALLEL_SECONDS_MIN = 8e-6;  // below, waking a thread costs more than it brings

// A product with its activations as the kernels want them.
struct Job {
    const Matrix* m;
    Rows rows;
    Output out;
    const float* sums;  // per row and group, of the activations; where the matrix has zeros
    int64_t tile_count, chunk_count, tiles_per_chunk;
    int64_t panel_count, panels_per_task, tasks;

    int64_t row_of_tile(int64_t tile) const { return tile * rows.count / tile_count; }
};

inline size_t element_bytes(int dtype) { return dtype == F32 ? 4 : 2; }

inline const char* row_pointer(const Rows& rows, int64_t i) {
    const int64_t row = rows.index ? rows.index[i] : i;
    return static_cast<const char*>(rows.base) + row * rows.stride * static_cast<int64_t>(element_bytes(rows.dtype));
}

// --- one tile ---

template <int ROWS>
void dot_rows(int format, const void* const* a, const char* panel, int64_t steps, const Codebook* book, float* acc,
              bool accumulate, Prefetch prefetch) {
    const bf16* const* pairs = reinterpret_cast<const bf16* const*>(a);
    switch (format) {
        case DENSE_F32:
            return dot_tile<ROWS, StepF32>(reinterpret_cast<const float* const*>(a), panel, steps, book, acc,
                                           accumulate, prefetch);
        case DENSE_BF16: return dot_tile<ROWS, StepBF16>(pairs, panel, steps, book, acc, accumulate, prefetch);
        case CODE8: return dot_tile<ROWS, StepCode8>(pairs, panel, steps, book, acc, accumulate, prefetch);
        default: return dot_tile<ROWS, StepCode4>(pairs, panel, steps, book, acc, accumulate, prefetch);
    }
}

void dot(int64_t rows, int format, const void* const* a, const char* panel, int64_t steps, const Codebook* book,
         float* acc, bool accumulate, Prefetch prefetch) {
    static_assert(TALL_ROWS == 12, "one case each");
    switch (rows) {
        case 1: return dot_rows<1>(format, a, panel, steps, book, acc, accumulate, prefetch);
        case 2: return dot_rows<2>(format, a, panel, steps, book, acc, accumulate, prefetch);
        case 3: return dot_rows<3>(format, a, panel, steps, book, acc, accumulate, prefetch);
        case 4: return dot_rows<4>(format, a, panel, steps, book, acc, accumulate, prefetch);
        case 5: return dot_rows<5>(format, a, panel, steps, book, acc, accumulate, prefetch);
        case 6: return dot_rows<6>(format, a, panel, steps, book, acc, accumulate, prefetch);
        case 7: return dot_rows<7>(format, a, panel, steps, book, acc, accumulate, prefetch);
        case 8: return dot_rows<8>(format, a, panel, steps, book, acc, accumulate, prefetch);
        case 9: return dot_rows<9>(format, a, panel, steps, book, acc, accumulate, prefetch);
        case 10: return dot_rows<10>(format, a, panel, steps, book, acc, accumulate, prefetch);
        case 11: return dot_rows<11>(format, a, panel, steps, book, acc, accumulate, prefetch);
        default: return dot_rows<12>(format, a, panel, steps, book, acc, accumulate, prefetch);
    }
}

// --- one panel times one chunk of rows ---

// Steps `first` … first + count - 1 of a panel, as the tiles read them: where and in which format.
struct Block {
    const char* data;
    int format;
};

void widen(const char* pairs, int64_t steps, float* to) {
    const bf16* from = reinterpret_cast<const bf16*>(pairs);
    for (int64_t s = 0; s < steps; ++s)
        for (int c = 0; c < PANEL; ++c) {
            to[(2 * s) * PANEL + c] = to_float(from[s * 2 * PANEL + 2 * c]);
            to[(2 * s + 1) * PANEL + c] = to_float(from[s * 2 * PANEL + 2 * c + 1]);
        }
}

Block block_of(const Matrix& m, const char* panel, int64_t first, int64_t count, bool decode, bool wide) {
    const char* from = panel + first * step_bytes(m.format);
    if (!decode) return {from, m.format};
    char* decoded = static_cast<char*>(thread_scratch(DECODED, DECODE_STEPS * 256));
    if (m.format == CODE8)
        decode_steps<StepCode8>(from, count, &m.book, decoded);
    else
        decode_steps<StepCode4>(from, count, &m.book, decoded);
    if (!wide) return {decoded, DENSE_BF16};
    float* widened = static_cast<float*>(thread_scratch(WIDENED, DECODE_STEPS * 512));
    widen(decoded, count, widened);
    return {reinterpret_cast<const char*>(widened), DENSE_F32};
}

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

// total (+)= scale * (acc - zero * sum)
void fold_group(const Matrix& m, int64_t panel, int64_t group, const float* acc, float* total, int64_t rows,
                const float* sums) {
    const float* scale = m.scales + (panel * m.group_count + group) * PANEL;
    const float* zero = m.zeros ? m.zeros + (panel * m.group_count + group) * PANEL : nullptr;
    for (int64_t r = 0; r < rows; ++r, acc += PANEL, total += PANEL) {
        const float sum = zero ? sums[r * m.group_count + group] : 0.0f;
        for (int c = 0; c < PANEL; ++c) {
            const float value = zero ? acc[c] - zero[c] * sum : acc[c];
            total[c] = group ? total[c] + scale[c] * value : scale[c] * value;
        }
    }
}

// Sums of rows [row_first, row_end) times one panel into `result` [rows][PANEL].
void panel_sums(const Job& job, int64_t tile_first, int64_t tile_end, int64_t panel, const char* next_panel,
                float* result) {
    const Matrix& m = *job.m;
    const int64_t row_first = job.row_of_tile(tile_first), rows = job.row_of_tile(tile_end) - row_first;
    const int64_t tiles = tile_end - tile_first;
    const bool coded = m.format >= CODE8, wide = job.rows.dtype == F32;
    const bool decode = coded && (tiles > 1 || wide);
    const char* weights = m.panels + panel * m.panel_bytes;
    const int64_t group_steps = m.group_count > 1 ? m.group_k / step_k(m.format) : m.steps;
    const int64_t block_max = decode ? DECODE_STEPS : tiles > 1 ? BLOCK_STEPS : m.steps;
    float* acc = m.group_count > 1
                     ? static_cast<float*>(thread_scratch(ACC, static_cast<size_t>(rows) * PANEL * 4))
                     : result;
    for (int64_t group = 0; group < m.group_count; ++group) {
        const int64_t group_end = std::min(m.steps, (group + 1) * group_steps);
        for (int64_t first = group * group_steps; first < group_end; first += block_max) {
            const int64_t count = std::min(block_max, group_end - first);
            const Block block = block_of(m, weights, first, count, decode, wide);
            const int64_t k_first = first * step_k(m.format);
            const int64_t steps = block.format == DENSE_F32 && coded ? count * 2 : count;
            for (int64_t tile = tile_first; tile < tile_end; ++tile) {
                const int64_t row = job.row_of_tile(tile), tile_rows = job.row_of_tile(tile + 1) - row;
                const void* a[TALL_ROWS];
                for (int64_t r = 0; r < tile_rows; ++r)
                    a[r] = row_pointer(job.rows, row + r) + k_first * static_cast<int64_t>(element_bytes(job.rows.dtype));
                const int64_t offset = first * step_bytes(m.format);
                const Prefetch prefetch =
                    prefetch_for(m, weights + offset, next_panel ? next_panel + offset : nullptr, count,
                                 tile - tile_first, tiles);
                dot(tile_rows, block.format, a, block.data, steps, &m.book, acc + (row - row_first) * PANEL,
                    first > group * group_steps, prefetch);
            }
        }
        if (coded)
            fold_group(m, panel, group, acc, result, rows,
                       job.sums ? job.sums + row_first * m.group_count : nullptr);
    }
}

void add_bias(const Matrix& m, int64_t panel, float* sums, int64_t rows) {
    if (!m.bias) return;
    const float* bias = m.bias + panel * PANEL;
    for (int64_t r = 0; r < rows; ++r)
        for (int c = 0; c < PANEL; ++c) sums[r * PANEL + c] += bias[c];
}

template <typename T>
void store_rows(const Output& out, int64_t row_first, int64_t rows, int64_t column, int64_t columns, float* sums) {
    for (int64_t r = 0; r < rows; ++r, sums += PANEL) {
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

void run_task(const Job& job, int64_t task) {
    const Matrix& m = *job.m;
    const int64_t ranges = (job.panel_count + job.panels_per_task - 1) / job.panels_per_task;
    const int64_t tile_first = task / ranges * job.tiles_per_chunk;
    const int64_t tile_end = std::min(job.tile_count, tile_first + job.tiles_per_chunk);
    const int64_t row_first = job.row_of_tile(tile_first), rows = job.row_of_tile(tile_end) - row_first;
    const int64_t panel_first = task % ranges * job.panels_per_task;
    const int64_t panel_end = std::min(job.panel_count, panel_first + job.panels_per_task);
    const bool gated = job.out.activation >= 0;
    const int64_t columns = gated ? m.n / 2 : m.n;
    float* sums = static_cast<float*>(thread_scratch(TOTAL, static_cast<size_t>(rows) * PANEL * 4));
    for (int64_t panel = panel_first; panel < panel_end; ++panel) {
        const char* weights = m.panels + panel * m.panel_bytes;
        const char* next = panel + 1 < job.panel_count ? weights + m.panel_bytes : nullptr;
        const char* up_weights = weights + job.panel_count * m.panel_bytes;
        panel_sums(job, tile_first, tile_end, panel, gated ? up_weights : next, sums);
        add_bias(m, panel, sums, rows);
        if (gated) {
            float* up = static_cast<float*>(thread_scratch(UP, static_cast<size_t>(rows) * PANEL * 4));
            panel_sums(job, tile_first, tile_end, panel + job.panel_count, next, up);
            add_bias(m, panel + job.panel_count, up, rows);
            gate_rows(job.out.activation, sums, up, rows * PANEL);
        }
        store(job.out, row_first, rows, panel * PANEL, std::min<int64_t>(PANEL, columns - panel * PANEL), sums);
    }
}

// --- all products ---

// Activations in the matrix's order, filled up with zeros to whole steps.
template <typename T> void prepare_row(const Matrix& m, const T* from, T* to, int64_t k_padded) {
    for (int64_t i = 0; i < m.k; ++i) to[i] = m.order ? from[m.order[i]] : from[i];
    for (int64_t i = m.k; i < k_padded; ++i) to[i] = T{0};
}

template <typename T> void sum_groups(const Matrix& m, const T* row, float* sums) {
    for (int64_t g = 0; g < m.group_count; ++g) {
        float sum = 0.0f;
        for (int64_t i = g * m.group_k; i < std::min(m.k, (g + 1) * m.group_k); ++i) sum += to_float(row[i]);
        sums[g] = sum;
    }
}

struct Needs {
    bool copy, sums;
    size_t copy_bytes, sum_bytes;
};

Needs needs_of(const Product& p) {
    const Matrix& m = *p.matrix;
    Needs needs{};
    const int64_t k_padded = m.steps * step_k(m.format);
    needs.copy = m.order || k_padded != m.k;
    needs.sums = m.zeros != nullptr;
    const auto bytes = [](size_t n) { return (n + 63) / 64 * 64; };
    if (needs.copy)
        needs.copy_bytes = bytes(static_cast<size_t>(p.rows.count * k_padded) * element_bytes(p.rows.dtype));
    if (needs.sums) needs.sum_bytes = bytes(static_cast<size_t>(p.rows.count * m.group_count) * 4);
    return needs;
}

template <typename T> void prepare(const Product& p, const Needs& needs, T* copy, float* sums) {
    const Matrix& m = *p.matrix;
    const int64_t k_padded = m.steps * step_k(m.format);
    parallel_for(p.rows.count, [&](int64_t i, int) {
        const T* row = reinterpret_cast<const T*>(row_pointer(p.rows, i));
        if (needs.copy) {
            prepare_row(m, row, copy + i * k_padded, k_padded);
            row = copy + i * k_padded;
        }
        if (needs.sums) sum_groups(m, row, sums + i * m.group_count);
    });
}

bool supported(const Product& p) {
    const Matrix& m = *p.matrix;
    if (m.format == DENSE_F32) return p.rows.dtype == F32;
    if (m.format == DENSE_BF16) return p.rows.dtype == BF16;
    return p.rows.dtype == F32 || p.rows.dtype == BF16;
}

Job job_of(const Product& p) {
    Job job{};
    job.m = p.matrix, job.rows = p.rows, job.out = p.out;
    const int64_t row_bytes = std::max<int64_t>(1, p.matrix->k * static_cast<int64_t>(element_bytes(p.rows.dtype)));
    const int64_t rows_max = std::clamp<int64_t>(CHUNK_BYTES / row_bytes, TALL_ROWS, CHUNK_ROWS_MAX);
    job.tile_count = p.rows.count <= TALL_ROWS ? 1 : (p.rows.count + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t chunks = (p.rows.count + rows_max - 1) / rows_max;
    job.tiles_per_chunk = (job.tile_count + chunks - 1) / chunks;
    job.chunk_count = (job.tile_count + job.tiles_per_chunk - 1) / job.tiles_per_chunk;
    job.panel_count = p.out.activation >= 0 ? p.matrix->panel_count / 2 : p.matrix->panel_count;
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
        if (needs.copy || needs.sums) {
            if (p.rows.dtype == F32)
                prepare(p, needs, reinterpret_cast<float*>(copy), reinterpret_cast<float*>(sums));
            else
                prepare(p, needs, reinterpret_cast<bf16*>(copy), reinterpret_cast<float*>(sums));
        }
        if (needs.copy) p.rows.base = copy, p.rows.stride = p.matrix->steps * step_k(p.matrix->format), p.rows.index = nullptr;
        if (is_split(p)) p.out = {wide, p.matrix->n, F32, nullptr, -1}, wide += p.rows.count * p.matrix->n;
        Job& job = jobs[job_count++] = job_of(p);
        job.sums = needs.sums ? reinterpret_cast<const float*>(sums) : nullptr;
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
