#include "runtime.h"

#include <pthread.h>
#if defined(BATON_AMX) && BATON_AMX == 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

namespace baton {
namespace {

// Long enough to bridge the gap between two kernels of a step, short enough that a core shared with
// another process is given back soon.
constexpr std::chrono::microseconds SPIN{40};

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <typename Done> bool spin_until(Done done) {
    const auto end = std::chrono::steady_clock::now() + SPIN;
    do {
        for (int i = 0; i < 16; ++i) {
            if (done()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return done();
}

// One job at a time. `state` is [job number : 32 | open : 1 | helpers inside : 31]. A helper enters a job
// only while it is open, so the caller waits for those that entered and never for one that still sleeps.
class Pool {
  public:
    explicit Pool(int helper_count) : shares_(static_cast<size_t>(helper_count) + 1) {
        for (int i = 0; i < helper_count; ++i) threads_.emplace_back([this, i] { help(i + 1); });
    }

    // Ends the helpers, after the job in progress. The object stays: a caller that came too late finds it busy,
    // for good, and computes alone.
    void retire() {
        while (busy_.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
            state_.fetch_add(uint64_t{1} << 32);
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
    }
    // Never destroyed: see `retire`.

    int size() const { return static_cast<int>(shares_.size()); }

    // False: busy with another caller's job.
    bool run(int64_t count, TaskFunction function, void* context) {
        if (busy_.exchange(true, std::memory_order_acquire)) return false;
        function_ = function, context_ = context;
        for (int i = 0; i < size(); ++i) {
            shares_[static_cast<size_t>(i)].next.store(count * i / size(), std::memory_order_relaxed);
            shares_[static_cast<size_t>(i)].end = count * (i + 1) / size();
        }
        const uint64_t job = (state_.load() >> 32) + 1;
        state_.store(job << 32 | OPEN);
        if (sleepers_.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        work(0);
        state_.fetch_and(~OPEN);
        while (!spin_until([this] { return (state_.load(std::memory_order_acquire) & INSIDE) == 0; }))
            std::this_thread::yield();
        busy_.store(false, std::memory_order_release);
        return true;
    }

  private:
    static constexpr uint64_t OPEN = uint64_t{1} << 31;
    static constexpr uint64_t INSIDE = OPEN - 1;

    // A thread's share is the same part of each job, so that rows of activations stay in its core's cache from one
    // kernel to the next. Then it helps with the others' shares.
    void work(int thread) {
        for (int i = 0; i < size(); ++i) {
            Share& share = shares_[static_cast<size_t>((thread + i) % size())];
            for (int64_t task; (task = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;)
                function_(context_, task, thread);
        }
    }

    void help(int thread) {
        uint64_t seen = 0;
        while (true) {
            auto changed = [this, seen] { return state_.load() >> 32 != seen; };
            if (!spin_until(changed)) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleepers_.fetch_add(1);
                wake_.wait(lock, changed);
                sleepers_.fetch_sub(1);
            }
            // The state first: a helper that sees the number which `retire` leaves sees that it is to stop.
            uint64_t state = state_.load();
            if (stopping_.load()) return;
            seen = state >> 32;
            while ((state & OPEN) && state >> 32 == seen)
                if (state_.compare_exchange_weak(state, state + 1)) {
                    work(thread);
                    state_.fetch_sub(1);
                    break;
                }
        }
    }

    struct alignas(64) Share {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };

    std::atomic<uint64_t> state_{0};
    std::vector<Share> shares_;  // one for each thread
    alignas(64) TaskFunction function_ = nullptr;
    void* context_ = nullptr;
    std::atomic<bool> busy_{false};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> threads_;
};

std::atomic<Pool*> pool{nullptr};  // null: the caller alone

struct Scratch {
    void* memory[SCRATCH_SLOTS] = {};
    size_t bytes[SCRATCH_SLOTS] = {};
    ~Scratch() {
        for (void* p : memory) std::free(p);
    }
};
thread_local Scratch scratch;

// A forked child has none of the threads: it computes alone, and leaves the parent's pool as it is.
const int fork_handler = pthread_atfork(nullptr, nullptr, [] { pool = nullptr; });

}  // namespace

void run_tasks(int64_t task_count, TaskFunction function, void* context) {
    Pool* const helpers = pool.load();
    if (task_count > 1 && helpers && helpers->run(task_count, function, context)) return;
    for (int64_t task = 0; task < task_count; ++task) function(context, task, 0);
}

int thread_count() {
    const Pool* const helpers = pool.load();
    return helpers ? helpers->size() : 1;
}

void* thread_scratch(int slot, size_t bytes) {
    if (scratch.bytes[slot] < bytes) {
        std::free(scratch.memory[slot]);
        const size_t rounded = (bytes + 4095) / 4096 * 4096;
        scratch.memory[slot] = std::aligned_alloc(64, rounded);
        scratch.bytes[slot] = scratch.memory[slot] ? rounded : 0;
        if (!scratch.memory[slot]) std::abort();
    }
    return scratch.memory[slot];
}

}  // namespace baton

BATON_API void baton_set_threads(int count) {
    (void)baton::fork_handler;
    if (count < 1) count = 1;
    if (count == baton::thread_count()) return;
    baton::Pool* const before = baton::pool.exchange(count > 1 ? new baton::Pool(count - 1) : nullptr);
    if (before) before->retire();
}

BATON_API int baton_thread_count() { return baton::thread_count(); }

// Nonzero: the operating system refuses what the kernels were compiled for. Before any other call.
BATON_API int32_t baton_start() {
#if defined(BATON_AMX) && BATON_AMX == 1
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA)) return 1;
#endif
    return 0;
}

BATON_API const char* baton_features() {
#if defined(BATON_AMX) && BATON_AMX == 1
    return "amx";
#elif defined(BATON_AMX) && BATON_AMX == 2
    return "amx-emulated";
#elif defined(__AVX512BF16__) && defined(__AVX512VBMI__)
    return "avx512_bf16";
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__)
    return "avx512_vnni";
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
    return "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
    return "avx2";
#else
    return "generic";
#endif
}

// Task i adds i + 1 to sums[its thread]: the total shows that every task ran once. For the tests.
BATON_API void baton_sum_tasks(int64_t task_count, int64_t* sums) {
    baton::parallel_for(task_count, [&](int64_t task, int thread) { sums[thread] += task + 1; });
}
