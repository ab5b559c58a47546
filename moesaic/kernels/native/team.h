/* Threads that go through the stages of a layer side by side: they share out a stage's pieces, and wait for one another
   before the next. OpenMP lends the threads; its own barriers are not used inside, because a thread that waits in them
   keeps its core from one that was put aside, and everything stands still for a millisecond each time. */
#pragma once

#include <limits.h>
#include <sched.h>
#include <stdatomic.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef _OPENMP
#include <omp.h>
#endif

#define STAGES 16
#define PATIENCE 2000 /* looks at the clock of the others, about ten microseconds, before the core is offered */
/* Times that the core is offered, some tens of microseconds where nobody takes it, before the thread sleeps: to a core
   that seems busy the system moves no other thread, and the one that is waited for may be standing in line elsewhere. */
#define OFFERS 100

typedef struct {
    atomic_int here, met, asleep;
    atomic_long taken[STAGES];
} Team;

typedef struct {
    Team *team;
    int size, stage;
} Member;

static inline Member join(Team *team) {
#ifdef _OPENMP
    return (Member){team, omp_get_num_threads(), 0};
#else
    return (Member){team, 1, 0};
#endif
}

/* The next of a stage's `items` pieces, one behind the other: fewer each time, so that all are ready together. */
static inline int take(Member *m, long items, long *from, long *to) {
    atomic_long *taken = m->team->taken + m->stage;
    long at = atomic_load_explicit(taken, memory_order_relaxed), count;
    do {
        count = m->size == 1 ? items - at : (items - at + 2 * m->size - 1) / (2 * m->size);
        if (at >= items) return 0;
    } while (!atomic_compare_exchange_weak_explicit(taken, &at, at + count, memory_order_relaxed, memory_order_relaxed));
    *from = at, *to = at + count;
    return 1;
}

/* The next single piece, where pieces differ too much to be taken by number. */
static inline int take_one(Member *m, long items, long *at) {
    return (*at = atomic_fetch_add_explicit(m->team->taken + m->stage, 1, memory_order_relaxed)) < items;
}

/* Until `met` is no longer `seen`; it may end early. */
static inline void sleep_until(atomic_int *met, int seen) {
#ifdef __linux__
    syscall(SYS_futex, met, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
    (void)met, (void)seen, sched_yield();
#endif
}

static inline void wake(atomic_int *met) {
#ifdef __linux__
    syscall(SYS_futex, met, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    (void)met;
#endif
}

static inline void meet(Member *m) {
    Team *team = m->team;
    int meeting = ++m->stage;
    if (m->size == 1) return;
    if (atomic_fetch_add_explicit(&team->here, 1, memory_order_acq_rel) + 1 == meeting * m->size) {
        /* In one order for all: whoever is not seen asleep here sees the meeting before it sleeps. */
        atomic_store_explicit(&team->met, meeting, memory_order_seq_cst);
        if (atomic_load_explicit(&team->asleep, memory_order_seq_cst)) wake(&team->met);
        return;
    }
    for (int looks = 0; atomic_load_explicit(&team->met, memory_order_acquire) < meeting; looks++) {
        if (looks > PATIENCE + OFFERS) break;
        if (looks > PATIENCE) sched_yield();
#if defined(__aarch64__)
        else __asm__ volatile("isb");
#elif defined(__x86_64__)
        else __builtin_ia32_pause();
#endif
    }
    if (atomic_load_explicit(&team->met, memory_order_acquire) >= meeting) return;
    atomic_fetch_add_explicit(&team->asleep, 1, memory_order_seq_cst);
    int seen;
    while ((seen = atomic_load_explicit(&team->met, memory_order_seq_cst)) < meeting) sleep_until(&team->met, seen);
    atomic_fetch_sub_explicit(&team->asleep, 1, memory_order_relaxed);
}
