/* Masters of 24 bits: joins bf16 numbers and residuals to fp32 numbers, and splits fp32 numbers into either.
 *
 * zerofn/kernels/masters.py builds this file on first use.
 */
#include "native_masters.h"
#include "native_threads.h"

typedef struct { float *x; uint16_t *p; int8_t *residual; } job;

static void join(const void *what, int64_t first, int64_t last) {
    const job *j = what;
    float *restrict x = j->x;
    const uint16_t *restrict p = j->p;
    const int8_t *restrict residual = j->residual;
    for (int64_t i = first; i < last; i++) x[i] = joined_bits(p[i], residual[i]);
}

static void parameters(const void *what, int64_t first, int64_t last) {
    const job *j = what;
    const float *restrict x = j->x;
    uint16_t *restrict p = j->p;
    for (int64_t i = first; i < last; i++) p[i] = bf16_of(first_bits(x[i]));
}

static void residuals(const void *what, int64_t first, int64_t last) {
    const job *j = what;
    const float *restrict x = j->x;
    int8_t *restrict residual = j->residual;
    for (int64_t i = first; i < last; i++) residual[i] = residual_of(first_bits(x[i]));
}

static const task kinds[] = {join, parameters, residuals};

/* Kind 0 writes `x`, kind 1 writes `p`, and kind 2 writes `residual`. */
void zerofn_masters(int kind, float *x, void *p, void *residual, int64_t n, int threads, parallel run) {
    job j = {x, p, residual};
    team t = {kinds[kind], &j, n, GRAIN, 0};
    share_out(&t, useful(threads, n), run);
}
