// Memory that the ranks of one group on one host share, and how they wait for each other in it.
//
// A rank writes its own words only, except for the word of the group's end. Every wait ends: when the word has
// what is waited for, when the group is over (a peer died or left, somebody gave up), or at the deadline.
#pragma once

#include "runtime.h"

#include <atomic>

namespace baton {

constexpr int RANKS_MAX = 64;
constexpr int REASON_BYTES = 512;
constexpr int SLOTS = 4;
constexpr int CORE_WORDS = 16;
constexpr int64_t UNIT = 64;  // bytes; rings count in these
constexpr uint64_t MAGIC = 0x31706f6f4c6e7442;

enum Outcome : int32_t { DONE = 0, BROKEN = -1, TIMED_OUT = -2 };
enum RankState : uint32_t { AWAY = 0, JOINING = 1, JOINED = 2, LEFT = 3 };

// A number that one rank writes and others wait for. `sleepers` tells the writer whether a system call is
// needed to wake anybody; it is wrong, upwards, after a sleeper was killed.
struct Word {
    std::atomic<uint32_t> value;
    std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(Word) == 8, "shared between processes");

// What a rank does at one point of its sequence of calls. Ranks compare these before they touch data.
struct Call {
    uint32_t kind;  // enum Kind << 8 | dtype
    uint32_t sequence;
    uint64_t bytes;
    uint64_t detail;  // a hash of whatever else must be the same on all ranks
};

// Two cache lines, because processors fetch them in pairs.
struct alignas(128) StepLine {
    Word step;      // the last step of which this rank's slot is filled
    Call calls[2];  // the newest call and the one before it
};

struct alignas(128) RankLine {
    Word state;  // enum RankState
    int32_t process;
    uint64_t start_time;  // tells this process from a later one of the same number
    uint64_t cores[CORE_WORDS];  // on which it may run, one bit each
};

struct alignas(128) Line {
    Word word;
};

struct alignas(128) Header {
    uint64_t magic;
    uint64_t token[2];
    int64_t size, chunk_bytes, ring_bytes, plan_bytes, total_bytes;
    alignas(128) Word over;  // 0; 1 while the reason is written; 2
    char reason[REASON_BYTES];
    Line joined;    // how many ranks have
    Line doorbell;  // counts what followers have sent to the leader
};

// A stream of bytes from one writer to `reader_count` readers, who all read all of it.
struct Ring {
    Line* tail;
    Line* heads;
    int reader_count;
    uint8_t* data;
    uint32_t unit_count;
};

// One rank's end of a segment. It belongs to one process. Collectives come from one thread at a time; plans and
// reports may come from two.
struct Endpoint {
    Header* header;
    RankLine* ranks;
    StepLine* steps;
    uint8_t* slots;
    uint8_t* rings;
    uint8_t* plans;
    int rank, size;
    int64_t chunk_bytes;
    int64_t spin_ns, spin_alone_ns, yield_ns;
    std::atomic<int64_t> yields_from_ns{0};  // until then others want the core, and a wait does not yield it
    uint32_t step = 0;
    uint32_t sequence = 0;
    uint32_t sent[RANKS_MAX] = {}, received[RANKS_MAX] = {};
    std::atomic<bool> is_leaving{false};
    char reason[REASON_BYTES] = {};  // why this rank's calls fail
};

// Those of the call that this thread is in.
extern thread_local int64_t deadline_ns;
extern thread_local int late_rank;  // whom the wait that timed out was for, in a ring of several readers

int64_t now_ns();
void wake(Word& word);
bool is_over(Endpoint& e);  // fills in e.reason
void give_up(Endpoint& e, const char* reason);
void give_up_late(Endpoint& e, int rank, const char* call);  // rank did not answer in time
int wait_slowly(Endpoint& e, Word& word, bool (*ready)(uint32_t value, void* context), void* context);

// Sets the word and wakes whoever sleeps on it. What was written before is seen by whoever sees the value.
inline void publish(Word& word, uint32_t value) {
    word.value.store(value, std::memory_order_seq_cst);
    if (word.sleepers.load(std::memory_order_seq_cst)) wake(word);
}

// Waits until ready(value of word), until the group is over, or until deadline_ns.
template <typename Ready> inline int wait_until(Endpoint& e, Word& word, Ready ready) {
    if (ready(word.value.load(std::memory_order_acquire))) return DONE;
    return wait_slowly(
        e, word, [](uint32_t value, void* context) { return (*static_cast<Ready*>(context))(value); }, &ready);
}

// Counters wrap around: `value` has reached `wanted`.
inline bool reached(uint32_t value, uint32_t wanted) { return static_cast<int32_t>(value - wanted) >= 0; }

inline int64_t rounded_up(int64_t bytes, int64_t unit = UNIT) { return (bytes + unit - 1) / unit * unit; }

// The ring from one rank to another, the leader's to its followers, and a follower's to the leader.
Ring ring_between(Endpoint& e, int from, int to);
Ring plan_ring(Endpoint& e);
int ring_write(Endpoint& e, const Ring& ring, const void* from, int64_t bytes);
int ring_read(Endpoint& e, const Ring& ring, int reader, void* to, int64_t bytes);

}  // namespace baton
