// The side of a worker: it divides a layer's (token, expert) pairs over links, posts them in pieces, and collects
// the results.
#include <algorithm>
#include <cmath>
#include <ctime>
#include <memory>
#include <mutex>
#include <unordered_map>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "expert_exchange.h"

namespace baton {

void wait_for_ring(Bell& bell, uint32_t seen, int64_t until_ns) {
    bell.word.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const int64_t left_ns = until_ns - now_ns();
    if (left_ns > 0 && bell.word.value.load(std::memory_order_seq_cst) == seen) {
        const timespec span = {static_cast<time_t>(left_ns / 1'000'000'000),
                               static_cast<long>(left_ns % 1'000'000'000)};
        syscall(SYS_futex, &bell.word.value, FUTEX_WAIT, seen, &span, nullptr, 0);
    }
    bell.word.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

namespace {

struct Flight;

// What a slot carries.
struct Piece {
    Flight* flight = nullptr;
    std::vector<int32_t> pairs;
};

struct Link {
    uint8_t* base;
    SlotLayout layout;
    Bell* bell;
    bool is_broken = false;
    std::vector<Piece> pieces;  // by slot
};

// One dispatch of one layer.
struct Flight {
    const uint8_t* x;
    int64_t x_stride_bytes, tokens, chosen_count, hidden;
    int32_t dtype, layer;
    const int64_t* chosen;
    float* out;  // [tokens * chosen_count, hidden]
    std::unordered_map<int32_t, std::vector<int32_t>> queues;  // pairs not posted yet, by link, last first
    std::vector<int32_t> unserved;
    int64_t open_pairs = 0;  // queued or posted
    bool has_ended = false;  // nobody waits for it; it stays while slots carry pairs of it
};

struct Stats {
    int64_t rows = 0, pairs = 0, row_bytes = 0, result_bytes = 0, rerouted = 0;
};

struct Caller {
    Bell* bell;
    std::mutex mutex;
    std::unordered_map<int32_t, std::unique_ptr<Link>> links;
    std::unordered_map<int64_t, std::unique_ptr<Flight>> flights;
    int64_t next_flight = 1;
    uint32_t turn = 0;
    Stats stats;
};

void copy_row(const Flight& f, int64_t token, const SlotLayout& layout, uint8_t* to) {
    const uint8_t* from = f.x + token * f.x_stride_bytes;
    if (layout.row_kind != ROW_INT8) {
        std::memcpy(to, from, static_cast<size_t>(f.hidden) * (f.dtype == F32 ? 4 : 2));
        return;
    }
    const auto value = [&](int64_t c) {
        return f.dtype == F32 ? reinterpret_cast<const float*>(from)[c]
                              : to_float(reinterpret_cast<const bf16*>(from)[c]);
    };
    float most = 0;
    for (int64_t c = 0; c < f.hidden; ++c) most = std::max(most, std::fabs(value(c)));
    const float scale = most / 127.0f, inverse = most > 0 ? 127.0f / most : 0.0f;
    std::memcpy(to, &scale, 4);
    int8_t* codes = reinterpret_cast<int8_t*>(to + 4);
    for (int64_t c = 0; c < f.hidden; ++c) codes[c] = static_cast<int8_t>(std::lrintf(value(c) * inverse));
}

void copy_result(const SlotLayout& layout, const uint8_t* from, float* to) {
    if (layout.result_kind == F32) {
        std::memcpy(to, from, static_cast<size_t>(layout.hidden) * 4);
        return;
    }
    const bf16* values = reinterpret_cast<const bf16*>(from);
    for (int64_t c = 0; c < layout.hidden; ++c) to[c] = to_float(values[c]);
}

void post_piece(Caller& caller, Link& link, int64_t index, Flight& f, std::vector<int32_t>& queue) {
    const Slot slot = slot_at(link.base, link.layout, index);
    Piece& piece = link.pieces[static_cast<size_t>(index)];
    piece.flight = &f;
    piece.pairs.clear();
    int32_t rows = 0;
    int64_t token_before = -1;
    while (!queue.empty() && static_cast<int64_t>(piece.pairs.size()) < link.layout.pairs_max) {
        const int32_t pair = queue.back();
        queue.pop_back();
        const int64_t token = pair / f.chosen_count;
        if (token != token_before) copy_row(f, token, link.layout, slot.rows + rows++ * link.layout.row_bytes());
        token_before = token;
        slot.row_of[piece.pairs.size()] = rows - 1;
        slot.experts[piece.pairs.size()] = static_cast<int32_t>(f.chosen[pair]);
        piece.pairs.push_back(pair);
    }
    slot.head->layer = f.layer, slot.head->rows = rows, slot.head->pairs = static_cast<int32_t>(piece.pairs.size());
    slot.head->posted_ns = now_ns();
    caller.stats.rows += rows, caller.stats.pairs += slot.head->pairs;
    caller.stats.row_bytes += rows * link.layout.row_bytes();
    caller.stats.result_bytes += slot.head->pairs * link.layout.result_bytes();
    slot.head->state.store(POSTED, std::memory_order_release);
}

void post(Caller& caller, Flight& f) {
    for (auto& [number, queue] : f.queues) {
        if (queue.empty()) continue;
        Link& link = *caller.links.at(number);
        bool is_posted = false;
        for (int64_t i = 0; i < link.layout.slot_count && !queue.empty(); ++i) {
            if (link.pieces[static_cast<size_t>(i)].flight) continue;
            post_piece(caller, link, i, f, queue);
            is_posted = true;
        }
        if (is_posted) ring(*link.bell);
    }
}

void give_up_pairs(Caller& caller, Flight& f, std::vector<int32_t>& pairs) {
    f.unserved.insert(f.unserved.end(), pairs.begin(), pairs.end());
    f.open_pairs -= static_cast<int64_t>(pairs.size());
    caller.stats.rerouted += static_cast<int64_t>(pairs.size());
    pairs.clear();
}

// The link gets and gives nothing more; its pairs are to be sent elsewhere.
void break_link(Caller& caller, int32_t number, Link& link) {
    if (link.is_broken) return;
    link.is_broken = true;
    for (Piece& piece : link.pieces) {
        if (piece.flight) give_up_pairs(caller, *piece.flight, piece.pairs);
        piece.flight = nullptr;
    }
    for (auto& [id, flight] : caller.flights) {
        const auto found = flight->queues.find(number);
        if (found == flight->queues.end()) continue;
        give_up_pairs(caller, *flight, found->second);
        flight->queues.erase(found);
    }
}

// Forgets dispatches that have ended, once no slot carries pairs of them.
void sweep(Caller& caller) {
    for (auto at = caller.flights.begin(); at != caller.flights.end();) {
        bool is_carried = !at->second->has_ended;
        for (auto& [number, link] : caller.links)
            for (const Piece& piece : link->pieces) is_carried = is_carried || piece.flight == at->second.get();
        at = is_carried ? std::next(at) : caller.flights.erase(at);
    }
}

struct Refusal {
    int32_t link = -1, expert = -1;
};

void collect(Caller& caller, Refusal& refusal) {
    bool has_ended = false;
    for (auto& [number, link] : caller.links) {
        if (link->is_broken) continue;
        for (int64_t i = 0; i < link->layout.slot_count; ++i) {
            Piece& piece = link->pieces[static_cast<size_t>(i)];
            if (!piece.flight) continue;
            const Slot slot = slot_at(link->base, link->layout, i);
            const uint32_t state = slot.head->state.load(std::memory_order_acquire);
            if (state == REFUSED) {
                refusal = {number, slot.head->refused};
                give_up_pairs(caller, *piece.flight, piece.pairs);
            } else if (state == FINISHED) {
                for (size_t p = 0; p < piece.pairs.size(); ++p)
                    copy_result(link->layout, slot.results + static_cast<int64_t>(p) * link->layout.result_bytes(),
                                piece.flight->out + piece.pairs[p] * link->layout.hidden);
                piece.flight->open_pairs -= static_cast<int64_t>(piece.pairs.size());  // none, if it has ended
            } else {
                continue;
            }
            has_ended = has_ended || piece.flight->has_ended;
            slot.head->state.store(FREE, std::memory_order_release);
            piece.flight = nullptr;
        }
    }
    if (has_ended) sweep(caller);
}

// Gives pairs to links. starts [L * E + 1] and links: see `RouteTable`. Pairs whose expert has none stay unserved.
void route(Caller& caller, Flight& f, std::vector<int32_t> pairs, const int32_t* starts, const int32_t* links,
           int64_t expert_count) {
    std::sort(pairs.begin(), pairs.end(), std::greater<int32_t>());  // queues are emptied from their ends
    for (const int32_t pair : pairs) {
        const int64_t expert = f.layer * expert_count + f.chosen[pair];
        const uint32_t count = static_cast<uint32_t>(starts[expert + 1] - starts[expert]);
        const uint32_t choice = static_cast<uint32_t>(pair / f.chosen_count) + caller.turn;
        const int32_t link = count ? links[starts[expert] + static_cast<int32_t>(choice % count)] : -1;
        const auto found = caller.links.find(link);
        if (found == caller.links.end() || found->second->is_broken) {
            f.unserved.push_back(pair);
            continue;
        }
        f.queues[link].push_back(pair);
        ++f.open_pairs;
    }
    ++caller.turn;
}

}  // namespace
}  // namespace baton

using namespace baton;

BATON_API int64_t baton_bell_bytes() { return sizeof(Bell); }
BATON_API void baton_bell_ring(void* bell) { ring(*static_cast<Bell*>(bell)); }
BATON_API void baton_bell_beat(void* bell) { static_cast<Bell*>(bell)->beat_ns.store(now_ns()); }
BATON_API int64_t baton_bell_last_beat(void* bell) { return static_cast<Bell*>(bell)->beat_ns.load(); }
BATON_API uint32_t baton_bell_count(void* bell) { return static_cast<Bell*>(bell)->word.value.load(); }
BATON_API void baton_bell_wait(void* bell, uint32_t seen, int64_t timeout_ns) {
    wait_for_ring(*static_cast<Bell*>(bell), seen, now_ns() + timeout_ns);
}

BATON_API int64_t baton_slot_bytes(int64_t hidden, int64_t pairs_max, int32_t row_kind, int32_t result_kind) {
    return SlotLayout{hidden, pairs_max, 1, row_kind, result_kind}.slot_bytes();
}

BATON_API uint32_t baton_slot_state(void* head) {
    return static_cast<SlotHead*>(head)->state.load(std::memory_order_acquire);
}
BATON_API void baton_slot_set_state(void* head, uint32_t state) {
    static_cast<SlotHead*>(head)->state.store(state, std::memory_order_release);
}

BATON_API void* baton_caller_new(void* bell) {
    auto* caller = new Caller();
    caller->bell = static_cast<Bell*>(bell);
    return caller;
}

BATON_API void baton_caller_free(void* caller) { delete static_cast<Caller*>(caller); }

BATON_API void baton_caller_link(void* handle, int32_t number, void* base, int64_t hidden, int64_t pairs_max,
                                 int64_t slot_count, int32_t row_kind, int32_t result_kind, void* bell) {
    Caller& caller = *static_cast<Caller*>(handle);
    auto link = std::make_unique<Link>();
    link->base = static_cast<uint8_t*>(base);
    link->layout = {hidden, pairs_max, slot_count, row_kind, result_kind};
    link->bell = static_cast<Bell*>(bell);
    link->pieces.resize(static_cast<size_t>(slot_count));
    std::lock_guard<std::mutex> lock(caller.mutex);
    caller.links[number] = std::move(link);
}

// Afterwards the link's memory is not touched any more. What it had is to be sent elsewhere.
BATON_API void baton_caller_unlink(void* handle, int32_t number) {
    Caller& caller = *static_cast<Caller*>(handle);
    {
        std::lock_guard<std::mutex> lock(caller.mutex);
        const auto found = caller.links.find(number);
        if (found == caller.links.end()) return;
        break_link(caller, number, *found->second);
        caller.links.erase(found);
    }
    ring(*caller.bell);
}

// Begins to send rows x [tokens, hidden] to their experts; returns a number for the calls below. x, chosen
// [tokens, chosen_count] and out [tokens * chosen_count, hidden] float32 stay until `baton_caller_end`.
BATON_API int64_t baton_caller_begin(void* handle, const void* x, int64_t tokens, int64_t x_stride_bytes,
                                     int32_t dtype, int64_t hidden, const int64_t* chosen, int64_t chosen_count,
                                     int32_t layer, int64_t expert_count, const int32_t* starts,
                                     const int32_t* links, float* out) {
    Caller& caller = *static_cast<Caller*>(handle);
    auto flight = std::make_unique<Flight>();
    Flight& f = *flight;
    f.x = static_cast<const uint8_t*>(x), f.x_stride_bytes = x_stride_bytes;
    f.tokens = tokens, f.chosen_count = chosen_count, f.hidden = hidden, f.dtype = dtype, f.layer = layer;
    f.chosen = chosen, f.out = out;
    std::vector<int32_t> pairs(static_cast<size_t>(tokens * chosen_count));
    for (size_t i = 0; i < pairs.size(); ++i) pairs[i] = static_cast<int32_t>(i);
    std::lock_guard<std::mutex> lock(caller.mutex);
    route(caller, f, std::move(pairs), starts, links, expert_count);
    const int64_t id = caller.next_flight++;
    caller.flights[id] = std::move(flight);
    post(caller, f);
    return id;
}

// Sends what is unserved by another table. Returns how many pairs have no rank.
BATON_API int64_t baton_caller_reroute(void* handle, int64_t id, int64_t expert_count, const int32_t* starts,
                                       const int32_t* links) {
    Caller& caller = *static_cast<Caller*>(handle);
    std::lock_guard<std::mutex> lock(caller.mutex);
    Flight& f = *caller.flights.at(id);
    std::vector<int32_t> pairs;
    pairs.swap(f.unserved);
    route(caller, f, std::move(pairs), starts, links, expert_count);
    post(caller, f);
    return static_cast<int64_t>(f.unserved.size());
}

// Waits for the results. 0: all are there. 1: some pairs are unserved, of links that broke, that refused
// (refused[0]: the link, else -1; refused[1]: see SlotHead), or that nobody holds. 2: `timeout_ns` is over.
BATON_API int32_t baton_caller_finish(void* handle, int64_t id, int64_t timeout_ns, int32_t* refused) {
    Caller& caller = *static_cast<Caller*>(handle);
    const int64_t until_ns = now_ns() + timeout_ns;
    refused[0] = -1;
    while (true) {
        const uint32_t seen = caller.bell->word.value.load(std::memory_order_acquire);
        {
            std::lock_guard<std::mutex> lock(caller.mutex);
            Refusal refusal;
            collect(caller, refusal);
            for (auto& [number, flight] : caller.flights) post(caller, *flight);
            Flight& f = *caller.flights.at(id);
            if (refusal.link >= 0) {
                refused[0] = refusal.link, refused[1] = refusal.expert;
                return 1;
            }
            if (!f.unserved.empty()) return 1;
            if (!f.open_pairs) return 0;
        }
        if (now_ns() >= until_ns) return 2;
        wait_for_ring(*caller.bell, seen, until_ns);
    }
}

// Links that have had pairs of this dispatch for longer than age_ns, into `found` of room for `most`; returns
// how many.
BATON_API int64_t baton_caller_late(void* handle, int64_t id, int64_t age_ns, int32_t* found, int64_t most) {
    Caller& caller = *static_cast<Caller*>(handle);
    std::lock_guard<std::mutex> lock(caller.mutex);
    const Flight* flight = caller.flights.at(id).get();
    int64_t count = 0;
    for (auto& [number, link] : caller.links) {
        bool is_late = false;
        for (int64_t i = 0; i < link->layout.slot_count; ++i)
            if (link->pieces[static_cast<size_t>(i)].flight == flight &&
                now_ns() - slot_at(link->base, link->layout, i).head->posted_ns > age_ns)
                is_late = true;
        if (is_late && count < most) found[count++] = number;
    }
    return count;
}

// Forgets a dispatch, whether it is done or not. Slots that ranks still work on are freed when they are done.
BATON_API void baton_caller_end(void* handle, int64_t id) {
    Caller& caller = *static_cast<Caller*>(handle);
    std::lock_guard<std::mutex> lock(caller.mutex);
    const auto found = caller.flights.find(id);
    if (found == caller.flights.end()) return;
    for (auto& [number, link] : caller.links)
        for (int64_t i = 0; i < link->layout.slot_count; ++i) {
            Piece& piece = link->pieces[static_cast<size_t>(i)];
            // The memory of results is about to go: what comes is for nobody.
            if (piece.flight == found->second.get()) piece.pairs.clear();
        }
    Flight& f = *found->second;
    f.queues.clear();
    f.unserved.clear();
    f.open_pairs = 0;
    f.has_ended = true;
    sweep(caller);
}

// rows, pairs, bytes of rows, bytes of results, rerouted pairs, since the start.
BATON_API void baton_caller_stats(void* handle, int64_t* out) {
    Caller& caller = *static_cast<Caller*>(handle);
    std::lock_guard<std::mutex> lock(caller.mutex);
    const Stats& s = caller.stats;
    out[0] = s.rows, out[1] = s.pairs, out[2] = s.row_bytes, out[3] = s.result_bytes, out[4] = s.rerouted;
}

BATON_API void baton_combine_rows(const float* outputs, const float* weights, int64_t tokens, int64_t chosen_count,
                                  int64_t hidden, int32_t dtype, void* out) {
    combine_rows(outputs, weights, nullptr, tokens, chosen_count, hidden, dtype, out);
}
