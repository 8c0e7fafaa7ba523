// Parts that all kernels share: element types, memory, and the threads.
//
// Exported functions are extern "C", named baton_*, and take plain pointers and integers. They do not
// throw. Sizes are int64_t. Every exported function may be called from one thread at a time; a second
// caller is served correctly, on its own thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define BATON_API extern "C" __attribute__((visibility("default")))

namespace baton {

enum Dtype : int32_t { F32 = 0, BF16 = 1 };

using bf16 = uint16_t;

inline float to_float(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
inline float to_float(float x) { return x; }

// Round to nearest, ties to even; a NaN stays a NaN.
inline bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40u);
    return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <typename T> T from_float(float x);
template <> inline float from_float<float>(float x) { return x; }
template <> inline bf16 from_float<bf16>(float x) { return to_bf16(x); }

// --- threads ---

using TaskFunction = void (*)(void* context, int64_t task, int thread);
void run_tasks(int64_t task_count, TaskFunction function, void* context);

// Threads that compute, the caller's included.
int thread_count();

// fn(task, thread) for task = 0 … task_count - 1; threads take the next task when done with one. thread
// is below thread_count(), and no two tasks run on the same one at once (for scratch memory). Which
// thread runs which task varies: results must not depend on it. Runs on the caller alone if nested.
template <typename Fn> inline void parallel_for(int64_t task_count, Fn&& fn) {
    using Plain = typename std::remove_reference<Fn>::type;
    run_tasks(
        task_count,
        [](void* context, int64_t task, int thread) { (*static_cast<Plain*>(context))(task, thread); },
        const_cast<void*>(static_cast<const void*>(&fn)));
}

// Scratch of one thread that lives from call to call, grown as needed, 64-byte aligned. Its content is
// undefined. `slot` < SCRATCH_SLOTS tells buffers apart that are in use at the same time.
constexpr int SCRATCH_SLOTS = 9;
void* thread_scratch(int slot, size_t bytes);

}  // namespace baton
