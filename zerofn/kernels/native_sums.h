/* A number for each entry, added up over the shares of a range that lies over all entries one behind the other.
 *
 * From one piece to the next either the entry or the share is the next one, so that the sum of their numbers is a place
 * of the piece's own: nothing is locked, and what is added in which order depends on lengths and threads alone.
 */
#pragma once
#include <stdint.h>
#include <stdlib.h>

/* Places for the numbers of all pieces; null where there is no memory. */
static double *places(int64_t total, int64_t each, int64_t entries) {
    return calloc((size_t)(total / each + 2 + entries), sizeof(double));
}

static void add_up(const double *parts, int64_t each, int64_t entries, const int64_t *numel, double *sums) {
    int64_t begin = 0;
    for (int64_t e = 0; e < entries; e++) {
        int64_t n = numel[e];
        double sum = 0;
        for (int64_t i = begin / each; n && i <= (begin + n - 1) / each; i++) sum += parts[i + e];
        sums[e] = sum;
        begin += n;
    }
}
