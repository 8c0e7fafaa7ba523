// Rotary embedding (arXiv 2104.09864) and the writing of keys and values to the pool.
#include <algorithm>

#include "kv.h"
#include "simd.h"

namespace baton {
namespace {

constexpr int64_t TOKENS_PER_TASK = 16;
constexpr int64_t DIM_MAX = 2048;

struct RotateCall {
    void* q;  // [T, q_heads, D], rotated in place
    const void* k;
    const void* v;
    int64_t q_stride, k_stride, v_stride;  // between tokens, in elements
    const float* cos;                      // [T, half]
    const float* sin;
    int64_t half, q_heads, layer;
};

struct RotateOnlyCall {
    void* x;  // [T, heads, 2 half]
    int64_t token_stride, head_stride;
    const float* cos;
    const float* sin;
    int64_t half, heads, token_count;
};

// Number i of the first half is turned with number i of the second.
template <typename T> void rotate(T* to, const T* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t count = half - i;
        const f32x16 a = load_floats(x + i, count), b = load_floats(x + half + i, count);
        const f32x16 c = load_floats(cos + i, count), s = load_floats(sin + i, count);
        store_floats(to + i, multiply_add(a, c, -(b * s)), count);
        store_floats(to + half + i, multiply_add(b, c, a * s), count);
    }
}

// Symmetric: scale = largest magnitude / 127, values rounded to nearest, ties to even.
template <typename T> void quantize(int8_t* to, float* scale, const T* x, int64_t dim) {
    f32x16 largest{};
    for (int64_t i = 0; i < dim; i += LANES) {
        const f32x16 value = load_floats(x + i, dim - i);
        largest = maximum(largest, maximum(value, -value));
    }
    *scale = maximum_of(largest) / 127.0f;
    const f32x16 divisor = splat(*scale > 0 ? *scale : 1.0f), magic = splat(12582912.0f);  // 1.5 * 2^23
    for (int64_t i = 0; i < dim; i += LANES) {
        const f32x16 rounded = (load_floats(x + i, dim - i) / divisor + magic) - magic;
        float values[LANES];
        store16(values, rounded);
        for (int64_t j = 0; j < std::min<int64_t>(LANES, dim - i); ++j) to[i + j] = static_cast<int8_t>(values[j]);
    }
}

// One token's place in the pool.
struct Slot {
    char* block;
    int64_t offset;
};

class Slots {
  public:
    Slots(const KvPool& pool, const Batch& batch, int64_t token) : pool_(pool), batch_(batch), token_(token) {
        const Span* end = batch.spans + batch.span_count;
        span_ = std::upper_bound(batch.spans, end, token, [](int64_t t, const Span& s) { return t < s.first_row; }) - 1;
    }

    Slot next() {
        while (token_ >= span_->first_row + span_->token_count) ++span_;
        const int64_t position = span_->first_position + token_++ - span_->first_row;
        const int32_t* table = batch_.tables + span_->first_block;
        return {pool_.block(table[position / pool_.positions]), position % pool_.positions};
    }

  private:
    const KvPool& pool_;
    const Batch& batch_;
    const Span* span_;
    int64_t token_;
};

template <typename T> class Store {
  public:
    Store(const KvPool& pool, int64_t layer) : pool_(pool), layer_(layer) {}

    void vector(const Slot& slot, int64_t plane, int64_t head, const T* x) const {
        const int64_t at = pool_.first_vector(layer_, plane, head) + slot.offset;
        char* to = slot.block + at * pool_.vector_bytes();
        if (pool_.stored == STORED_INT8)
            quantize(reinterpret_cast<int8_t*>(to), reinterpret_cast<float*>(slot.block + pool_.values_bytes) + at, x,
                     pool_.head_dim);
        else
            std::memcpy(to, x, static_cast<size_t>(pool_.vector_bytes()));
    }

  private:
    const KvPool& pool_;
    int64_t layer_;
};

template <typename Fn> void for_token_ranges(int64_t token_count, Fn&& fn) {
    const int64_t tasks = (token_count + TOKENS_PER_TASK - 1) / TOKENS_PER_TASK;
    parallel_for(tasks, [&](int64_t task, int) {
        fn(task * TOKENS_PER_TASK, std::min(token_count, (task + 1) * TOKENS_PER_TASK));
    });
}

template <typename T> void rotate_and_store(const KvPool& pool, const Batch& batch, const RotateCall& call) {
    const int64_t dim = pool.head_dim, half = call.half;
    const Store<T> store(pool, call.layer);
    for_token_ranges(batch.token_count, [&](int64_t first, int64_t end) {
        T rotated[DIM_MAX];
        Slots slots(pool, batch, first);
        for (int64_t t = first; t < end; ++t) {
            const float *cos = call.cos + t * half, *sin = call.sin + t * half;
            T* q = static_cast<T*>(call.q) + t * call.q_stride;
            const T* k = static_cast<const T*>(call.k) + t * call.k_stride;
            const T* v = static_cast<const T*>(call.v) + t * call.v_stride;
            for (int64_t head = 0; head < call.q_heads; ++head) rotate(q + head * dim, q + head * dim, cos, sin, half);
            const Slot slot = slots.next();
            for (int64_t head = 0; head < pool.heads; ++head) {
                rotate(rotated, k + head * dim, cos, sin, half);
                std::copy(k + head * dim + 2 * half, k + (head + 1) * dim, rotated + 2 * half);
                store.vector(slot, 0, head, rotated);
                store.vector(slot, 1, head, v + head * dim);
            }
        }
    });
}

template <typename T> void rotate_only(const RotateOnlyCall& call) {
    for_token_ranges(call.token_count, [&](int64_t first, int64_t end) {
        for (int64_t t = first; t < end; ++t)
            for (int64_t head = 0; head < call.heads; ++head) {
                T* x = static_cast<T*>(call.x) + t * call.token_stride + head * call.head_stride;
                rotate(x, x, call.cos + t * call.half, call.sin + t * call.half, call.half);
            }
    });
}

template <typename T>
void store_latent(const KvPool& pool, const Batch& batch, const T* x, int64_t stride, int64_t layer) {
    const Store<T> store(pool, layer);
    for_token_ranges(batch.token_count, [&](int64_t first, int64_t end) {
        Slots slots(pool, batch, first);
        for (int64_t t = first; t < end; ++t) store.vector(slots.next(), 0, 0, x + t * stride);
    });
}

}  // namespace
}  // namespace baton

// 0, or 1: a shape that is not supported.
BATON_API int baton_rotate_and_store(const baton::KvPool* pool, const baton::Batch* batch, const void* call_) {
    const auto& call = *static_cast<const baton::RotateCall*>(call_);
    if (pool->head_dim > baton::DIM_MAX || 2 * call.half > pool->head_dim || pool->planes != 2) return 1;
    if (pool->dtype == baton::BF16)
        baton::rotate_and_store<baton::bf16>(*pool, *batch, call);
    else
        baton::rotate_and_store<float>(*pool, *batch, call);
    return 0;
}

BATON_API void baton_rotate(int32_t dtype, const void* call) {
    if (dtype == baton::BF16)
        baton::rotate_only<baton::bf16>(*static_cast<const baton::RotateOnlyCall*>(call));
    else
        baton::rotate_only<float>(*static_cast<const baton::RotateOnlyCall*>(call));
}

BATON_API void baton_store_latent(const baton::KvPool* pool, const baton::Batch* batch, const void* x, int64_t stride,
                                  int64_t layer) {
    if (pool->dtype == baton::BF16)
        baton::store_latent(*pool, *batch, static_cast<const baton::bf16*>(x), stride, layer);
    else
        baton::store_latent(*pool, *batch, static_cast<const float*>(x), stride, layer);
}
