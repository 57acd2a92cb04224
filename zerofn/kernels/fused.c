/* One step of torch's fused Adam over lists of fp32 leaves, and on the way the sum of squares of each gradient.
 * With -DZF_BF16 gradients are bf16, and no fp32 copy of them is made.
 *
 * Built by zerofn/kernels/fused_adam.py on first use. The bits are those of torch's kernel on processors that fuse a
 * product with a sum, where it fuses just those that are `fmaf` here; with -ffp-contract=off nothing else is. The last
 * elements of a leaf, fewer than a line, are torch's own: it computes those in double.
 */
#include <math.h>
#include <string.h>

#include "native_prefetch.h"
#include "native_sums.h"

#define INLINE static inline __attribute__((always_inline))

enum { LINE = 16, NEXT = AHEAD / 4 /* elements */ };

#ifdef ZF_BF16
typedef uint16_t grad;
INLINE float value(grad x) {
    uint32_t bits = (uint32_t)x << 16;
    float found;
    memcpy(&found, &bits, 4);
    return found;
}
#else
typedef float grad;
INLINE float value(grad x) { return x; }
#endif

typedef struct { float beta2, weight, one_minus_beta2, step, spread, eps, keep, decay; } scalars;

typedef struct {
    int64_t entries;
    float *const *p;
    const grad *const *g;
    float *const *m, *const *v;
    const int64_t *numel;
    scalars s;
    int decoupled;
    double *squares; /* of each gradient; null where nobody asks */
} job;

INLINE void elements(float *restrict p, const grad *restrict g, float *restrict m, float *restrict v, scalars s,
                     int decoupled, double *sums) {
    for (int i = 0; i < LINE; i++) {
        float x = p[i], d = value(g[i]);
        if (sums) sums[i] += (double)d * d;
        if (decoupled) x = x * s.keep;
        else d = fmaf(x, s.decay, d);
        /* torch's lerp begins at the nearer end */
        float m1 = s.weight < 0.5f ? fmaf(s.weight, d - m[i], m[i]) : fmaf(s.weight - 1.0f, d - m[i], d);
        float v1 = fmaf(s.one_minus_beta2 * d, d, v[i] * s.beta2);
        p[i] = x + (s.step * m1) / (sqrtf(v1) / s.spread + s.eps);
        m[i] = m1;
        v[i] = v1;
    }
}

INLINE double piece(int64_t n, float *p, const grad *g, float *m, float *v, scalars s, int decoupled, int sum) {
    double sums[LINE] = {0}, total = 0;
    for (int64_t i = 0; i < n; i += LINE) { /* whole lines: so are leaves, and with them the ends of shares */
        __builtin_prefetch(p + i + NEXT, 1);
        __builtin_prefetch(g + i + NEXT, 0);
        __builtin_prefetch(m + i + NEXT, 1);
        __builtin_prefetch(v + i + NEXT, 1);
        elements(p + i, g + i, m + i, v + i, s, decoupled, sum ? sums : 0);
    }
    for (int k = 0; k < LINE; k++) total += sums[k];
    return total;
}

static double of_kind(int64_t n, float *p, const grad *g, float *m, float *v, scalars s, int decoupled, int sum) {
    if (decoupled) return sum ? piece(n, p, g, m, v, s, 1, 1) : piece(n, p, g, m, v, s, 1, 0);
    return sum ? piece(n, p, g, m, v, s, 0, 1) : piece(n, p, g, m, v, s, 0, 0);
}

static double run_piece(const void *what, int64_t e, int64_t from, int64_t to, int sum) {
    const job *j = what;
    return of_kind(to - from, j->p[e] + from, j->g[e] + from, j->m[e] + from, j->v[e] + from, j->s, j->decoupled, sum);
}

/* 0, or 1 where there is no memory, and nothing is done. */
int zerofn_fused_adam(const job *j, int threads, parallel run) {
    return over_entries(run_piece, j, j->entries, j->numel, j->squares, threads, run);
}
