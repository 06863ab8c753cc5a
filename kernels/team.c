#define _GNU_SOURCE
#include "team.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 64, LOOKS = 3000, YIELDS = 50, MOST = 256 };

struct team {
    _Alignas(LINE) _Atomic uint32_t round; /* changes when all have met */
    _Atomic uint32_t sleepers;
    _Alignas(LINE) _Atomic uint32_t here;
    _Alignas(LINE) _Atomic int64_t next;
    _Alignas(LINE) int size;
    work_fn work;
    void *about;
    int core; /* where member 0 is */
    pthread_t threads[MOST];
#ifdef TIMED
    int64_t times[MOST][NUM_PARTS][2];
#endif
};

typedef struct {
    team *of;
    int member;
} seat;

#ifdef TIMED
static _Thread_local struct {
    int64_t (*times)[2], since;
    enum part part;
} own_time;

static void charge(int waiting) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    int64_t now = t.tv_sec * 1000000000LL + t.tv_nsec;
    if (own_time.since) own_time.times[own_time.part][waiting] += now - own_time.since;
    own_time.since = now;
}

void part_begins(enum part part) {
    charge(0);
    own_time.part = part;
}

void team_times(team *t, int64_t *times) {
    size_t num_bytes = t->size * sizeof t->times[0];
    memcpy(times, t->times, num_bytes); /* the others wait in a meeting that has not ended */
    memset(t->times, 0, num_bytes);
}
#define CHARGE(waiting) charge(waiting)
#define IS_MEMBER(t, member) (own_time.times = (t)->times[member])
#else
#define CHARGE(waiting) ((void)0)
#define IS_MEMBER(t, member) ((void)0)
#endif

static void breathe(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void await_round(team *t, uint32_t old) {
    for (int i = 0; i < LOOKS; i++) {
        if (atomic_load_explicit(&t->round, memory_order_acquire) != old) return;
        breathe();
    }
    for (int i = 0; i < YIELDS; i++) {
        if (atomic_load_explicit(&t->round, memory_order_acquire) != old) return;
        sched_yield();
    }
    while (atomic_load(&t->round) == old) {
        atomic_fetch_add(&t->sleepers, 1);
        syscall(SYS_futex, &t->round, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
        atomic_fetch_sub(&t->sleepers, 1);
    }
}

static void meet(team *t) {
    if (t->size == 1) {
        atomic_store_explicit(&t->next, 0, memory_order_relaxed);
        return;
    }
    uint32_t round = atomic_load_explicit(&t->round, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&t->here, 1, memory_order_acq_rel) + 1 < (uint32_t)t->size) {
        await_round(t, round);
        return;
    }
    atomic_store_explicit(&t->here, 0, memory_order_relaxed);
    atomic_store_explicit(&t->next, 0, memory_order_relaxed);
    atomic_store(&t->round, round + 1);
    if (atomic_load(&t->sleepers))
        syscall(SYS_futex, &t->round, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void team_meet(team *t) {
    CHARGE(0);
    meet(t);
    CHARGE(1);
}

int64_t team_next(team *t) {
    return atomic_fetch_add_explicit(&t->next, 1, memory_order_relaxed);
}

int team_size(const team *t) { return t->size; }

/* Whoever woke up on the caller's core leaves it. The kernel takes milliseconds to see that another
 * one is free, and until then every meeting takes as long as the looks last: a step of 340 meetings
 * 80 to 160 ms where one thread takes 45. */
static void leave_core(int core, const cpu_set_t *may) {
    cpu_set_t others = *may;
    if (core < 0 || core >= CPU_SETSIZE || sched_getcpu() != core) return;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) == 0) return;
    sched_setaffinity(0, sizeof others, &others);
    sched_setaffinity(0, sizeof *may, may);
}

static void *belong(void *given) {
    seat own = *(seat *)given;
    free(given);
    cpu_set_t may;
    CPU_ZERO(&may);
    sched_getaffinity(0, sizeof may, &may);
    IS_MEMBER(own.of, own.member);
    for (;;) {
        part_begins(OUTSIDE);
        team_meet(own.of); /* the work begins */
        if (!own.of->work) return NULL;
        leave_core(own.of->core, &may);
        own.of->work(own.of, own.member, own.of->about);
        team_meet(own.of);
    }
}

void team_run(team *t, work_fn work, void *about) {
    t->work = work;
    t->about = about;
    t->core = t->size > 1 ? sched_getcpu() : -1;
    IS_MEMBER(t, 0);
    part_begins(OUTSIDE);
    team_meet(t);
    work(t, 0, about);
    team_meet(t);
    part_begins(OUTSIDE);
}

void team_ended(team *t) {
    if (!t) return;
    t->work = NULL;
    if (t->size > 1) team_meet(t);
    for (int i = 1; i < t->size; i++) pthread_join(t->threads[i], NULL);
    free(t);
}

team *team_made(int size) {
    if (size < 1 || size > MOST) return NULL;
    team *t = aligned_alloc(LINE, (sizeof(team) + LINE - 1) / LINE * LINE);
    if (!t) return NULL;
    *t = (team){.size = size};
    for (int i = 1; i < size; i++) {
        seat *own = malloc(sizeof *own);
        if (own) *own = (seat){t, i};
        if (!own || pthread_create(&t->threads[i], NULL, belong, own)) {
            free(own); /* those that were made wait for ever, and hold nothing but their stacks */
            return NULL;
        }
    }
    return t;
}
