// Activations and conversions.
#pragma once

#include "simd.h"

namespace baton {

// 1 / x for 1 <= x < 2^127. With AVX512 an estimate of 14 bits and one step of Newton's method.
BATON_INLINE f32x16 reciprocal(f32x16 x) {
#if BATON_SIMD512
    const __m512 estimate = _mm512_rcp14_ps((__m512)x);
    const __m512 error = _mm512_fnmadd_ps((__m512)x, estimate, _mm512_set1_ps(1.0f));
    return (f32x16)_mm512_fmadd_ps(estimate, error, estimate);
#else
    return splat(1.0f) / x;
#endif
}

// `a` where either is not a number.
BATON_INLINE f32x16 minimum(f32x16 a, f32x16 b) { return -maximum(-b, -a); }

// e^x, for x <= 87.
BATON_INLINE f32x16 exp_16(f32x16 x) { return exp2_16(x * splat(1.44269504088896341f)); }

BATON_INLINE f32x16 sigmoid(f32x16 x) {
    return reciprocal(splat(1.0f) + exp_16(minimum(-x, splat(87.0f))));
}

// Abramowitz and Stegun 7.1.26; absolute error below 2e-7.
BATON_INLINE f32x16 erf_16(f32x16 x) {
    const f32x16 a = minimum(maximum(x, -x), splat(1e18f));
    const f32x16 t = reciprocal(multiply_add(a, splat(0.3275911f), splat(1.0f)));
    f32x16 y = multiply_add(t, splat(1.061405429f), splat(-1.453152027f));
    y = multiply_add(y, t, splat(1.421413741f));
    y = multiply_add(y, t, splat(-0.284496736f));
    y = multiply_add(y, t, splat(0.254829592f));
    const f32x16 e = splat(1.0f) - y * t * exp_16(-a * a);
    return select(x < splat(0.0f), -e, e);
}

enum Activation : int32_t { SILU = 0, GELU = 1, GELU_TANH = 2, SWIGLU_OAI = 3 };

template <int A> BATON_INLINE f32x16 gated(f32x16 gate, f32x16 up) {
    if (A == SILU) return gate * sigmoid(gate) * up;
    if (A == GELU) return splat(0.5f) * gate * (splat(1.0f) + erf_16(gate * splat(0.70710678118654752f))) * up;
    if (A == GELU_TANH) {
        const f32x16 cube = gate * gate * gate;
        const f32x16 u = splat(0.79788456080286536f) * multiply_add(cube, splat(0.044715f), gate);
        return gate * sigmoid(splat(2.0f) * u) * up;
    }
    gate = minimum(gate, splat(7.0f));
    up = maximum(splat(-7.0f), minimum(up, splat(7.0f)));  // in this order a NaN stays one
    return (up + splat(1.0f)) * (gate * sigmoid(splat(1.702f) * gate));
}

template <int A> inline void gate_row(float* gate, const float* up, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store16(gate + i, gated<A>(load16(gate + i), load16(up + i)));
    if (i < n) store_floats(gate + i, gated<A>(load_floats(gate + i, n - i), load_floats(up + i, n - i)), n - i);
}

// gate[i] = act(gate[i]) * up[i]
inline void gate_rows(int activation, float* gate, const float* up, int64_t n) {
    switch (activation) {
        case SILU: return gate_row<SILU>(gate, up, n);
        case GELU: return gate_row<GELU>(gate, up, n);
        case GELU_TANH: return gate_row<GELU_TANH>(gate, up, n);
        default: return gate_row<SWIGLU_OAI>(gate, up, n);
    }
}

template <typename T> void load_row(T* to, const T* from, int64_t n) {
    std::memcpy(to, from, static_cast<size_t>(n) * sizeof(T));
}
inline void load_row(float* to, const bf16* from, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store_floats(to + i, load_floats(from + i, n - i), n - i);
}

inline void store_row(float* to, const float* from, int64_t n) {
    std::memcpy(to, from, static_cast<size_t>(n) * 4);
}
inline void store_row(bf16* to, const float* from, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store_floats(to + i, load_floats(from + i, n - i), n - i);
}

}  // namespace baton
