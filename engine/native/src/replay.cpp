// Recorded calls of exported functions, made one after another, and the small element-wise operations that a
// model's forward pass has between its kernels.
#include <cmath>

#include "runtime.h"

namespace baton {
namespace {

constexpr int INTS_MAX = 16;

// The layout of `_RecordedCall` in engine/native/recording.py.
struct RecordedCall {
    const void* function;
    int64_t ints[INTS_MAX];  // pointers and integers of any width, in the order of the arguments
    float real;              // the only floating-point argument, wherever it stands
    int32_t returns_status;  // whether the function returns an int32_t that is 0 if all is well
};

// The C calling conventions of x86-64 (System V) and AArch64 (Linux) pass integers and floating-point numbers in
// registers of their own and arguments beyond them on the stack in slots of eight bytes; the callee reads what it
// has declared and the caller takes the rest away. So one type serves for all recorded functions.
using AnyFunction = int64_t (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                                int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float);

int32_t perform(const RecordedCall& call) {
    const auto function = reinterpret_cast<AnyFunction>(const_cast<void*>(call.function));
    const int64_t* a = call.ints;
    const int64_t result = function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12],
                                    a[13], a[14], a[15], call.real);
    return call.returns_status ? static_cast<int32_t>(result) : 0;
}

template <typename T> void add(const T* a, const T* b, T* out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));
}

template <typename T> void scale(const T* x, float factor, T* out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = from_float<T>(to_float(x[i]) * factor);
}

}  // namespace
}  // namespace baton

using namespace baton;

// Returns -1, or the number of the call that failed; those after it were not made.
BATON_API int64_t baton_replay(const void* calls_, int64_t count) {
    const auto* calls = static_cast<const RecordedCall*>(calls_);
    for (int64_t i = 0; i < count; ++i)
        if (perform(calls[i])) return i;
    return -1;
}

// out = a + b, each sum rounded once. All dense; out may be one of the others.
BATON_API void baton_add(const void* a, const void* b, void* out, int32_t dtype, int64_t count) {
    if (dtype == F32)
        add(static_cast<const float*>(a), static_cast<const float*>(b), static_cast<float*>(out), count);
    else
        add(static_cast<const bf16*>(a), static_cast<const bf16*>(b), static_cast<bf16*>(out), count);
}

// out = x * factor. Dense; out may be x.
BATON_API void baton_scale(const void* x, void* out, int32_t dtype, int64_t count, float factor) {
    if (dtype == F32)
        scale(static_cast<const float*>(x), factor, static_cast<float*>(out), count);
    else
        scale(static_cast<const bf16*>(x), factor, static_cast<bf16*>(out), count);
}

// out[i] = the row rows[i] of x; rows of row_bytes, dense.
BATON_API void baton_take_rows(const void* x, const int64_t* rows, int64_t count, int64_t row_bytes, void* out) {
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(static_cast<char*>(out) + i * row_bytes, static_cast<const char*>(x) + rows[i] * row_bytes,
                    static_cast<size_t>(row_bytes));
}

// Runs of run_bytes, [outer, inner] of them, from one place to another. Strides in bytes.
BATON_API void baton_copy_runs(const void* from, int64_t from_outer, int64_t from_inner, void* to, int64_t to_outer,
                               int64_t to_inner, int64_t outer, int64_t inner, int64_t run_bytes) {
    for (int64_t i = 0; i < outer; ++i)
        for (int64_t j = 0; j < inner; ++j)
            std::memcpy(static_cast<char*>(to) + i * to_outer + j * to_inner,
                        static_cast<const char*>(from) + i * from_outer + j * from_inner,
                        static_cast<size_t>(run_bytes));
}

// tokens[i] = the first of the largest numbers of row i of logits [rows, vocab]; a row's first NaN, if it has one.
BATON_API void baton_argmax(const float* logits, int64_t rows, int64_t vocab, int64_t* tokens) {
    constexpr int LANES = 64;
    parallel_for(rows, [&](int64_t row, int) {
        const float* x = logits + row * vocab;
        float most[LANES];
        int32_t is_odd[LANES] = {};
        for (int j = 0; j < LANES; ++j) most[j] = -INFINITY;
        int64_t i = 0;
        for (; i + LANES <= vocab; i += LANES)
            for (int j = 0; j < LANES; ++j) {
                most[j] = x[i + j] > most[j] ? x[i + j] : most[j];
                is_odd[j] |= x[i + j] != x[i + j];
            }
        float best = -INFINITY;
        bool has_odd = false;
        for (int j = 0; j < LANES; ++j) best = most[j] > best ? most[j] : best, has_odd |= is_odd[j] != 0;
        for (; i < vocab; ++i) best = x[i] > best ? x[i] : best, has_odd |= x[i] != x[i];
        int64_t found = 0;
        while (found < vocab && !(has_odd ? x[found] != x[found] : x[found] == best)) ++found;
        tokens[row] = found < vocab ? found : 0;
    });
}
