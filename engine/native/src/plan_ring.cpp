// Messages between the leader and its followers: plans from rank 0 to all others, reports back to it.
#include "segment.h"

#include <cstdio>

namespace baton {
namespace {

struct MessageHead {
    int64_t bytes;
};

int write_message(Endpoint& e, const Ring& ring, const void* message, int64_t bytes) {
    alignas(64) uint8_t head[UNIT] = {};
    const MessageHead content = {bytes};
    std::memcpy(head, &content, sizeof content);
    const int outcome = ring_write(e, ring, head, UNIT);
    return outcome == DONE ? ring_write(e, ring, message, bytes) : outcome;
}

// The bytes of the next message, or -1: see *outcome.
int64_t read_head(Endpoint& e, const Ring& ring, int reader, int* outcome) {
    alignas(64) uint8_t head[UNIT];
    *outcome = ring_read(e, ring, reader, head, UNIT);
    if (*outcome != DONE) return -1;
    MessageHead content;
    std::memcpy(&content, head, sizeof content);
    return content.bytes;
}

int late(Endpoint& e, int outcome, int rank, const char* call) {
    if (outcome == TIMED_OUT) give_up_late(e, rank, call);
    return outcome == DONE ? DONE : BROKEN;
}

bool has_news(const Ring& ring) {
    return ring.tail->word.value.load(std::memory_order_acquire) !=
           ring.heads[0].word.value.load(std::memory_order_relaxed);
}

}  // namespace
}  // namespace baton

using namespace baton;

// Leader: sends one message to all followers. It waits only while the ring is full.
BATON_API int baton_plan_send(Endpoint* e, const void* message, int64_t bytes, int64_t timeout_ns) {
    if (e->reason[0] || is_over(*e)) return BROKEN;
    deadline_ns = now_ns() + timeout_ns;
    const int outcome = write_message(*e, plan_ring(*e), message, bytes);
    return late(*e, outcome, late_rank, "the sending of a plan");
}

// Follower: waits for the next message. Its size; -1: the group is over; -2: nothing came in time.
BATON_API int64_t baton_plan_next(Endpoint* e, int64_t timeout_ns) {
    if (e->reason[0] || is_over(*e)) return -1;
    deadline_ns = now_ns() + timeout_ns;
    int outcome;
    const int64_t bytes = read_head(*e, plan_ring(*e), e->rank, &outcome);
    return outcome == DONE ? bytes : outcome == TIMED_OUT ? -2 : -1;
}

// Follower: the message that `baton_plan_next` has announced.
BATON_API int baton_plan_read(Endpoint* e, void* message, int64_t bytes, int64_t timeout_ns) {
    deadline_ns = now_ns() + timeout_ns;
    return late(*e, ring_read(*e, plan_ring(*e), e->rank, message, bytes), 0, "the rest of a plan");
}

// Follower: sends one message to the leader.
BATON_API int baton_report_send(Endpoint* e, const void* message, int64_t bytes, int64_t timeout_ns) {
    if (e->reason[0] || is_over(*e)) return BROKEN;
    deadline_ns = now_ns() + timeout_ns;
    const int outcome = write_message(*e, ring_between(*e, e->rank, 0), message, bytes);
    Word& doorbell = e->header->doorbell.word;
    doorbell.value.fetch_add(1, std::memory_order_seq_cst);
    if (doorbell.sleepers.load(std::memory_order_seq_cst)) wake(doorbell);
    return late(*e, outcome, 0, "the sending of a report");
}

// Leader: waits for a message from any follower. Its size, and *from; -1: the group is over; -2: nothing came.
BATON_API int64_t baton_report_next(Endpoint* e, int* from, int64_t timeout_ns) {
    deadline_ns = now_ns() + timeout_ns;
    Word& doorbell = e->header->doorbell.word;
    while (true) {
        const uint32_t rung = doorbell.value.load(std::memory_order_acquire);
        for (int rank = 1; rank < e->size; ++rank) {
            const Ring ring = ring_between(*e, rank, 0);
            if (!has_news(ring)) continue;
            *from = rank;
            int outcome;
            const int64_t bytes = read_head(*e, ring, 0, &outcome);
            return outcome == DONE ? bytes : -1;
        }
        if (e->reason[0]) return -1;
        const int outcome = wait_until(*e, doorbell, [=](uint32_t value) { return value != rung; });
        if (outcome == TIMED_OUT) return -2;
    }
}

// Leader: the message that `baton_report_next` has announced.
BATON_API int baton_report_read(Endpoint* e, int from, void* message, int64_t bytes, int64_t timeout_ns) {
    deadline_ns = now_ns() + timeout_ns;
    return late(*e, ring_read(*e, ring_between(*e, from, 0), 0, message, bytes), from, "the rest of a report");
}
