/* The sum of squares of numbers of a dtype, -DZF_KIND=: 0 for float32, 1 for bfloat16, 2 for float16.
 *
 * It is computed in double: squares of 16-bit numbers are exact, and no sum of finite ones overflows. The pieces depend
 * on the length only, so the sum is the same on any number of threads. */
#include <stdint.h>
#include <string.h>

enum { NAN_SURVIVES = 0 };
#if ZF_KIND != 2
#define NO_F16
#endif
#include "native_lines.h"
#include "native_prefetch.h"
#include "native_threads.h"

#if ZF_KIND == 0
typedef float stored;
#else
typedef uint16_t stored;
#endif

/* The numbers of a line, in the order that is cheapest to load. */
INLINE const float *floats(const stored *at, float *room) {
#if ZF_KIND == 0
    (void)room;
    return at;
#elif ZF_KIND == 1
    for (int i = 0; i < LINE / 2; i++) {
        uint32_t w = *(const word *)(at + 2 * i);
        room[i] = from_bits(w << 16);
        room[LINE / 2 + i] = from_bits(w & 0xffff0000u);
    }
    return room;
#else
    return opened_f16(at, room);
#endif
}

enum { PARTS = 256 };

static int64_t units(int64_t n) { return ((n < GRAIN ? GRAIN : n) + LINE - 1) / LINE * LINE; }

typedef struct { const stored *x; int64_t each; double *parts; } addends;

INLINE void line_squares(const stored *at, double *sums) {
    float room[LINE];
    const float *x = floats(at, room);
    for (int i = 0; i < LINE; i++) sums[i] += (double)x[i] * x[i];
}

static void add_squares(const void *what, int64_t first, int64_t last) {
    const addends *a = what;
    double sums[LINE] = {0}, sum = 0;
    int64_t at = first;
    for (; at + LINE <= last; at += LINE) {
        PREFETCH(a->x + at, 0);
        line_squares(a->x + at, sums);
    }
    if (at < last) { /* The last elements are copied into a line that is padded with zeros. */
        stored copy[LINE] = {0};
        line_squares(memcpy(copy, a->x + at, (size_t)(last - at) * sizeof *copy), sums);
    }
    for (int i = 0; i < LINE; i++) sum += sums[i];
    a->parts[first / a->each] = sum;
}

double zerofn_squares(const stored *x, int64_t n, int threads, parallel run) {
    double parts[PARTS] = {0}, sum = 0;
    addends a = {x, units((n + PARTS - 1) / PARTS), parts};
    team t = {add_squares, &a, n, a.each, 0};
    share_out(&t, useful(threads, n), run);
    for (int i = 0; i < PARTS; i++) sum += parts[i];
    return sum;
}
