/* Shares a range of elements out among threads. */
#pragma once
#include <pthread.h>
#include <stdint.h>

/* A thread takes the next share when it has ended one, so a thread that starts late or is interrupted takes fewer. */
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

/* GOMP_parallel of the OpenMP runtime that torch has loaded, or null: then this file starts threads. OpenMP's threads
 * spin while they wait for work, and would take the processors from threads of this file. */
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
