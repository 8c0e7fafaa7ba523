#include "segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <new>

namespace baton {
namespace {

// A sleeper looks this often whether its peers are still there: at first often, since most waits are short.
constexpr int64_t SLICE_MIN_NS = 1'000'000, SLICE_MAX_NS = 20'000'000;
// A rank that somebody stopped (SIGSTOP) for so long is lost: the others would wait as long as it pleases them.
constexpr int64_t STOPPED_NS = 1'500'000'000;
// A yield that takes so long has given the core to somebody for a slice of the scheduler's, some milliseconds. A
// sleeper is better off then: the kernel runs it soon after it is woken. Whether that is so is tried now and then.
constexpr int64_t COSTLY_YIELD_NS = 200'000, TRY_YIELD_NS = 200'000'000;
constexpr int64_t REASON_WAIT_NS = 100'000'000;
// A writer shows its progress this often, so that the reader copies while the writer still writes.
constexpr int64_t PIECE_BYTES = 64 * 1024;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void futex_wait(Word& word, uint32_t value, int64_t ns) {
    const timespec span = {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
    syscall(SYS_futex, &word.value, FUTEX_WAIT, value, &span, nullptr, 0);
}

struct Process {
    bool is_there;
    char state;  // as in /proc: 'R', 'S', 'T' is stopped, …
    uint64_t start_time;
};

// A process that cannot be looked at counts as there: the deadline ends the wait for it.
Process look_at(int32_t process) {
    char path[40], text[1024];
    std::snprintf(path, sizeof path, "/proc/%d/stat", process);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return {errno != ENOENT, '?', 0};
    const ssize_t length = read(file, text, sizeof text - 1);
    const bool is_gone = length < 0 && errno == ESRCH;
    close(file);
    if (length <= 0) return {!is_gone, '?', 0};
    text[length] = 0;
    const char* at = std::strrchr(text, ')');  // the name before it may hold anything
    if (!at || at[1] != ' ') return {true, '?', 0};
    const char state = at[2];
    ++at;
    for (int field = 3; field < 22 && at; ++field) at = std::strchr(at + 1, ' ');
    const uint64_t start_time = at ? std::strtoull(at + 1, nullptr, 10) : 0;
    return {state != 'Z' && state != 'X' && state != 'x', state, start_time};
}

bool has_died(const RankLine& line, const Process& process) {
    if (!process.is_there) return true;
    return process.start_time && line.start_time && process.start_time != line.start_time;
}

void describe_over(Endpoint& e) {
    // Whoever gives up first writes its reason in between. It may be killed there.
    const int64_t end_ns = now_ns() + REASON_WAIT_NS;
    while (e.header->over.value.load(std::memory_order_acquire) == 1 && now_ns() < end_ns) sched_yield();
    const bool is_written = e.header->over.value.load(std::memory_order_acquire) == 2;
    if (is_written) std::memcpy(e.reason, e.header->reason, REASON_BYTES);
    e.reason[REASON_BYTES - 1] = 0;
    if (!e.reason[0]) std::snprintf(e.reason, REASON_BYTES, "another rank gave the group up");
}

}  // namespace

thread_local int64_t deadline_ns = 0;
thread_local int late_rank = 0;

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void wake(Word& word) { syscall(SYS_futex, &word.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void give_up(Endpoint& e, const char* reason) {
    uint32_t none = 0;
    Header& header = *e.header;
    if (header.over.value.compare_exchange_strong(none, 1)) {
        std::snprintf(header.reason, REASON_BYTES, "%s", reason);
        header.over.value.store(2, std::memory_order_release);
    }
    describe_over(e);
}

void give_up_late(Endpoint& e, int rank, const char* call) {
    char text[REASON_BYTES];
    const RankLine& line = e.ranks[rank];
    if (line.state.value.load(std::memory_order_acquire) < JOINED) {
        std::snprintf(text, sizeof text, "rank %d did not join in time", rank);
    } else {
        const char state = look_at(line.process).state;
        std::snprintf(text, sizeof text, "rank %d (process %d, %s) was not there in time: rank %d waited in %s",
                      rank, line.process, state == 'T' || state == 't' ? "stopped" : "running", e.rank, call);
    }
    give_up(e, text);
}

bool is_over(Endpoint& e) {
    if (e.header->over.value.load(std::memory_order_acquire)) {
        describe_over(e);
        return true;
    }
    if (e.is_leaving.load(std::memory_order_acquire)) {
        std::snprintf(e.reason, REASON_BYTES, "this rank has left the group");
        return true;
    }
    return false;
}

namespace {

// `stopped_since_ns` is the memory of one wait or watch: when each rank was first seen stopped, or 0. Null: stopped ranks
// are not looked for.
bool has_lost_a_peer(Endpoint& e, int64_t* stopped_since_ns) {
    char text[REASON_BYTES];
    for (int rank = 0; rank < e.size; ++rank) {
        const RankLine& line = e.ranks[rank];
        const uint32_t state = line.state.value.load(std::memory_order_acquire);
        if (rank == e.rank || state < JOINED) continue;
        if (state == LEFT) {
            if (is_over(e)) return true;  // it gave up before it left
            // No reason for the others to stop: they may still read what it sent before, such as a farewell.
            std::snprintf(e.reason, REASON_BYTES, "rank %d has left the group", rank);
            return true;
        }
        const Process process = look_at(line.process);
        const bool is_dead = has_died(line, process);
        if (!is_dead) {
            if (!stopped_since_ns) continue;
            if (process.state != 'T') {
                stopped_since_ns[rank] = 0;
                continue;
            }
            if (!stopped_since_ns[rank]) stopped_since_ns[rank] = now_ns();
            if (now_ns() - stopped_since_ns[rank] < STOPPED_NS) continue;
        }
        std::snprintf(text, sizeof text, "rank %d (process %d) %s", rank, line.process,
                      is_dead ? "has died" : "is stopped");
        give_up(e, text);
        return true;
    }
    return false;
}

}  // namespace

int wait_slowly(Endpoint& e, Word& word, bool (*ready)(uint32_t value, void* context), void* context) {
    const auto is_ready = [&] { return ready(word.value.load(std::memory_order_acquire), context); };
    const int64_t begun_ns = now_ns();
    while (now_ns() - begun_ns < e.spin_ns)
        for (int i = 0; i < 32; ++i) {
            if (is_ready()) return DONE;
            relax();
        }
    int64_t now = now_ns();
    while (now - begun_ns < e.yield_ns && now >= e.yields_from_ns.load(std::memory_order_relaxed)) {
        if (is_ready()) return DONE;
        const int64_t yielded_ns = now;
        sched_yield();
        now = now_ns();
        if (now - yielded_ns > COSTLY_YIELD_NS)
            e.yields_from_ns.store(now + TRY_YIELD_NS, std::memory_order_relaxed);
    }
    int64_t slice_ns = SLICE_MIN_NS;
    int64_t stopped_since_ns[RANKS_MAX] = {};
    while (true) {
        // The word comes first: what a peer did before it left, died or gave up still counts.
        if (is_ready()) return DONE;
        if (is_over(e) || has_lost_a_peer(e, stopped_since_ns)) return is_ready() ? DONE : BROKEN;
        const int64_t left_ns = deadline_ns - now_ns();
        if (left_ns <= 0) return TIMED_OUT;
        word.sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t value = word.value.load(std::memory_order_seq_cst);
        if (!ready(value, context)) futex_wait(word, value, std::min(slice_ns, left_ns));
        word.sleepers.fetch_sub(1, std::memory_order_seq_cst);
        slice_ns = std::min(2 * slice_ns, SLICE_MAX_NS);
    }
}

// --- rings ---

namespace {

int64_t lines_of_ring(int reader_count) { return static_cast<int64_t>(sizeof(Line)) * (1 + reader_count); }

Ring ring_at(uint8_t* memory, int reader_count, int64_t data_bytes) {
    Line* const lines = reinterpret_cast<Line*>(memory);
    return {lines, lines + 1, reader_count, memory + lines_of_ring(reader_count),
            static_cast<uint32_t>(data_bytes / UNIT)};
}

}  // namespace

Ring ring_between(Endpoint& e, int from, int to) {
    const int64_t stride = lines_of_ring(1) + e.header->ring_bytes;
    return ring_at(e.rings + stride * (from * e.size + to), 1, e.header->ring_bytes);
}

Ring plan_ring(Endpoint& e) { return ring_at(e.plans, e.size, e.header->plan_bytes); }

// `bytes` are padded to whole units.
int ring_write(Endpoint& e, const Ring& ring, const void* from, int64_t bytes) {
    const uint8_t* source = static_cast<const uint8_t*>(from);
    uint32_t tail = ring.tail->word.value.load(std::memory_order_relaxed);
    while (bytes > 0) {
        uint32_t free_units = ring.unit_count;
        for (int reader = 0; reader < ring.reader_count; ++reader) {
            Word& head = ring.heads[reader].word;
            if (ring.reader_count > 1 && reader == e.rank) continue;  // the writer's own, in the leader's ring
            uint32_t free = 0;
            const int outcome = wait_until(e, head, [&](uint32_t value) {
                free = ring.unit_count - (tail - value);
                return free > 0;
            });
            if (outcome != DONE) {
                late_rank = reader;
                return outcome;
            }
            free_units = std::min(free_units, free);
        }
        const uint32_t at = tail % ring.unit_count;
        const int64_t room = int64_t{std::min(free_units, ring.unit_count - at)} * UNIT;
        const int64_t piece = std::min({bytes, room, PIECE_BYTES});
        std::memcpy(ring.data + at * UNIT, source, piece);
        source += piece, bytes -= piece;
        tail += static_cast<uint32_t>(rounded_up(piece) / UNIT);
        publish(ring.tail->word, tail);
    }
    return DONE;
}

int ring_read(Endpoint& e, const Ring& ring, int reader, void* to, int64_t bytes) {
    uint8_t* target = static_cast<uint8_t*>(to);
    Word& head_word = ring.heads[reader].word;
    uint32_t head = head_word.value.load(std::memory_order_relaxed);
    while (bytes > 0) {
        uint32_t filled = 0;
        const int outcome = wait_until(e, ring.tail->word, [&](uint32_t value) {
            filled = value - head;
            return filled > 0;
        });
        if (outcome != DONE) return outcome;
        const uint32_t at = head % ring.unit_count;
        const int64_t there = int64_t{std::min(filled, ring.unit_count - at)} * UNIT;
        const int64_t piece = std::min({bytes, there, PIECE_BYTES});
        std::memcpy(target, ring.data + at * UNIT, piece);
        target += piece, bytes -= piece;
        head += static_cast<uint32_t>(rounded_up(piece) / UNIT);
        publish(head_word, head);
    }
    return DONE;
}

namespace {

void list_cores(uint64_t* words) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (sched_getaffinity(0, sizeof cores, &cores)) return;
    for (int core = 0; core < std::min(CPU_SETSIZE, CORE_WORDS * 64); ++core)
        if (CPU_ISSET(core, &cores)) words[core / 64] |= uint64_t{1} << core % 64;
}

// The cores that the ranks have together. A rank may be bound to one of its own.
int count_cores(const Endpoint& e) {
    int count = 0;
    for (int word = 0; word < CORE_WORDS; ++word) {
        uint64_t any = 0;
        for (int rank = 0; rank < e.size; ++rank) any |= e.ranks[rank].cores[word];
        count += __builtin_popcountll(any);
    }
    return count;
}

struct Areas {
    int64_t ranks, steps, slots, rings, plans, total;
};

Areas areas_of(int64_t size, int64_t chunk_bytes, int64_t ring_bytes, int64_t plan_bytes) {
    Areas areas;
    areas.ranks = sizeof(Header);
    areas.steps = areas.ranks + size * static_cast<int64_t>(sizeof(RankLine));
    areas.slots = rounded_up(areas.steps + size * static_cast<int64_t>(sizeof(StepLine)), 4096);
    areas.plans = areas.slots + size * SLOTS * chunk_bytes;
    areas.rings = areas.plans + (plan_bytes ? lines_of_ring(static_cast<int>(size)) + plan_bytes : 0);
    areas.total = areas.rings + (ring_bytes ? size * size * (lines_of_ring(1) + ring_bytes) : 0);
    areas.total = rounded_up(areas.total, 4096);
    return areas;
}

}  // namespace
}  // namespace baton

using namespace baton;

// The size of a segment. The other sizes are multiples of 64.
BATON_API int64_t baton_segment_bytes(int64_t size, int64_t chunk_bytes, int64_t ring_bytes, int64_t plan_bytes) {
    return areas_of(size, chunk_bytes, ring_bytes, plan_bytes).total;
}

// Where the rings between ranks begin: what comes before is reserved when the segment is made.
BATON_API int64_t baton_segment_rings(int64_t size, int64_t chunk_bytes, int64_t plan_bytes) {
    return areas_of(size, chunk_bytes, 0, plan_bytes).rings;
}

// `memory` is all zeros.
BATON_API void baton_segment_format(void* memory, const uint64_t* token, int64_t size, int64_t chunk_bytes,
                                    int64_t ring_bytes, int64_t plan_bytes) {
    Header& header = *static_cast<Header*>(memory);
    header.token[0] = token[0], header.token[1] = token[1];
    header.size = size, header.chunk_bytes = chunk_bytes;
    header.ring_bytes = ring_bytes, header.plan_bytes = plan_bytes;
    header.total_bytes = areas_of(size, chunk_bytes, ring_bytes, plan_bytes).total;
    std::atomic_thread_fence(std::memory_order_release);
    header.magic = MAGIC;
}

// Joins as `rank`. Null: this is no such segment (*failure 1), or the rank was taken before (*failure 2).
BATON_API Endpoint* baton_segment_join(void* memory, int64_t bytes, const uint64_t* token, int rank,
                                       int64_t spin_ns, int64_t spin_shared_ns, int64_t yield_ns,
                                       int32_t* failure) {
    Header& header = *static_cast<Header*>(memory);
    *failure = 1;
    if (bytes < static_cast<int64_t>(sizeof(Header)) || header.magic != MAGIC || header.total_bytes != bytes)
        return nullptr;
    if (header.token[0] != token[0] || header.token[1] != token[1]) return nullptr;
    if (rank < 0 || rank >= header.size || header.size > RANKS_MAX) return nullptr;
    uint8_t* const base = static_cast<uint8_t*>(memory);
    const Areas areas = areas_of(header.size, header.chunk_bytes, header.ring_bytes, header.plan_bytes);
    RankLine* const ranks = reinterpret_cast<RankLine*>(base + areas.ranks);
    uint32_t away = AWAY;
    *failure = 2;
    if (!ranks[rank].state.value.compare_exchange_strong(away, JOINING)) return nullptr;
    *failure = 0;
    Endpoint* const e = new Endpoint;
    e->header = &header, e->ranks = ranks, e->steps = reinterpret_cast<StepLine*>(base + areas.steps);
    e->slots = base + areas.slots, e->rings = base + areas.rings, e->plans = base + areas.plans;
    e->rank = rank, e->size = static_cast<int>(header.size), e->chunk_bytes = header.chunk_bytes;
    e->spin_ns = spin_shared_ns, e->yield_ns = yield_ns;  // until it is known how many cores there are
    e->spin_alone_ns = spin_ns;
    list_cores(ranks[rank].cores);
    ranks[rank].process = getpid();
    ranks[rank].start_time = look_at(getpid()).start_time;
    ranks[rank].state.value.store(JOINED);
    header.joined.word.value.fetch_add(1);
    if (header.joined.word.sleepers.load()) wake(header.joined.word);
    return e;
}

// sizes: ranks, chunk_bytes, ring_bytes, plan_bytes.
BATON_API void baton_segment_sizes(Endpoint* e, int64_t* sizes) {
    const Header& header = *e->header;
    sizes[0] = header.size, sizes[1] = header.chunk_bytes, sizes[2] = header.ring_bytes;
    sizes[3] = header.plan_bytes;
}

// place: where the ring from this rank to another begins in the segment, and its size.
BATON_API void baton_ring_place(Endpoint* e, int to, int64_t* place) {
    const Ring ring = ring_between(*e, e->rank, to);
    place[0] = reinterpret_cast<uint8_t*>(ring.tail) - reinterpret_cast<uint8_t*>(e->header);
    place[1] = lines_of_ring(1) + e->header->ring_bytes;
}

// Waits until all ranks have joined.
BATON_API int baton_segment_wait(Endpoint* e, int64_t timeout_ns) {
    deadline_ns = now_ns() + timeout_ns;
    const uint32_t size = static_cast<uint32_t>(e->size);
    const int outcome = wait_until(*e, e->header->joined.word, [=](uint32_t joined) { return joined == size; });
    if (outcome == DONE && count_cores(*e) >= e->size) e->spin_ns = e->spin_alone_ns;
    if (outcome != TIMED_OUT) return outcome;
    for (int rank = 0; rank < e->size; ++rank)
        if (e->ranks[rank].state.value.load() < JOINED) {
            give_up_late(*e, rank, "join");
            break;
        }
    return BROKEN;
}

BATON_API void baton_segment_abort(Endpoint* e, const char* reason) { give_up(*e, reason); }

// Ends the call that another thread is in, if any. Peers that wait for this rank find that it has left.
BATON_API void baton_segment_leave(Endpoint* e) {
    e->is_leaving.store(true, std::memory_order_release);
    e->ranks[e->rank].state.value.store(LEFT, std::memory_order_release);
}

// After `leave`, when no thread is in a call.
BATON_API void baton_segment_free(Endpoint* e) { delete e; }

BATON_API const char* baton_segment_reason(Endpoint* e) { return e->reason; }

// 1: the group is over, by a look at every peer now. `stopped_since_ns` has a number for each rank, zeros at first,
// and is the memory of whoever looks again and again; null: stopped ranks are not looked for.
BATON_API int baton_segment_is_over(Endpoint* e, int64_t* stopped_since_ns) {
    return is_over(*e) || has_lost_a_peer(*e, stopped_since_ns);
}
