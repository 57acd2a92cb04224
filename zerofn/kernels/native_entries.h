/* Shares the elements of all entries out among threads, in ranges ("shares"), and sums over each entry.
 *
 * A piece is the part of one entry in one share. From one piece to the next, either the number of the entry or that of
 * the share grows by one. So the sum of the two numbers is a place of its own for each piece, and nothing is locked.
 * Shares depend on lengths only, so sums have the same bits on any number of threads.
 */
#pragma once
#include <stdint.h>
#include <stdlib.h>

#include "native_threads.h"

/* Run the elements `from` to `to` of entry `e`, and write an addend of each of its sums. */
typedef void (*piece_of)(const void *job, int64_t e, int64_t from, int64_t to, double *totals);

typedef struct { piece_of run; const void *job; int64_t entries; const int64_t *numel; int64_t each; int sums; double *parts; } shares;

enum { MOST_SHARES = 512, UNIT = 4096 /* a share is a multiple of so many elements */ };

static void run_share(const void *what, int64_t first, int64_t last) {
    const shares *a = what;
    int64_t begin = 0;
    for (int64_t e = 0; e < a->entries && begin < last; e++) {
        int64_t n = a->numel[e];
        int64_t from = first > begin ? first - begin : 0, to = last - begin < n ? last - begin : n;
        if (from < to) a->run(a->job, e, from, to, a->sums ? a->parts + (first / a->each + e) * a->sums : 0);
        begin += n;
    }
}

/* Return 0, or 1 if memory is missing: then nothing is done. `sums` has a row of the entries for each sum. */
static int over_entries(piece_of run_piece, const void *job, int64_t entries, const int64_t *numel, int sums,
                        double *const *rows, int threads, parallel run) {
    int64_t total = 0, begin = 0;
    for (int64_t e = 0; e < entries; e++) total += numel[e];
    if (!total) return 0;
    threads = useful(threads, total);
    int64_t each = total / MOST_SHARES;
    each = ((each < GRAIN ? GRAIN : each) + UNIT - 1) / UNIT * UNIT;
    if (threads <= 1 && !sums) each = total;
    shares a = {run_piece, job, entries, numel, each, sums, 0};
    if (sums && !(a.parts = calloc((size_t)(total / each + 2 + entries) * (size_t)sums, sizeof(double)))) return 1;
    team t = {run_share, &a, total, each, 0};
    share_out(&t, threads, run);
    for (int64_t e = 0; sums && e < entries; e++) {
        int64_t n = numel[e];
        for (int k = 0; k < sums; k++) {
            double sum = 0;
            for (int64_t i = begin / each; n && i <= (begin + n - 1) / each; i++) sum += a.parts[(i + e) * sums + k];
            rows[k][e] = sum;
        }
        begin += n;
    }
    free(a.parts);
    return 0;
}
