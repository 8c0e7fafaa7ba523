// Work that is done row by row between the products: norms, activations, embedding.
#include <cmath>

#include "vmath.h"

namespace baton {
namespace {

constexpr int64_t ROWS_PER_TASK = 8;
constexpr int64_t PARALLEL_ELEMENTS_MIN = 64 << 10;
constexpr int CHAINS = 4;  // vectors of partial sums of a row: as many as the processor can keep going

template <typename Fn> void for_rows(int64_t rows, int64_t row_elements, Fn&& fn) {
    if (rows * row_elements < PARALLEL_ELEMENTS_MIN) {
        for (int64_t i = 0; i < rows; ++i) fn(i);
        return;
    }
    parallel_for((rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK, [&](int64_t task, int) {
        const int64_t end = rows < (task + 1) * ROWS_PER_TASK ? rows : (task + 1) * ROWS_PER_TASK;
        for (int64_t i = task * ROWS_PER_TASK; i < end; ++i) fn(i);
    });
}

// out[i] = x[i] * factor * weight[i], rounded to T.
template <typename T, typename W> void scale_row(T* out, const float* x, float factor, const W* weight, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES)
        store_floats(out + i, load16(x + i) * splat(factor) * load_floats(weight + i, n - i), n - i);
}

struct Norm {
    const void* x;
    void* residual;  // null: none; else replaced by the sum
    void* out;
    const void* weight;
    int32_t dtype, weight_dtype;
    int64_t rows, n;
    // Row i of x is at (i / x_inner) * x_stride + (i % x_inner) * n.
    int64_t x_inner, x_stride, residual_stride;
    float eps;
};

template <typename T> void norm_row(const Norm& norm, int64_t i) {
    const int64_t n = norm.n;
    float* row = static_cast<float*>(thread_scratch(0, static_cast<size_t>(n + LANES) * 4));
    const T* from = static_cast<const T*>(norm.x) + i / norm.x_inner * norm.x_stride + i % norm.x_inner * n;
    T* residual = norm.residual ? static_cast<T*>(norm.residual) + i * norm.residual_stride : nullptr;
    f32x16 sums[CHAINS] = {};
    for (int64_t c = 0; c < n; c += LANES) {
        f32x16 x = load_floats(from + c, n - c);
        if (residual) {
            store_floats(residual + c, x + load_floats(residual + c, n - c), n - c);
            x = load_floats(residual + c, n - c);
        }
        store16(row + c, x);
        f32x16& sum = sums[c / LANES % CHAINS];
        sum = multiply_add(x, x, sum);
    }
    const float squares = sum_of((sums[0] + sums[2]) + (sums[1] + sums[3]));
    const float factor = 1.0f / std::sqrt(squares / static_cast<float>(n) + norm.eps);
    T* out = static_cast<T*>(norm.out) + i * n;
    if (norm.weight_dtype == F32)
        scale_row(out, row, factor, static_cast<const float*>(norm.weight), n);
    else
        scale_row(out, row, factor, static_cast<const bf16*>(norm.weight), n);
}

template <typename T>
void gated_row(const T* gate, const T* up, T* out, int64_t n, int32_t activation) {
    float* wide = static_cast<float*>(thread_scratch(0, static_cast<size_t>(n) * 8));
    load_row(wide, gate, n);
    load_row(wide + n, up, n);
    gate_rows(activation, wide, wide + n, n);
    store_row(out, wide, n);
}

}  // namespace
}  // namespace baton

using namespace baton;

// residual += x (if there is one); out = rms_norm(residual or x) * weight. Strides in elements; out's rows
// are next to each other, x's in runs of x_inner (the heads of a token).
BATON_API void baton_rms_norm(const void* x, int64_t x_inner, int64_t x_stride, void* residual, int64_t residual_stride, void* out,
                              int32_t dtype, const void* weight, int32_t weight_dtype, int64_t rows, int64_t n,
                              float eps) {
    const Norm norm{x, residual, out, weight, dtype, weight_dtype, rows, n, x_inner, x_stride, residual_stride, eps};
    for_rows(rows, n, [&](int64_t i) { dtype == F32 ? norm_row<float>(norm, i) : norm_row<bf16>(norm, i); });
}

// out = act(gate) * up; out may be gate.
BATON_API void baton_gated(const void* gate, int64_t gate_stride, const void* up, int64_t up_stride, void* out,
                           int64_t out_stride, int32_t dtype, int64_t rows, int64_t n, int32_t activation) {
    for_rows(rows, n, [&](int64_t i) {
        if (dtype == F32)
            gated_row(static_cast<const float*>(gate) + i * gate_stride, static_cast<const float*>(up) + i * up_stride,
                      static_cast<float*>(out) + i * out_stride, n, activation);
        else
            gated_row(static_cast<const bf16*>(gate) + i * gate_stride, static_cast<const bf16*>(up) + i * up_stride,
                      static_cast<bf16*>(out) + i * out_stride, n, activation);
    });
}

// Rows of a table, each of row_bytes.
BATON_API void baton_embed(const int64_t* tokens, const void* table, void* out, int64_t count, int64_t row_bytes) {
    for_rows(count, row_bytes, [&](int64_t i) {
        std::memcpy(static_cast<char*>(out) + i * row_bytes, static_cast<const char*>(table) + tokens[i] * row_bytes,
                    static_cast<size_t>(row_bytes));
    });
}
