/* Masters of 24 bits: fp32 numbers of bf16 numbers and residuals, and either of these of fp32 numbers.
 *
 * The formulas of zerofn/kernels/masters.py, bit for bit, which builds this on first use.
 */
#include <string.h>

#include "native_threads.h"

typedef struct { float *x; uint16_t *p; int8_t *residual; } job;

static void join(const void *what, int64_t first, int64_t last) {
    const job *j = what;
    float *restrict x = j->x;
    const uint16_t *restrict p = j->p;
    const int8_t *restrict residual = j->residual;
    for (int64_t i = first; i < last; i++) {
        uint32_t bits = (uint32_t)p[i] << 16, size = bits & 0x7fffffffu;
        int usual = size - 1 < 0x7f7fffffu; /* neither zero nor infinite nor NaN */
        bits += (uint32_t)(usual ? (int32_t)residual[i] : 0) << 8;
        memcpy(x + i, &bits, 4);
    }
}

/* The first 24 bits, rounded. */
static inline int32_t near(const float *x) {
    uint32_t bits;
    memcpy(&bits, x, 4);
    int32_t found = (int32_t)(bits + 0x7fu + (bits >> 8 & 1u)) >> 8;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc000 : found;
}

static void parameters(const void *what, int64_t first, int64_t last) {
    const job *j = what;
    const float *restrict x = j->x;
    uint16_t *restrict p = j->p;
    for (int64_t i = first; i < last; i++) p[i] = (uint16_t)((near(x + i) + 0x80) >> 8);
}

static void residuals(const void *what, int64_t first, int64_t last) {
    const job *j = what;
    const float *restrict x = j->x;
    int8_t *restrict residual = j->residual;
    for (int64_t i = first; i < last; i++) {
        int32_t all = near(x + i);
        residual[i] = (int8_t)(all - (int32_t)((uint32_t)((all + 0x80) >> 8) << 8));
    }
}

static const task kinds[] = {join, parameters, residuals};

/* `kind`: 0 writes `x`, 1 `p` and 2 `residual`. */
void zerofn_masters(int kind, float *x, void *p, void *residual, int64_t n, int threads, parallel run) {
    job j = {x, p, residual};
    team t = {kinds[kind], &j, n, GRAIN, 0};
    share_out(&t, useful(threads, n), run);
}
