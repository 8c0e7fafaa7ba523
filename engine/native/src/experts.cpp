// Mixture of experts: the tokens of each expert become the rows of its products.
#include <vector>

#include "expert_exchange.h"
#include "matrix.h"
#include "vmath.h"

namespace baton {
namespace {

// Buffers that live from call to call.
struct Workspace {
    std::vector<int32_t> starts, filled, token_of, place_of;
    std::vector<Product> products;
    std::vector<char> hidden, outputs;
};
thread_local Workspace workspace;

struct ExpertsCall {
    const Matrix* const* gate_up;
    const Matrix* const* down;
    int64_t expert_count, tokens, chosen_count, hidden, inner;
    const void* x;
    int64_t x_stride;
    int32_t dtype, activation;
    const int64_t* chosen;
    const float* weights;
    void* out;
};

// Pairs (token, choice) in the order of their experts. An expert out of range is nobody's: it adds nothing.
void group(const ExpertsCall& call, Workspace& w) {
    const int64_t pairs = call.tokens * call.chosen_count;
    w.starts.assign(static_cast<size_t>(call.expert_count + 1), 0);
    w.token_of.resize(static_cast<size_t>(pairs));
    w.place_of.assign(static_cast<size_t>(pairs), -1);
    const auto valid = [&](int64_t e) { return e >= 0 && e < call.expert_count; };
    for (int64_t i = 0; i < pairs; ++i)
        if (valid(call.chosen[i])) ++w.starts[static_cast<size_t>(call.chosen[i] + 1)];
    for (size_t e = 0; e < static_cast<size_t>(call.expert_count); ++e) w.starts[e + 1] += w.starts[e];
    w.filled.assign(w.starts.begin(), w.starts.end());
    for (int64_t i = 0; i < pairs; ++i) {
        if (!valid(call.chosen[i])) continue;
        const int32_t place = w.filled[static_cast<size_t>(call.chosen[i])]++;
        w.token_of[static_cast<size_t>(place)] = static_cast<int32_t>(i / call.chosen_count);
        w.place_of[static_cast<size_t>(i)] = place;
    }
}

void* aligned(std::vector<char>& memory, int64_t bytes) {
    memory.resize(static_cast<size_t>(bytes) + 64);
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

bool run_products(const ExpertsCall& call, Workspace& w, char* hidden, float* outputs) {
    const int64_t size = call.dtype == F32 ? 4 : 2;
    for (const bool first : {true, false}) {
        w.products.clear();
        for (int64_t e = 0; e < call.expert_count; ++e) {
            const int64_t start = w.starts[static_cast<size_t>(e)];
            const int64_t rows = w.starts[static_cast<size_t>(e + 1)] - start;
            if (rows == 0) continue;
            char* inner = hidden + start * call.inner * size;
            if (first)
                w.products.push_back({call.gate_up[e],
                                      {call.x, rows, call.x_stride, w.token_of.data() + start, call.dtype},
                                      {inner, call.inner, call.dtype, nullptr, call.activation}});
            else
                w.products.push_back({call.down[e],
                                      {inner, rows, call.inner, nullptr, call.dtype},
                                      {outputs + start * call.hidden, call.hidden, F32, nullptr, -1}});
        }
        if (!multiply(w.products.data(), static_cast<int64_t>(w.products.size()))) return false;
    }
    return true;
}

}  // namespace

void combine_rows(const float* outputs, const float* weights, const int32_t* place_of, int64_t tokens,
                  int64_t chosen_count, int64_t hidden, int32_t dtype, void* out) {
    parallel_for(tokens, [&](int64_t t, int) {
        const size_t bytes = static_cast<size_t>(hidden) * 4;
        float* sum = static_cast<float*>(thread_scratch(0, bytes));
        std::memset(sum, 0, bytes);
        for (int64_t j = 0; j < chosen_count; ++j) {
            const int64_t pair = t * chosen_count + j;
            const int64_t place = place_of ? place_of[pair] : pair;
            if (place < 0) continue;
            const float weight = weights[pair];
            const float* from = outputs + place * hidden;
            for (int64_t c = 0; c < hidden; ++c) sum[c] += weight * from[c];
        }
        if (dtype == F32)
            store_row(static_cast<float*>(out) + t * hidden, sum, hidden);
        else
            store_row(static_cast<bf16*>(out) + t * hidden, sum, hidden);
    });
}

}  // namespace baton

// out [tokens, hidden] = sum over j of weights[t, j] * down(act(gate) * up) of expert chosen[t, j], in the order
// of j, in float32. chosen and weights: [tokens, chosen_count]. Returns 0, or 1 when x's dtype does not go with
// the matrices.
BATON_API int32_t baton_experts(const void* const* gate_up, const void* const* down, int64_t expert_count,
                                const void* x, int64_t tokens, int64_t x_stride, int32_t dtype,
                                const int64_t* chosen, const float* weights, int64_t chosen_count,
                                int32_t activation, void* out) {
    using namespace baton;
    if (tokens == 0) return 0;
    const auto matrices = [](const void* const* list) { return reinterpret_cast<const Matrix* const*>(list); };
    const Matrix* first = matrices(gate_up)[0];
    const ExpertsCall call{matrices(gate_up), matrices(down), expert_count, tokens, chosen_count, first->k, first->n / 2,
                    x, x_stride, dtype, activation, chosen, weights, out};
    Workspace& w = workspace;
    group(call, w);
    const int64_t pairs = tokens * chosen_count;
    char* hidden = static_cast<char*>(aligned(w.hidden, pairs * call.inner * (dtype == F32 ? 4 : 2)));
    float* outputs = static_cast<float*>(aligned(w.outputs, pairs * call.hidden * 4));
    if (!run_products(call, w, hidden, outputs)) return 1;
    combine_rows(outputs, weights, w.place_of.data(), tokens, chosen_count, call.hidden, dtype, out);
    return 0;
}
