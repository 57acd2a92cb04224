/* A range of elements shared out among threads. Of native.c. */
#pragma once
#include <pthread.h>
#include <stdint.h>

/* Shares are handed out as threads come for them: a thread that starts late or is interrupted does fewer. */
enum { MAX_THREADS = 256, GRAIN = 1 << 14 };

typedef void (*task)(const void *what, int64_t first, int64_t last);
typedef struct { task run; const void *what; int64_t total, each; int64_t next; } team;

static void work(void *argument) {
    team *t = argument;
    for (;;) {
        int64_t from = __atomic_fetch_add(&t->next, t->each, __ATOMIC_RELAXED);
        if (from >= t->total) return;
        t->run(t->what, from, t->total - from < t->each ? t->total : from + t->each);
    }
}

static void *work_thread(void *argument) { work(argument); return 0; }

/* GOMP_parallel of the OpenMP runtime that torch has loaded: its threads wait for work by spinning, and threads
 * of our own would have to share the processors with them. Null: there is none, and we start our own. */
typedef void (*parallel)(void (*)(void *), void *, unsigned, unsigned);

static int useful(int threads, int64_t total) {
    if (threads > total / GRAIN) threads = (int)(total / GRAIN);
    return threads > MAX_THREADS ? MAX_THREADS : threads;
}

static void share_out(team *t, int threads, parallel run) {
    if (threads <= 1) {
        work(t);
        return;
    }
    if (run) {
        run(work, t, (unsigned)threads, 0);
        return;
    }
    pthread_t ids[MAX_THREADS];
    int started = 0;
    while (started < threads - 1 && !pthread_create(&ids[started], 0, work_thread, t)) started++;
    work(t);
    while (started > 0) pthread_join(ids[--started], 0);
}
