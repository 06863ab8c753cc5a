/* Ranks of one host show one another what they computed, in memory they share: see host_exchange.py.
 *
 * Every rank takes part in every round, and says so by writing the round's number on its seat once
 * its own bytes are in its slot. Slots are double: a rank fills slot r % 2 in round r only when all
 * others have come to round r - 1, hence read what they wanted of round r - 2.
 *
 * A waiting rank looks again and again for some microseconds, then gives up its core in between,
 * then sleeps in the kernel until the other's seat changes.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 64, LOOKS = 400, YIELDS = 60, DONE = 0, LATE = 1, BROKEN = 2 };

typedef struct {
    _Alignas(LINE) _Atomic uint32_t round;
    _Atomic uint32_t sleepers; /* who wait for this very seat */
} seat;

typedef struct {
    _Alignas(LINE) _Atomic uint32_t broken;
    seat seats[];
} shared;

static int has_come(const seat *at, uint32_t round) {
    return (int32_t)(atomic_load_explicit(&at->round, memory_order_acquire) - round) >= 0;
}

static void breathe(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static int await_one(shared *all, seat *at, uint32_t round, int64_t timeout_us) {
    for (int i = 0; i < LOOKS; i++) {
        if (has_come(at, round)) return DONE;
        breathe();
    }
    for (int i = 0; i < YIELDS; i++) {
        if (has_come(at, round)) return DONE;
        sched_yield();
    }
    int64_t end = now_us() + timeout_us;
    for (;;) {
        atomic_fetch_add(&at->sleepers, 1);
        uint32_t seen = atomic_load(&at->round);
        int come = (int32_t)(seen - round) >= 0;
        if (!come && !atomic_load(&all->broken)) {
            struct timespec nap = {0, 50 * 1000 * 1000}; /* then look whether the group is broken */
            syscall(SYS_futex, &at->round, FUTEX_WAIT, seen, &nap, NULL, 0);
        }
        atomic_fetch_sub(&at->sleepers, 1);
        if (has_come(at, round)) return DONE;
        if (atomic_load(&all->broken)) return BROKEN;
        if (now_us() >= end) return LATE;
    }
}

/* Until rank `who`, or every rank if it is negative, has come to `round`. */
int await_ranks(shared *all, int size, int who, uint32_t round, int64_t timeout_us) {
    if (atomic_load_explicit(&all->broken, memory_order_relaxed)) return BROKEN;
    for (int rank = 0; rank < size; rank++) {
        if (who >= 0 && rank != who) continue;
        int how = await_one(all, &all->seats[rank], round, timeout_us);
        if (how != DONE) return how;
    }
    return DONE;
}

/* Say that this rank has come to `round`, and is done with the one before. */
void come(shared *all, int rank, uint32_t round) {
    seat *at = &all->seats[rank];
    atomic_store(&at->round, round);
    if (atomic_load(&at->sleepers))
        syscall(SYS_futex, &at->round, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void break_up(shared *all, int size) {
    atomic_store(&all->broken, 1);
    for (int rank = 0; rank < size; rank++)
        syscall(SYS_futex, &all->seats[rank].round, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Put `data` into this rank's slot and come to `round`, once all have come to the one before. */
int put(shared *all, int size, int rank, uint32_t round, char *slot, const void *data,
        int64_t num_bytes, int64_t timeout_us) {
    int how = await_ranks(all, size, -1, round - 1, timeout_us);
    if (how != DONE) return how;
    memcpy(slot, data, num_bytes);
    come(all, rank, round);
    return DONE;
}

/* The sum of every rank's floats, in rank order, so that all get the same bits; slots lie
 * `slot_bytes` apart. */
int sum_floats(shared *all, int size, uint32_t round, const char *slots, int64_t slot_bytes,
               float *sum, int64_t count, int64_t timeout_us) {
    int how = await_ranks(all, size, -1, round, timeout_us);
    if (how != DONE) return how;
    const float *first = (const float *)slots, *second = (const float *)(slots + slot_bytes);
    for (int64_t i = 0; i < count; i++) sum[i] = first[i] + second[i];
    for (int rank = 2; rank < size; rank++) {
        const float *part = (const float *)(slots + rank * slot_bytes);
        for (int64_t i = 0; i < count; i++) sum[i] += part[i];
    }
    return DONE;
}
