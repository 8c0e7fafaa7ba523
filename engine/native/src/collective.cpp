// Collectives of the ranks of one host, through the memory that they share.
//
// All data moves in steps. In each step every rank fills its own slot of that step, publishes the step's number,
// and reads the others' slots when they have published it. A rank publishes step s only when it has read all
// it wanted of step s - 2, so four slots are enough, and nobody ever waits for a slot to become free.
//
// Sums are taken in the order of ranks, in float32, and rounded once: whichever rank computes an element gets
// the same bits.
#include "segment.h"
#include "simd.h"

#include <algorithm>
#include <cstdio>

namespace baton {
namespace {

enum Kind : uint32_t { ALL_REDUCE = 1, ALL_GATHER, GATHER, REDUCE_SCATTER, BROADCAST, SEND };
const char* const KINDS[] = {"?", "all_reduce", "all_gather", "gather", "reduce_scatter", "broadcast", "send"};
const char* const DTYPES[] = {"float32", "bfloat16", "float16", "bytes"};
constexpr uint32_t BYTES = 3;

// From here on the ranks divide the sum among them: twice the waits, but less to read and to add.
constexpr int64_t DIVIDE_BYTES = 64 * 1024;
// Chunks this large are copied and summed by all threads of a rank.
constexpr int64_t SHARED_BYTES = 128 * 1024, TASK_BYTES = 32 * 1024;

// --- elements ---

struct f16 {
    uint16_t bits;
};

inline float float_of(float x) { return x; }
inline float float_of(bf16 x) { return to_float(x); }
inline float float_of(f16 x) {
    const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
    float y = static_cast<float>(rest) * 0x1p-24f;  // right for what is below the smallest normal number
    uint32_t bits;
    if (rest >= 0x7c00u)
        bits = 0x7f800000u | (rest & 0x3ffu) << 13 | (rest > 0x7c00u ? 0x400000u : 0);
    else if (rest >= 0x400u)
        bits = (rest << 13) + (112u << 23);
    else
        std::memcpy(&bits, &y, 4);
    bits |= sign;
    std::memcpy(&y, &bits, 4);
    return y;
}

inline void put_float(float* to, float x) { *to = x; }
inline void put_float(bf16* to, float x) { *to = to_bf16(x); }
inline void put_float(f16* to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    uint32_t rest;
    if (bits > 0x7f800000u) {
        rest = 0x7e00u | (bits >> 13 & 0x3ffu);
    } else if (bits >= 0x47800000u) {
        rest = 0x7c00u;
    } else if (bits < 0x38800000u) {  // 0.5 has the spacing of the small halves, so the addition rounds
        float small;
        std::memcpy(&small, &bits, 4);
        small += 0.5f;
        std::memcpy(&rest, &small, 4);
        rest -= 0x3f000000u;
    } else {
        rest = (bits + 0xfffu + (bits >> 13 & 1u) - (112u << 23)) >> 13;
    }
    to->bits = static_cast<uint16_t>(sign | rest);
}

BATON_INLINE f32x16 load_part(const float* from) { return load16(from); }
BATON_INLINE f32x16 load_part(const bf16* from) { return load_floats(from); }
BATON_INLINE f32x16 load_part(const f16* from) {
#if BATON_SIMD512
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
    float wide[LANES];
    for (int i = 0; i < LANES; ++i) wide[i] = float_of(from[i]);
    return load16(wide);
#endif
}

BATON_INLINE void store_sum(float* to, f32x16 x) { store16(to, x); }
BATON_INLINE void store_sum(bf16* to, f32x16 x) { store_rounded(to, x); }
BATON_INLINE void store_sum(f16* to, f32x16 x) {
#if BATON_SIMD512
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    float lanes[LANES];
    store16(lanes, x);
    for (int i = 0; i < LANES; ++i) put_float(to + i, lanes[i]);
#endif
}

template <typename T, int N> void sum_of_ranks(const T* const* parts, int count_of_parts, T* out, int64_t count) {
    const int parts_count = N ? N : count_of_parts;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        f32x16 sum = load_part(parts[0] + i);
        for (int p = 1; p < parts_count; ++p) sum = sum + load_part(parts[p] + i);
        store_sum(out + i, sum);
    }
    for (; i < count; ++i) {
        float sum = float_of(parts[0][i]);
        for (int p = 1; p < parts_count; ++p) sum += float_of(parts[p][i]);
        put_float(out + i, sum);
    }
}

// fn(begin, end) of all elements, in one piece, or in pieces on all threads where there is much to do.
template <typename Fn> void in_pieces(int64_t count, int64_t element_bytes, Fn fn) {
    if (count * element_bytes < SHARED_BYTES || thread_count() == 1) return fn(int64_t{0}, count);
    const int64_t piece = TASK_BYTES / element_bytes;
    parallel_for((count + piece - 1) / piece, [&](int64_t task, int) {
        fn(task * piece, std::min(count, (task + 1) * piece));
    });
}

void copy(void* to, const void* from, int64_t bytes) {
    if (bytes <= 0) return;
    in_pieces(bytes, 1, [&](int64_t begin, int64_t end) {
        std::memcpy(static_cast<uint8_t*>(to) + begin, static_cast<const uint8_t*>(from) + begin, end - begin);
    });
}

// `out` may be one of the parts.
template <typename T> void sum(const T* const* parts, int part_count, T* out, int64_t count) {
    in_pieces(count, sizeof(T), [&](int64_t begin, int64_t end) {
        const T* at[RANKS_MAX];
        for (int p = 0; p < part_count; ++p) at[p] = parts[p] + begin;
        if (part_count == 2)
            sum_of_ranks<T, 2>(at, 2, out + begin, end - begin);
        else
            sum_of_ranks<T, 0>(at, part_count, out + begin, end - begin);
    });
}

// --- steps ---

uint64_t hash(uint64_t before, uint64_t value) {
    return (before ^ value) * 0x9E3779B97F4A7C15u ^ (before ^ value) >> 29;
}

int begin(Endpoint& e, Kind kind, uint32_t dtype, int64_t bytes, uint64_t detail, int64_t timeout_ns) {
    if (e.reason[0] || is_over(e)) return BROKEN;
    deadline_ns = now_ns() + timeout_ns;
    ++e.sequence;
    Call& call = e.steps[e.rank].calls[e.sequence & 1];
    call = {kind << 8 | dtype, e.sequence, static_cast<uint64_t>(bytes), detail};
    return DONE;
}

uint8_t* slot(Endpoint& e, int rank, uint32_t step) {
    return e.slots + (rank * SLOTS + static_cast<int64_t>(step % SLOTS)) * e.chunk_bytes;
}

void publish_step(Endpoint& e) { publish(e.steps[e.rank].step, ++e.step); }

void write_call(char* text, size_t bytes, const Call& call) {
    std::snprintf(text, bytes, "%s of %llu bytes (%s, call %u)", KINDS[call.kind >> 8],
                  static_cast<unsigned long long>(call.bytes), DTYPES[call.kind & 0xff], call.sequence);
}

int compare_calls(Endpoint& e, int rank) {
    const Call &own = e.steps[e.rank].calls[e.sequence & 1], &other = e.steps[rank].calls[e.sequence & 1];
    if (own.kind == other.kind && own.bytes == other.bytes && own.detail == other.detail &&
        own.sequence == other.sequence)
        return DONE;
    char own_text[120], other_text[120], text[REASON_BYTES];
    write_call(own_text, sizeof own_text, own);
    Call seen = other;
    seen.kind = std::min<uint32_t>(seen.kind >> 8, SEND) << 8 | (seen.kind & 3);
    write_call(other_text, sizeof other_text, seen);
    std::snprintf(text, sizeof text, "ranks call different things: rank %d %s, rank %d %s%s", e.rank, own_text,
                  rank, other_text, own.bytes == other.bytes && own.kind == other.kind ? ", divided otherwise" : "");
    give_up(e, text);
    return BROKEN;
}

// Waits until all ranks have published `step`; in the first step of a call, compares what they call.
int wait_for_step(Endpoint& e, uint32_t step, bool is_first) {
    for (int rank = 0; rank < e.size; ++rank) {
        if (rank == e.rank) continue;
        const int outcome =
            wait_until(e, e.steps[rank].step, [=](uint32_t value) { return reached(value, step); });
        if (outcome == TIMED_OUT) {
            char text[120];
            write_call(text, sizeof text, e.steps[e.rank].calls[e.sequence & 1]);
            give_up_late(e, rank, text);
        }
        if (outcome != DONE) return BROKEN;
        if (is_first && compare_calls(e, rank) != DONE) return BROKEN;
    }
    return DONE;
}

// The loop of all collectives: fill(i, slot) for step i of `count`, one step ahead of take(i, step's number).
template <typename Fill, typename Take> int run_steps(Endpoint& e, int64_t count, Fill fill, Take take) {
    const uint32_t first = e.step + 1;
    const auto put = [&](int64_t i) {
        fill(i, slot(e, e.rank, first + static_cast<uint32_t>(i)));
        publish_step(e);
    };
    put(0);
    for (int64_t i = 0; i < count; ++i) {
        if (i + 1 < count) put(i + 1);
        const uint32_t step = first + static_cast<uint32_t>(i);
        if (wait_for_step(e, step, i == 0) != DONE) return BROKEN;
        take(i, step);
    }
    return DONE;
}

int64_t steps_for(int64_t count, int64_t per_step) {
    return std::max<int64_t>(1, (count + per_step - 1) / per_step);
}

// --- all-reduce ---

// Every rank sums everything.
template <typename T> int all_reduce_whole(Endpoint& e, T* x, int64_t count) {
    const int64_t per_step = e.chunk_bytes / static_cast<int64_t>(sizeof(T));
    const auto length = [=](int64_t i) { return std::min(per_step, count - i * per_step); };
    return run_steps(
        e, steps_for(count, per_step),
        [&](int64_t i, uint8_t* own) { copy(own, x + i * per_step, length(i) * sizeof(T)); },
        [&](int64_t i, uint32_t step) {
            const T* parts[RANKS_MAX];
            T* const here = x + i * per_step;
            for (int rank = 0; rank < e.size; ++rank)
                parts[rank] = rank == e.rank ? here : reinterpret_cast<const T*>(slot(e, rank, step));
            sum(parts, e.size, here, length(i));
        });
}

// Every rank sums its share of a chunk and hands the result out in a second step.
template <typename T> int all_reduce_divided(Endpoint& e, T* x, int64_t count) {
    const int64_t per_chunk = e.chunk_bytes / static_cast<int64_t>(sizeof(T));
    for (int64_t at = 0; at < count; at += per_chunk, x += per_chunk) {
        const int64_t length = std::min(per_chunk, count - at);
        const int64_t share = rounded_up((length + e.size - 1) / e.size, LANES);
        const auto begin_of = [=](int rank) { return std::min(length, rank * share); };
        const int64_t begin = begin_of(e.rank), own = begin_of(e.rank + 1) - begin;

        const uint32_t step = e.step + 1;
        T* const mine = reinterpret_cast<T*>(slot(e, e.rank, step));
        copy(mine, x, begin * sizeof(T));
        copy(mine + begin + own, x + begin + own, (length - begin - own) * sizeof(T));
        publish_step(e);
        if (wait_for_step(e, step, at == 0) != DONE) return BROKEN;

        const T* parts[RANKS_MAX];
        for (int rank = 0; rank < e.size; ++rank)
            parts[rank] = rank == e.rank ? x + begin : reinterpret_cast<const T*>(slot(e, rank, step)) + begin;
        sum(parts, e.size, x + begin, own);
        copy(slot(e, e.rank, step + 1), x + begin, own * sizeof(T));
        publish_step(e);
        if (wait_for_step(e, step + 1, false) != DONE) return BROKEN;

        for (int rank = 0; rank < e.size; ++rank)
            if (rank != e.rank)
                copy(x + begin_of(rank), slot(e, rank, step + 1),
                     (begin_of(rank + 1) - begin_of(rank)) * sizeof(T));
    }
    return DONE;
}

template <typename T> int all_reduce(Endpoint& e, void* x, int64_t count) {
    const bool is_divided = e.size > 1 && count * static_cast<int64_t>(sizeof(T)) >= DIVIDE_BYTES;
    return is_divided ? all_reduce_divided(e, static_cast<T*>(x), count)
                      : all_reduce_whole(e, static_cast<T*>(x), count);
}

// --- reduce-scatter ---

template <typename T>
int reduce_scatter(Endpoint& e, const T* x, T* out, const int64_t* counts) {
    int64_t part_bytes = e.chunk_bytes / e.size;
    part_bytes -= part_bytes % (part_bytes < UNIT ? 4 : UNIT);
    const int64_t per_step = part_bytes / static_cast<int64_t>(sizeof(T));
    int64_t begins[RANKS_MAX + 1] = {0}, most = 0;
    for (int rank = 0; rank < e.size; ++rank) {
        begins[rank + 1] = begins[rank] + counts[rank];
        most = std::max(most, counts[rank]);
    }
    const auto length = [&](int rank, int64_t i) {
        return std::max<int64_t>(0, std::min(per_step, counts[rank] - i * per_step));
    };
    return run_steps(
        e, steps_for(most, per_step),
        [&](int64_t i, uint8_t* own) {
            for (int rank = 0; rank < e.size; ++rank)
                if (rank != e.rank)
                    copy(reinterpret_cast<T*>(own) + rank * per_step, x + begins[rank] + i * per_step,
                         length(rank, i) * sizeof(T));
        },
        [&](int64_t i, uint32_t step) {
            if (!length(e.rank, i)) return;
            const T* parts[RANKS_MAX];
            for (int rank = 0; rank < e.size; ++rank)
                parts[rank] = rank == e.rank
                                  ? x + begins[rank] + i * per_step
                                  : reinterpret_cast<const T*>(slot(e, rank, step)) + e.rank * per_step;
            sum(parts, e.size, out + i * per_step, length(e.rank, i));
        });
}

// --- gather ---

// Bytes begin … begin + bytes of a part whose rows are `row` long, into rows that are `stride` apart.
void place(uint8_t* to, int64_t stride, int64_t row, const uint8_t* from, int64_t begin, int64_t bytes) {
    if (stride == row) return copy(to + begin, from, bytes);
    while (bytes > 0) {
        const int64_t offset = begin % row, length = std::min(bytes, row - offset);
        std::memcpy(to + begin / row * stride + offset, from, length);
        from += length, begin += length, bytes -= length;
    }
}

int gather(Endpoint& e, const uint8_t* x, uint8_t* out, int64_t rows, const int64_t* row_bytes) {
    int64_t columns[RANKS_MAX + 1] = {0}, most = 0;
    for (int rank = 0; rank < e.size; ++rank) {
        columns[rank + 1] = columns[rank] + row_bytes[rank];
        most = std::max(most, rows * row_bytes[rank]);
    }
    // One row needs no distance to the next: its parts are whole.
    const int64_t stride = columns[e.size];
    const auto put = [&](int rank, const uint8_t* from, int64_t begin, int64_t bytes) {
        const bool is_whole = rows == 1 || row_bytes[rank] == stride;
        place(out + columns[rank], is_whole ? row_bytes[rank] : stride, row_bytes[rank], from, begin, bytes);
    };
    const auto length = [&](int rank, int64_t i) {
        return std::max<int64_t>(0, std::min(e.chunk_bytes, rows * row_bytes[rank] - i * e.chunk_bytes));
    };
    return run_steps(
        e, steps_for(most, e.chunk_bytes),
        [&](int64_t i, uint8_t* own) { copy(own, x + i * e.chunk_bytes, length(e.rank, i)); },
        [&](int64_t i, uint32_t step) {
            if (!out) return;
            for (int rank = 0; rank < e.size; ++rank)
                if (const int64_t bytes = length(rank, i))
                    put(rank, rank == e.rank ? x + i * e.chunk_bytes : slot(e, rank, step), i * e.chunk_bytes,
                        bytes);
        });
}

}  // namespace
}  // namespace baton

using namespace baton;

BATON_API int baton_all_reduce(Endpoint* e, void* x, int64_t count, int dtype, int64_t timeout_ns) {
    const int64_t bytes = count * (dtype == F32 ? 4 : 2);
    if (begin(*e, ALL_REDUCE, dtype, bytes, 0, timeout_ns) != DONE) return BROKEN;
    if (dtype == F32) return all_reduce<float>(*e, x, count);
    return dtype == BF16 ? all_reduce<bf16>(*e, x, count) : all_reduce<f16>(*e, x, count);
}

// counts[rank]: elements of each rank's part of x. `out` has counts[own rank].
BATON_API int baton_reduce_scatter(Endpoint* e, const void* x, void* out, const int64_t* counts, int dtype,
                                   int64_t timeout_ns) {
    int64_t total = 0;
    uint64_t detail = 0;
    for (int rank = 0; rank < e->size; ++rank) total += counts[rank], detail = hash(detail, counts[rank]);
    const int64_t bytes = total * (dtype == F32 ? 4 : 2);
    if (begin(*e, REDUCE_SCATTER, dtype, bytes, detail, timeout_ns) != DONE) return BROKEN;
    if (dtype == F32) return reduce_scatter(*e, static_cast<const float*>(x), static_cast<float*>(out), counts);
    if (dtype == BF16) return reduce_scatter(*e, static_cast<const bf16*>(x), static_cast<bf16*>(out), counts);
    return reduce_scatter(*e, static_cast<const f16*>(x), static_cast<f16*>(out), counts);
}

// x: `rows` rows of row_bytes[own rank]. out: as many rows that hold every rank's, one after the other; null on
// ranks that want none of it. root: the one rank that has an `out`, or -1.
BATON_API int baton_gather(Endpoint* e, const void* x, void* out, int64_t rows, const int64_t* row_bytes, int root,
                           int64_t timeout_ns) {
    int64_t total = 0;
    uint64_t detail = hash(rows, root);
    for (int rank = 0; rank < e->size; ++rank)
        total += rows * row_bytes[rank], detail = hash(detail, row_bytes[rank]);
    const Kind kind = root < 0 ? ALL_GATHER : GATHER;
    if (begin(*e, kind, BYTES, total, detail, timeout_ns) != DONE) return BROKEN;
    return gather(*e, static_cast<const uint8_t*>(x), static_cast<uint8_t*>(out), rows, row_bytes);
}

BATON_API int baton_broadcast(Endpoint* e, void* x, int64_t bytes, int source, int64_t timeout_ns) {
    if (begin(*e, BROADCAST, BYTES, bytes, source, timeout_ns) != DONE) return BROKEN;
    uint8_t* const here = static_cast<uint8_t*>(x);
    const int64_t chunk = e->chunk_bytes;
    const auto length = [=](int64_t i) { return std::min(chunk, bytes - i * chunk); };
    return run_steps(
        *e, steps_for(bytes, chunk),
        [&](int64_t i, uint8_t* own) {
            if (e->rank == source) copy(own, here + i * chunk, length(i));
        },
        [&](int64_t i, uint32_t step) {
            if (e->rank != source) copy(here + i * chunk, slot(*e, source, step), length(i));
        });
}

// --- between two ranks ---

namespace {

int ended(Endpoint& e, int outcome, int peer, const Call& call) {
    if (outcome == TIMED_OUT) {
        char text[120];
        write_call(text, sizeof text, call);
        give_up_late(e, peer, text);
    }
    return outcome == DONE ? DONE : BROKEN;
}

}  // namespace

// detail: a hash of shape and dtype.
BATON_API int baton_send(Endpoint* e, const void* x, int64_t bytes, uint64_t detail, int to, int64_t timeout_ns) {
    if (e->reason[0] || is_over(*e)) return BROKEN;
    deadline_ns = now_ns() + timeout_ns;
    const Call call = {SEND << 8 | BYTES, ++e->sent[to], static_cast<uint64_t>(bytes), detail};
    alignas(64) uint8_t head[UNIT] = {};
    std::memcpy(head, &call, sizeof call);
    const Ring ring = ring_between(*e, e->rank, to);
    int outcome = ring_write(*e, ring, head, UNIT);
    if (outcome == DONE) outcome = ring_write(*e, ring, x, bytes);
    return ended(*e, outcome, to, call);
}

BATON_API int baton_receive(Endpoint* e, void* x, int64_t bytes, uint64_t detail, int source, int64_t timeout_ns) {
    if (e->reason[0] || is_over(*e)) return BROKEN;
    deadline_ns = now_ns() + timeout_ns;
    const Call call = {SEND << 8 | BYTES, ++e->received[source], static_cast<uint64_t>(bytes), detail};
    alignas(64) uint8_t head[UNIT];
    const Ring ring = ring_between(*e, source, e->rank);
    const int outcome = ring_read(*e, ring, 0, head, UNIT);
    if (outcome != DONE) return ended(*e, outcome, source, call);
    Call sent;
    std::memcpy(&sent, head, sizeof sent);
    if (sent.kind != call.kind || sent.sequence != call.sequence || sent.bytes != call.bytes || sent.detail != detail) {
        char text[REASON_BYTES];
        std::snprintf(text, sizeof text,
                      "ranks call different things: rank %d sends %llu bytes to rank %d, which receives %lld%s", source,
                      static_cast<unsigned long long>(sent.bytes), e->rank, static_cast<long long>(bytes),
                      sent.bytes == call.bytes ? " of another shape or type" : "");
        give_up(*e, text);
        return BROKEN;
    }
    return ended(*e, ring_read(*e, ring, 0, x, bytes), source, call);
}
