// The KV pool and the batch, as the kernels see them (baton/core/geometry.py, engine/kernels/interface.py).
#pragma once

#include "runtime.h"

namespace baton {

enum Stored : int32_t { STORED_F32 = 0, STORED_BF16 = 1, STORED_INT8 = 2 };

constexpr int64_t stored_bytes(int stored) { return stored == STORED_F32 ? 4 : stored == STORED_BF16 ? 2 : 1; }

// Blocks of [layers, planes, heads, positions, head_dim] numbers; with int8 their scales follow,
// float [layers, planes, heads, positions].
struct KvPool {
    char* base;
    int64_t block_bytes, values_bytes;
    int64_t planes, heads, positions, head_dim;
    int64_t value_dim;
    int32_t stored;
    int32_t dtype;  // of queries, new keys and values, and results

    // The first vector of one head within a block, in vectors.
    int64_t first_vector(int64_t layer, int64_t plane, int64_t head) const {
        return ((layer * planes + plane) * heads + head) * positions;
    }
    int64_t vector_bytes() const { return head_dim * stored_bytes(stored); }
    char* block(int64_t id) const { return base + id * block_bytes; }
};

struct Span {
    int32_t first_position, token_count;
    int32_t first_row;    // of its tokens in the batch
    int32_t first_block;  // of its block table in `Batch::tables`
};

struct Batch {
    const Span* spans;
    const int32_t* tables;
    int64_t span_count, token_count;
};

}  // namespace baton
