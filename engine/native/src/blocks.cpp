// Whole blocks, copied within the pool, out of it and into it.
#include <algorithm>

#include "kv.h"
#include "xxh3.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
using Line = __m512i;
inline Line load_line(const char* from) { return _mm512_loadu_si512(from); }
inline void stream_line(char* to, Line line) { _mm512_stream_si512(reinterpret_cast<Line*>(to), line); }
#elif defined(__AVX2__)
struct Line {
    __m256i low, high;
};
inline Line load_line(const char* from) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32))};
}
inline void stream_line(char* to, Line line) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), line.low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), line.high);
}
#endif

constexpr int64_t LINE = 64, PAGE = 4096, AHEAD = 8 * LINE;

// Of two pages at once, a line of each in turn: more reads are under way, in more banks of the memory. Where that is
// slower, of one.
#if defined(__AVX2__)
template <int PAGES>
void stream_lines(char* to, const char* from, int64_t bytes) {
    int64_t at = 0;
    for (; at + PAGES * PAGE <= bytes; at += PAGES * PAGE)
        for (int64_t i = at; i < at + PAGE; i += 2 * LINE) {
            Line lines[2 * PAGES];
            for (int p = 0; p < PAGES; ++p) {
                const char* place = from + i + p * PAGE;
                _mm_prefetch(place + AHEAD, _MM_HINT_T0);
                _mm_prefetch(place + AHEAD + LINE, _MM_HINT_T0);
                lines[2 * p] = load_line(place), lines[2 * p + 1] = load_line(place + LINE);
            }
            for (int p = 0; p < PAGES; ++p) {
                stream_line(to + i + p * PAGE, lines[2 * p]);
                stream_line(to + i + p * PAGE + LINE, lines[2 * p + 1]);
            }
        }
    for (; at < bytes; at += LINE) stream_line(to + at, load_line(from + at));
    _mm_sfence();
}
#endif

}  // namespace

// Copies past the caches, which a block that is put away would only push others out of. The C library does so too,
// but from sizes on that are larger than a block. `pages`, 1 or 2, are read at once. The two ranges must not overlap.
BATON_API void baton_stream_copy(char* to, const char* from, int64_t bytes, int32_t pages) {
#if defined(__AVX2__)
    const int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<uintptr_t>(to) & (LINE - 1));
    const int64_t lines = (bytes - head) / LINE * LINE;
    std::memcpy(to, from, static_cast<size_t>(head));
    (pages == 2 ? stream_lines<2> : stream_lines<1>)(to + head, from + head, lines);
    std::memcpy(to + head + lines, from + head + lines, static_cast<size_t>(bytes - head - lines));
#else
    std::memcpy(to, from, static_cast<size_t>(bytes));
#endif
}

// Copies more than 240 bytes and returns the XXH3 of what it wrote, in one pass. Past the caches if it is asked to and
// `to` lies as vectors do. The two ranges must not overlap.
BATON_API uint64_t baton_copy_checked(char* to, const char* from, int64_t bytes, int32_t is_streamed) {
    using namespace baton::xxh3;
#if defined(__AVX2__)
    if (is_streamed && reinterpret_cast<uintptr_t>(to) % sizeof(Lanes) == 0) {
        const uint64_t checksum = copy<Put::STREAMED>(to, from, bytes);
        _mm_sfence();
        return checksum;
    }
#endif
    return copy<Put::STORED>(to, from, bytes);
}

// pairs [count][2]: source, destination; one after another, since one may read what another writes.
BATON_API void baton_copy_blocks(const baton::KvPool* pool, const int32_t* pairs, int64_t count) {
    const auto bytes = static_cast<size_t>(pool->block_bytes);
    for (int64_t i = 0; i < count; ++i) {
        const char* from = pool->block(pairs[2 * i]);
        char* to = pool->block(pairs[2 * i + 1]);
        if (from != to) std::memcpy(to, from, bytes);
    }
}

BATON_API void baton_gather_blocks(const baton::KvPool* pool, const int32_t* ids, int64_t count, char* to) {
    const auto bytes = static_cast<size_t>(pool->block_bytes);
    baton::parallel_for(count, [&](int64_t i, int) { std::memcpy(to + i * pool->block_bytes, pool->block(ids[i]), bytes); });
}

BATON_API void baton_scatter_blocks(const baton::KvPool* pool, const int32_t* ids, int64_t count, const char* from) {
    const auto bytes = static_cast<size_t>(pool->block_bytes);
    baton::parallel_for(count, [&](int64_t i, int) { std::memcpy(pool->block(ids[i]), from + i * pool->block_bytes, bytes); });
}
