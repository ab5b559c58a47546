/* Threads that go through the stages of a layer side by side: they share out a stage's pieces, and wait for one another
   before the next. OpenMP lends the threads; its own barriers are not used inside, because a thread that waits in them
   keeps its core from one that was put aside, and everything stands still for a millisecond each time. */
#pragma once

#include <sched.h>
#include <stdatomic.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#define STAGES 16
#define PATIENCE 2000 /* looks at the clock of the others, about ten microseconds, before the core is offered */

typedef struct {
    atomic_int here, met;
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

static inline void meet(Member *m) {
    Team *team = m->team;
    int meeting = ++m->stage;
    if (m->size == 1) return;
    if (atomic_fetch_add_explicit(&team->here, 1, memory_order_acq_rel) + 1 == meeting * m->size) {
        atomic_store_explicit(&team->met, meeting, memory_order_release);
        return;
    }
    for (int looks = 0; atomic_load_explicit(&team->met, memory_order_acquire) < meeting; looks++) {
        if (looks > PATIENCE) sched_yield();
#if defined(__aarch64__)
        else __asm__ volatile("isb");
#elif defined(__x86_64__)
        else __builtin_ia32_pause();
#endif
    }
}
