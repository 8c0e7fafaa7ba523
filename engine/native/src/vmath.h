// Elementary functions and conversions, written so that loops over them vectorise.
#pragma once

#include "runtime.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace baton {

// Cephes' expf: reduction to [-ln2/2, ln2/2], polynomial of degree 5. Within 2 ulp; arguments
// beyond the range of float are clamped to it.
inline float exp_f(float x) {
    x = x > 88.3762626647949f ? 88.3762626647949f : x;
    x = x < -87.3365447504019f ? -87.3365447504019f : x;
    const float shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
    const float n = shifted - 12582912.0f;
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return y * power;
}

inline float sigmoid_f(float x) { return 1.0f / (1.0f + exp_f(-x)); }

// Abramowitz and Stegun 7.1.26; absolute error below 2e-7.
inline float erf_f(float x) {
    const float a = x < 0 ? -x : x;
    const float t = 1.0f / (1.0f + 0.3275911f * a);
    float y = 1.061405429f;
    y = y * t - 1.453152027f;
    y = y * t + 1.421413741f;
    y = y * t - 0.284496736f;
    y = y * t + 0.254829592f;
    const float e = 1.0f - y * t * exp_f(-a * a);
    return x < 0 ? -e : e;
}

enum Activation : int32_t { SILU = 0, GELU = 1, GELU_TANH = 2, SWIGLU_OAI = 3 };

template <int A> inline float gate_f(float gate, float up) {
    if (A == SILU) return gate * sigmoid_f(gate) * up;
    if (A == GELU) return 0.5f * gate * (1.0f + erf_f(gate * 0.70710678118654752f)) * up;
    if (A == GELU_TANH) {
        const float u = 0.79788456080286536f * (gate + 0.044715f * gate * gate * gate);
        return gate * sigmoid_f(2.0f * u) * up;
    }
    gate = gate > 7.0f ? 7.0f : gate;
    up = up > 7.0f ? 7.0f : up;
    up = up < -7.0f ? -7.0f : up;
    return (up + 1.0f) * (gate * sigmoid_f(1.702f * gate));
}

template <int A> inline void gate_row(float* gate, const float* up, int64_t n) {
    for (int64_t i = 0; i < n; ++i) gate[i] = gate_f<A>(gate[i], up[i]);
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

inline void load_row(float* to, const float* from, int64_t n) {
    std::memcpy(to, from, static_cast<size_t>(n) * 4);
}
inline void load_row(float* to, const bf16* from, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}

inline void store_row(float* to, const float* from, int64_t n) {
    std::memcpy(to, from, static_cast<size_t>(n) * 4);
}
inline void store_row(bf16* to, const float* from, int64_t n) {
#if defined(__AVX512BF16__)
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1);
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, from + i));
        _mm256_mask_storeu_epi16(to + i, mask, rounded);
    }
#else
    for (int64_t i = 0; i < n; ++i) to[i] = to_bf16(from[i]);
#endif
}

}  // namespace baton
