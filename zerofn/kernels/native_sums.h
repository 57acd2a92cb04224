/* Shares the elements of all entries out among threads, in ranges ("shares"), and sums over each entry.
 *
 * A piece is the part of one entry in one share. From one piece to the next, either the number of the entry or that of
 * the share grows by one. So the sum of the two numbers is a place of its own for each piece, and nothing is locked.
 * The order of additions depends on lengths and on the number of threads only.
 */
#pragma once
#include <stdint.h>
#include <stdlib.h>

#include "native_threads.h"

/* Run the elements `from` to `to` of entry `e`; if `sum`, return an addend of its sum. */
typedef double (*piece_of)(const void *job, int64_t e, int64_t from, int64_t to, int sum);

typedef struct { piece_of run; const void *job; int64_t entries; const int64_t *numel; int64_t each; double *parts; } shares;

enum { SHARES = 8 /* for each thread */, UNIT = 32 /* a share is a multiple of so many elements */ };

static int64_t whole_units(int64_t n) { return ((n < GRAIN ? GRAIN : n) + UNIT - 1) / UNIT * UNIT; }

static void run_share(const void *what, int64_t first, int64_t last) {
    const shares *a = what;
    int64_t begin = 0;
    for (int64_t e = 0; e < a->entries && begin < last; e++) {
        int64_t n = a->numel[e];
        int64_t from = first > begin ? first - begin : 0, to = last - begin < n ? last - begin : n;
        if (from < to) {
            double sum = a->run(a->job, e, from, to, a->parts != 0);
            if (a->parts) a->parts[first / a->each + e] = sum;
        }
        begin += n;
    }
}

/* Return 0, or 1 if memory is missing: then nothing is done. `sums` is null if they are not wanted. */
static int over_entries(piece_of run_piece, const void *job, int64_t entries, const int64_t *numel, double *sums,
                        int threads, parallel run) {
    int64_t total = 0, begin = 0;
    for (int64_t e = 0; e < entries; e++) total += numel[e];
    if (!total) return 0;
    threads = useful(threads, total);
    int64_t each = threads <= 1 ? total : whole_units(total / threads / SHARES);
    shares a = {run_piece, job, entries, numel, each, 0};
    if (sums && !(a.parts = calloc((size_t)(total / each + 2 + entries), sizeof(double)))) return 1;
    team t = {run_share, &a, total, each, 0};
    share_out(&t, threads, run);
    for (int64_t e = 0; a.parts && e < entries; e++) {
        int64_t n = numel[e];
        double sum = 0;
        for (int64_t i = begin / each; n && i <= (begin + n - 1) / each; i++) sum += a.parts[i + e];
        sums[e] = sum;
        begin += n;
    }
    free(a.parts);
    return 0;
}
