// Whole blocks, copied within the pool, out of it and into it.
#include "kv.h"

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
