// Rows that workers send to expert ranks, and get back, in memory that both map.
//
// A link joins one caller to one expert rank. It has a few slots. The caller fills a free slot and posts it; the
// rank takes it, computes, and marks it done; the caller copies the results and frees it. Each side writes what
// the state says is its own. A bell wakes the one who waits: every process has one, which all its peers ring.
#pragma once

#include "segment.h"

#include <vector>

namespace baton {

enum SlotState : uint32_t { FREE = 0, POSTED = 1, TAKEN = 2, FINISHED = 3, REFUSED = 4 };

// How rows of activations travel: F32 and BF16 as in `Dtype`, or as int8 behind a float32 scale.
enum RowKind : int32_t { ROW_F32 = 0, ROW_BF16 = 1, ROW_INT8 = 2 };

struct alignas(128) Bell {
    Word word;                     // counts rings
    std::atomic<int64_t> beat_ns;  // the owner's last sign of life, by CLOCK_MONOTONIC
};

struct alignas(128) SlotHead {
    std::atomic<uint32_t> state;
    int32_t layer, rows, pairs;
    int32_t refused;  // layer * expert_count + expert that the rank does not hold; -1: the slot makes no sense
    int64_t posted_ns;
};

// The sizes of a link's slots. Both sides compute it from the same numbers; it is never read from shared memory.
struct SlotLayout {
    int64_t hidden, pairs_max, slot_count;
    int32_t row_kind;     // enum RowKind
    int32_t result_kind;  // enum Dtype

    int64_t row_bytes() const {
        const int64_t bytes = row_kind == ROW_F32 ? 4 * hidden : row_kind == ROW_BF16 ? 2 * hidden : hidden + 4;
        return rounded_up(bytes);
    }
    int64_t result_bytes() const { return rounded_up((result_kind == F32 ? 4 : 2) * hidden); }
    int64_t list_bytes() const { return rounded_up(4 * pairs_max); }
    int64_t slot_bytes() const {
        return rounded_up(static_cast<int64_t>(sizeof(SlotHead)) + 2 * list_bytes() +
                              pairs_max * (row_bytes() + result_bytes()),
                          4096);
    }
};

struct Slot {
    SlotHead* head;
    int32_t* row_of;   // [pairs]: the row of each pair
    int32_t* experts;  // [pairs], within the layer
    uint8_t* rows;     // [pairs_max] of row_bytes
    uint8_t* results;  // [pairs_max] of result_bytes
};

inline Slot slot_at(uint8_t* base, const SlotLayout& layout, int64_t index) {
    uint8_t* at = base + index * layout.slot_bytes();
    Slot slot;
    slot.head = reinterpret_cast<SlotHead*>(at);
    at += sizeof(SlotHead);
    slot.row_of = reinterpret_cast<int32_t*>(at);
    slot.experts = reinterpret_cast<int32_t*>(at + layout.list_bytes());
    slot.rows = at + 2 * layout.list_bytes();
    slot.results = slot.rows + layout.pairs_max * layout.row_bytes();
    return slot;
}

inline void ring(Bell& bell) {
    bell.word.value.fetch_add(1, std::memory_order_seq_cst);
    if (bell.word.sleepers.load(std::memory_order_seq_cst)) wake(bell.word);
}

// Waits until the bell's count differs from `seen`, or until `until_ns`. It sleeps at once: the peer may need this
// very core.
void wait_for_ring(Bell& bell, uint32_t seen, int64_t until_ns);

// out[t] = sum over j of weights[t, j] * outputs[place_of[t, j]], in the order of j, in float32. place_of: null:
// t * chosen_count + j; below zero: left out. dtype: of out.
void combine_rows(const float* outputs, const float* weights, const int32_t* place_of, int64_t tokens,
                  int64_t chosen_count, int64_t hidden, int32_t dtype, void* out);

}  // namespace baton
