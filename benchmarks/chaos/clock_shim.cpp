// Loaded by LD_PRELOAD. It adds an offset to the wall clock that a process sees. The offset, in nanoseconds, is
// the content of the file that BATON_CHAOS_CLOCK names, so that all processes of a host step at once. The
// monotonic clock stays as it is. Absolute times of the wall clock that a process waits for are turned back
// into the kernel's, because the kernel knows nothing of the offset.

#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

namespace {

const int64_t kSecond = 1000000000;
const time_t kEpochs = 1000000000;  // an instant of the wall clock; a monotonic one is far smaller

const volatile int64_t none = 0;
const volatile int64_t *offset = &none;

__attribute__((constructor)) void find_offset() {
    const char *path = getenv("BATON_CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(nullptr, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED) offset = static_cast<const volatile int64_t *>(page);
}

int64_t offset_ns() { return *offset; }

timespec moved(timespec at, int64_t by_ns) {
    int64_t nanoseconds = static_cast<int64_t>(at.tv_nsec) + by_ns % kSecond;
    at.tv_sec += by_ns / kSecond;
    if (nanoseconds < 0) nanoseconds += kSecond, at.tv_sec -= 1;
    if (nanoseconds >= kSecond) nanoseconds -= kSecond, at.tv_sec += 1;
    at.tv_nsec = nanoseconds;
    return at;
}

timespec for_kernel(const timespec *at) { return at->tv_sec > kEpochs ? moved(*at, -offset_ns()) : *at; }

// The next function of that name after ours. The condition variables of glibc before 2.3.2 have another layout,
// and dlsym alone may find those. No static with a guard: allocators ask for the time while we look.
template <typename F> F real(F *known, const char *name, const char *version = nullptr) {
    if (*known == nullptr) {
        void *found = version ? dlvsym(RTLD_NEXT, name, version) : nullptr;
        *known = reinterpret_cast<F>(found ? found : dlsym(RTLD_NEXT, name));
    }
    return *known;
}

bool is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

}  // namespace

#define REAL(name, ...)                                                                                                \
    static decltype(&name) known;                                                                                      \
    const auto call = real(&known, #name __VA_OPT__(, ) __VA_ARGS__)

extern "C" {

int clock_gettime(clockid_t clock, timespec *now) noexcept {
    REAL(clock_gettime);
    int status = call(clock, now);
    if (status == 0 && is_wall(clock)) *now = moved(*now, offset_ns());
    return status;
}

int gettimeofday(timeval *now, void *zone) noexcept {
    timespec at;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &at) != 0) return -1;
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where) noexcept {
    timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (where) *where = at.tv_sec;
    return at.tv_sec;
}

int timespec_get(timespec *now, int base) noexcept {
    if (base != TIME_UTC) return 0;
    clock_gettime(CLOCK_REALTIME, now);
    return base;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const timespec *until) {
    REAL(pthread_cond_timedwait, "GLIBC_2.3.2");
    timespec at = for_kernel(until);
    return call(condition, mutex, &at);
}

int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock, const timespec *until) {
    REAL(pthread_cond_clockwait);
    timespec at = for_kernel(until);
    return call(condition, mutex, clock, &at);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const timespec *until) noexcept {
    REAL(pthread_mutex_timedlock);
    timespec at = for_kernel(until);
    return call(mutex, &at);
}

int sem_timedwait(sem_t *semaphore, const timespec *until) {
    REAL(sem_timedwait);
    timespec at = for_kernel(until);
    return call(semaphore, &at);
}

int sem_clockwait(sem_t *semaphore, clockid_t clock, const timespec *until) {
    REAL(sem_clockwait);
    timespec at = for_kernel(until);
    return call(semaphore, clock, &at);
}

long syscall(long number, ...) noexcept {
    REAL(syscall);
    va_list list;
    va_start(list, number);
    long a[6];
    for (long &one : a) one = va_arg(list, long);
    va_end(list);
    if (number == SYS_clock_gettime) return clock_gettime(static_cast<clockid_t>(a[0]), reinterpret_cast<timespec *>(a[1]));
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3] != 0) {
        timespec at = for_kernel(reinterpret_cast<const timespec *>(a[3]));
        return call(number, a[0], a[1], a[2], reinterpret_cast<long>(&at), a[4], a[5]);
    }
    return call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
}
