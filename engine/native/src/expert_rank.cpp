// The side of an expert rank: what waits of one layer, of all callers, is computed in one grouped product.
#include <sched.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "expert_exchange.h"
#include "matrix.h"
#include "vmath.h"

namespace baton {
namespace {

struct RankLink {
    uint8_t* base;
    SlotLayout layout;
    Bell* bell;  // the caller's
};

struct Batch {
    struct Part {
        RankLink* link;
        int64_t slot, first_pair, first_row;
    };
    int32_t layer = 0;
    std::vector<Part> parts;
    int64_t pairs = 0, rows = 0;
};

struct Rank {
    Bell* bell;
    int64_t layer_count, expert_count;
    int32_t dtype, activation;  // of the model
    int64_t pairs_max;          // of one batch
    std::mutex mutex;           // held while a batch is computed
    std::atomic<int32_t> changes{0};  // calls that wait to change links or experts
    std::unordered_map<int64_t, std::unique_ptr<RankLink>> links;
    std::vector<const Matrix*> gate_up, down;  // [L * E], null: not held
    std::vector<uint8_t> held;                 // [L * E]
    Batch batch;                               // the one that was taken
    std::atomic<int64_t> rows_done{0}, busy_ns{0};
    std::vector<char> x, inner, outputs;
    std::vector<int32_t> order, place, row_of;
    std::vector<Product> products;
};

// The lock of a call that changes something. The one who computes lets it pass between two batches.
class ChangeLock {
  public:
    explicit ChangeLock(Rank& rank) : rank_(rank) {
        rank_.changes.fetch_add(1);
        rank_.mutex.lock();
        rank_.changes.fetch_sub(1);
    }
    ~ChangeLock() { rank_.mutex.unlock(); }

  private:
    Rank& rank_;
};

void let_changes_pass(const Rank& rank) {
    while (rank.changes.load() > 0) sched_yield();
}

char* aligned(std::vector<char>& memory, int64_t bytes) {
    if (static_cast<int64_t>(memory.size()) < bytes + 64) memory.resize(static_cast<size_t>(bytes) + 64);
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

// Whether what a caller has written makes sense, and the rank holds all that it names. A slot that does not is
// refused as a whole.
bool is_acceptable(const Rank& rank, const Slot& slot, const SlotLayout& layout, int32_t& refused) {
    const SlotHead& head = *slot.head;
    refused = -1;
    const bool has_sense = head.layer >= 0 && head.layer < rank.layer_count && head.pairs > 0 &&
                           head.pairs <= layout.pairs_max && head.rows > 0 && head.rows <= head.pairs;
    if (!has_sense) return false;
    for (int32_t p = 0; p < head.pairs; ++p) {
        const int32_t expert = slot.experts[p];
        if (slot.row_of[p] < 0 || slot.row_of[p] >= head.rows || expert < 0 || expert >= rank.expert_count)
            return false;
        if (!rank.held[static_cast<size_t>(head.layer * rank.expert_count + expert)]) {
            refused = static_cast<int32_t>(head.layer * rank.expert_count + expert);
            return false;
        }
    }
    return true;
}

// The layer whose turn it is: that of the slot that has waited longest, those with few pairs before all others.
int32_t layer_to_compute(Rank& rank) {
    constexpr int32_t FEW = 64;
    int32_t layer = -1;
    bool is_small = false;
    int64_t since_ns = 0;
    for (auto& [number, link] : rank.links)
        for (int64_t i = 0; i < link->layout.slot_count; ++i) {
            const SlotHead& head = *slot_at(link->base, link->layout, i).head;
            if (head.state.load(std::memory_order_acquire) != POSTED) continue;
            const bool small = head.pairs <= FEW;
            if (layer >= 0 && (is_small != small ? is_small : since_ns <= head.posted_ns)) continue;
            layer = head.layer, is_small = small, since_ns = head.posted_ns;
        }
    return layer;
}

bool take(Rank& rank) {
    Batch& batch = rank.batch;
    batch = Batch();
    const int32_t layer = layer_to_compute(rank);
    batch.layer = layer;
    for (auto& [number, link] : rank.links) {
        bool is_refused = false;
        for (int64_t i = 0; i < link->layout.slot_count; ++i) {
            const Slot slot = slot_at(link->base, link->layout, i);
            if (slot.head->state.load(std::memory_order_acquire) != POSTED || slot.head->layer != layer) continue;
            int32_t refused;
            if (!is_acceptable(rank, slot, link->layout, refused)) {
                slot.head->refused = refused;
                slot.head->state.store(REFUSED, std::memory_order_release);
                is_refused = true;
                continue;
            }
            if (!batch.parts.empty() && batch.pairs + slot.head->pairs > rank.pairs_max) continue;
            slot.head->state.store(TAKEN, std::memory_order_relaxed);
            batch.parts.push_back({link.get(), i, batch.pairs, batch.rows});
            batch.pairs += slot.head->pairs;
            batch.rows += slot.head->rows;
        }
        if (is_refused) ring(*link->bell);
    }
    return !batch.parts.empty();
}

void read_row(const SlotLayout& layout, const uint8_t* from, int32_t dtype, void* to) {
    if (layout.row_kind != ROW_INT8) {
        std::memcpy(to, from, static_cast<size_t>(layout.hidden) * (dtype == F32 ? 4 : 2));
        return;
    }
    float scale;
    std::memcpy(&scale, from, 4);
    const int8_t* codes = reinterpret_cast<const int8_t*>(from + 4);
    for (int64_t c = 0; c < layout.hidden; ++c) {
        const float value = scale * codes[c];
        if (dtype == F32)
            static_cast<float*>(to)[c] = value;
        else
            static_cast<bf16*>(to)[c] = to_bf16(value);
    }
}

// The batch's rows as one matrix of the model's dtype, and its pairs in the order of their experts.
void gather(Rank& rank, int64_t hidden) {
    Batch& batch = rank.batch;
    const int64_t size = rank.dtype == F32 ? 4 : 2;
    char* x = aligned(rank.x, batch.rows * hidden * size);
    parallel_for(static_cast<int64_t>(batch.parts.size()), [&](int64_t n, int) {
        const Batch::Part& part = batch.parts[static_cast<size_t>(n)];
        const Slot slot = slot_at(part.link->base, part.link->layout, part.slot);
        for (int32_t r = 0; r < slot.head->rows; ++r)
            read_row(part.link->layout, slot.rows + r * part.link->layout.row_bytes(), rank.dtype,
                     x + (part.first_row + r) * hidden * size);
    });
}

void write_results(Rank& rank, const float* outputs, int64_t hidden) {
    Batch& batch = rank.batch;
    parallel_for(static_cast<int64_t>(batch.parts.size()), [&](int64_t n, int) {
        const Batch::Part& part = batch.parts[static_cast<size_t>(n)];
        const Slot slot = slot_at(part.link->base, part.link->layout, part.slot);
        const SlotLayout& layout = part.link->layout;
        for (int32_t p = 0; p < slot.head->pairs; ++p) {
            const float* from = outputs + rank.place[static_cast<size_t>(part.first_pair + p)] * hidden;
            uint8_t* to = slot.results + p * layout.result_bytes();
            if (layout.result_kind == F32)
                std::memcpy(to, from, static_cast<size_t>(hidden) * 4);
            else
                store_row(reinterpret_cast<bf16*>(to), from, hidden);
        }
    });
}

void finish(Rank& rank) {
    Batch& batch = rank.batch;
    for (const Batch::Part& part : batch.parts) {
        const Slot slot = slot_at(part.link->base, part.link->layout, part.slot);
        slot.head->state.store(FINISHED, std::memory_order_release);
    }
    for (size_t n = 0; n < batch.parts.size(); ++n)
        if (n + 1 == batch.parts.size() || batch.parts[n + 1].link != batch.parts[n].link)
            ring(*batch.parts[n].link->bell);
    rank.rows_done.fetch_add(batch.pairs);
    batch = Batch();
}

// Pairs by expert: starts of the experts' pairs in rank.order, which lists rows; rank.place says where the results
// of each pair are.
std::vector<int32_t> group(Rank& rank) {
    Batch& batch = rank.batch;
    std::vector<int32_t> starts(static_cast<size_t>(rank.expert_count + 1), 0);
    rank.order.resize(static_cast<size_t>(batch.pairs));
    rank.place.resize(static_cast<size_t>(batch.pairs));
    const auto each_pair = [&](auto&& visit) {
        for (const Batch::Part& part : batch.parts) {
            const Slot slot = slot_at(part.link->base, part.link->layout, part.slot);
            for (int32_t p = 0; p < slot.head->pairs; ++p)
                visit(part.first_pair + p, slot.experts[p], part.first_row + slot.row_of[p]);
        }
    };
    each_pair([&](int64_t, int32_t expert, int64_t) { ++starts[static_cast<size_t>(expert + 1)]; });
    for (size_t e = 0; e + 1 < starts.size(); ++e) starts[e + 1] += starts[e];
    std::vector<int32_t> filled(starts);
    each_pair([&](int64_t pair, int32_t expert, int64_t row) {
        const int32_t at = filled[static_cast<size_t>(expert)]++;
        rank.order[static_cast<size_t>(at)] = static_cast<int32_t>(row);
        rank.place[static_cast<size_t>(pair)] = at;
    });
    return starts;
}

bool compute(Rank& rank) {
    Batch& batch = rank.batch;
    const int64_t first = batch.layer * rank.expert_count, size = rank.dtype == F32 ? 4 : 2;
    const Batch::Part& part = batch.parts.front();
    const Slot slot = slot_at(part.link->base, part.link->layout, part.slot);
    const Matrix* any = rank.gate_up[static_cast<size_t>(first + slot.experts[0])];
    const int64_t hidden = any->k, width = any->n / 2;
    gather(rank, hidden);
    const std::vector<int32_t> starts = group(rank);
    char* x = aligned(rank.x, batch.rows * hidden * size);
    char* inner = aligned(rank.inner, batch.pairs * width * size);
    float* outputs = reinterpret_cast<float*>(aligned(rank.outputs, batch.pairs * hidden * 4));
    for (const bool is_first : {true, false}) {
        rank.products.clear();
        for (int64_t e = 0; e < rank.expert_count; ++e) {
            const int64_t start = starts[static_cast<size_t>(e)], rows = starts[static_cast<size_t>(e + 1)] - start;
            if (rows == 0) continue;
            char* at = inner + start * width * size;
            const size_t key = static_cast<size_t>(first + e);
            if (is_first)
                rank.products.push_back({rank.gate_up[key],
                                         {x, rows, hidden, rank.order.data() + start, rank.dtype},
                                         {at, width, rank.dtype, nullptr, rank.activation}});
            else
                rank.products.push_back({rank.down[key],
                                         {at, rows, width, nullptr, rank.dtype},
                                         {outputs + start * hidden, hidden, F32, nullptr, -1}});
        }
        if (!multiply(rank.products.data(), static_cast<int64_t>(rank.products.size()))) return false;
    }
    write_results(rank, outputs, hidden);
    return true;
}

}  // namespace
}  // namespace baton

using namespace baton;

BATON_API void* baton_rank_new(void* bell, int64_t layer_count, int64_t expert_count, int32_t dtype,
                               int32_t activation, int64_t pairs_max) {
    auto* rank = new Rank();
    rank->bell = static_cast<Bell*>(bell);
    rank->layer_count = layer_count, rank->expert_count = expert_count;
    rank->dtype = dtype, rank->activation = activation, rank->pairs_max = pairs_max;
    const size_t count = static_cast<size_t>(layer_count * expert_count);
    rank->gate_up.assign(count, nullptr), rank->down.assign(count, nullptr), rank->held.assign(count, 0);
    return rank;
}

BATON_API void baton_rank_free(void* rank) { delete static_cast<Rank*>(rank); }

BATON_API void baton_rank_link(void* handle, int64_t number, void* base, int64_t hidden, int64_t pairs_max,
                               int64_t slot_count, int32_t row_kind, int32_t result_kind, void* bell) {
    Rank& rank = *static_cast<Rank*>(handle);
    auto link = std::make_unique<RankLink>();
    link->base = static_cast<uint8_t*>(base);
    link->layout = {hidden, pairs_max, slot_count, row_kind, result_kind};
    link->bell = static_cast<Bell*>(bell);
    ChangeLock lock(rank);
    rank.links[number] = std::move(link);
}

// Returns after the batch under way: the link's memory is not touched any more.
BATON_API void baton_rank_unlink(void* handle, int64_t number) {
    Rank& rank = *static_cast<Rank*>(handle);
    ChangeLock lock(rank);
    const auto found = rank.links.find(number);
    if (found == rank.links.end()) return;
    auto& parts = rank.batch.parts;  // of a batch that was taken to be computed elsewhere
    parts.erase(std::remove_if(parts.begin(), parts.end(),
                               [&](const Batch::Part& part) { return part.link == found->second.get(); }),
                parts.end());
    rank.links.erase(found);
}

// Sets whether the rank holds an expert, and its matrices: null where they are computed elsewhere. Returns after
// the batch under way, so that matrices that are no longer named may be freed.
BATON_API void baton_rank_set(void* handle, int64_t expert, int32_t is_held, const void* gate_up, const void* down) {
    Rank& rank = *static_cast<Rank*>(handle);
    ChangeLock lock(rank);
    const size_t key = static_cast<size_t>(expert);
    rank.held[key] = static_cast<uint8_t>(is_held);
    rank.gate_up[key] = static_cast<const Matrix*>(gate_up), rank.down[key] = static_cast<const Matrix*>(down);
}

// Computes what comes for `span_ns`. 0, or 1 when the matrices do not go with the model's dtype.
BATON_API int32_t baton_rank_serve(void* handle, int64_t span_ns) {
    Rank& rank = *static_cast<Rank*>(handle);
    const int64_t until_ns = now_ns() + span_ns;
    while (now_ns() < until_ns) {
        const uint32_t seen = rank.bell->word.value.load(std::memory_order_acquire);
        bool has_worked = false;
        let_changes_pass(rank);
        {
            std::lock_guard<std::mutex> lock(rank.mutex);
            if (take(rank)) {
                const int64_t begun_ns = now_ns();
                if (!compute(rank)) return 1;
                rank.busy_ns.fetch_add(now_ns() - begun_ns);
                finish(rank);
                has_worked = true;
            }
        }
        if (!has_worked) wait_for_ring(*rank.bell, seen, until_ns);
    }
    return 0;
}

// For kernels that are called from elsewhere: takes a batch. Returns its number of pairs; 0: nothing waits.
// `sizes`: layer, rows. The rows are then written by `baton_rank_rows`.
BATON_API int64_t baton_rank_take(void* handle, int64_t span_ns, int64_t* sizes) {
    Rank& rank = *static_cast<Rank*>(handle);
    const int64_t until_ns = now_ns() + span_ns;
    while (true) {
        const uint32_t seen = rank.bell->word.value.load(std::memory_order_acquire);
        {
            std::lock_guard<std::mutex> lock(rank.mutex);
            if (take(rank)) {
                sizes[0] = rank.batch.layer, sizes[1] = rank.batch.rows;
                return rank.batch.pairs;
            }
        }
        if (now_ns() >= until_ns) return 0;
        wait_for_ring(*rank.bell, seen, until_ns);
    }
}

// x [rows, hidden] of the model's dtype, and for each expert the rows that go to it: order [pairs], starts
// [expert_count + 1].
BATON_API void baton_rank_rows(void* handle, int64_t hidden, void* x, int32_t* order, int32_t* starts) {
    Rank& rank = *static_cast<Rank*>(handle);
    std::lock_guard<std::mutex> lock(rank.mutex);
    const int64_t size = rank.dtype == F32 ? 4 : 2;
    for (const Batch::Part& part : rank.batch.parts) {
        const Slot slot = slot_at(part.link->base, part.link->layout, part.slot);
        for (int32_t r = 0; r < slot.head->rows; ++r)
            read_row(part.link->layout, slot.rows + r * part.link->layout.row_bytes(), rank.dtype,
                     static_cast<char*>(x) + (part.first_row + r) * hidden * size);
    }
    const std::vector<int32_t> found = group(rank);
    std::copy(found.begin(), found.end(), starts);
    std::copy(rank.order.begin(), rank.order.end(), order);
}

// outputs: float32 [pairs, hidden], in the order of `order`.
BATON_API void baton_rank_done(void* handle, const float* outputs, int64_t hidden, int64_t busy_ns) {
    Rank& rank = *static_cast<Rank*>(handle);
    std::lock_guard<std::mutex> lock(rank.mutex);
    write_results(rank, outputs, hidden);
    rank.busy_ns.fetch_add(busy_ns);
    finish(rank);
}

// rows computed, nanoseconds spent, since the start.
BATON_API void baton_rank_stats(void* handle, int64_t* out) {
    const Rank& rank = *static_cast<Rank*>(handle);
    out[0] = rank.rows_done.load(), out[1] = rank.busy_ns.load();
}
