/* Masters of 24 bits: fp32 numbers of bf16 numbers and residuals, and either of these of fp32 numbers.
 *
 * Built by zerofn/kernels/masters.py on first use.
 */
#include "native_masters.h"
#include "native_threads.h"

typedef struct { float *x; uint16_t *p; int8_t *residual; } job;

static void join(const void *what, int64_t first, int64_t last) {
    const job *j = what;
    float *restrict x = j->x;
    const uint16_t *restrict p = j->p;
    const int8_t *restrict residual = j->residual;
    for (int64_t i = first; i < last; i++) x[i] = joined(p[i], residual[i]);
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

/* `kind`: 0 writes `x`, 1 `p` and 2 `residual`. */
void zerofn_masters(int kind, float *x, void *p, void *residual, int64_t n, int threads, parallel run) {
    job j = {x, p, residual};
    team t = {kinds[kind], &j, n, GRAIN, 0};
    share_out(&t, useful(threads, n), run);
}
