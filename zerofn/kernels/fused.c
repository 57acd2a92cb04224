/* One step of torch's fused Adam over lists of fp32 leaves. It can also sum the squares of each gradient.
 * With -DZF_BF16 gradients are bf16, and no fp32 copy of them is made. With -DZF_MASTERS parameters are masters of 24
 * bits: a bf16 number and a residual, which are joined, updated and split in registers.
 *
 * zerofn/kernels/fused_adam.py builds this file on first use. On processors that have a fused multiply-add, results
 * have the bits of torch's kernel. That kernel fuses exactly the products that are `fmaf` here, and -ffp-contract=off
 * keeps the compiler from fusing others. torch updates the last elements of a leaf, fewer than a line: it computes
 * those in double.
 */
#include <math.h>
#include <string.h>

#include "native_masters.h"
#include "native_prefetch.h"
#include "native_sums.h"

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

#ifdef ZF_MASTERS
typedef uint16_t param;
enum { MASTERS = 1, STRIP = 4 * LINE /* elements in a vector of residuals */ };
INLINE float now(const param *p, const int8_t *residual, int i) { return joined(p[i], residual[i]); }
INLINE void put(param *p, int8_t *residual, int i, float x) {
    int32_t first = first_bits(x);
    p[i] = bf16_of(first);
    residual[i] = residual_of(first);
}
#else
typedef float param;
enum { MASTERS = 0, STRIP = LINE };
INLINE float now(const param *p, const int8_t *residual, int i) { (void)residual; return p[i]; }
INLINE void put(param *p, int8_t *residual, int i, float x) { (void)residual; p[i] = x; }
#endif

typedef struct { float beta2, weight, one_minus_beta2, step, spread, eps, keep, decay; } scalars;

typedef struct {
    int64_t entries;
    param *const *p;
    const grad *const *g;
    float *const *m, *const *v;
    int8_t *const *residuals; /* null without ZF_MASTERS */
    const int64_t *numel;
    scalars s;
    int decoupled;
    double *squares; /* one sum for each gradient, or null: sums are not wanted */
} job;

INLINE void elements(int n, param *restrict p, int8_t *restrict residual, const grad *restrict g, float *restrict m,
                     float *restrict v, scalars s, int decoupled, double *sums) {
    for (int i = 0; i < n; i++) {
        float x = now(p, residual, i), d = value(g[i]);
        if (sums) sums[i] += (double)d * d;
        if (decoupled) x = x * s.keep;
        else d = fmaf(x, s.decay, d);
        /* torch's lerp starts from whichever end is nearer. */
        float m1 = s.weight < 0.5f ? fmaf(s.weight, d - m[i], m[i]) : fmaf(s.weight - 1.0f, d - m[i], d);
        float v1 = fmaf(s.one_minus_beta2 * d, d, v[i] * s.beta2);
        put(p, residual, i, x + (s.step * m1) / (sqrtf(v1) / s.spread + s.eps));
        m[i] = m1;
        v[i] = v1;
    }
}

/* Update the elements `from` to `to` of entry `e`. They are whole lines, since leaves and shares are. */
INLINE double piece(const job *j, int64_t e, int64_t from, int64_t to, int decoupled, int sum) {
    double sums[STRIP] = {0}, total = 0;
    param *p = j->p[e];
    const grad *g = j->g[e];
    float *m = j->m[e], *v = j->v[e];
    int8_t *residual = MASTERS ? j->residuals[e] : 0;
    const scalars s = j->s; /* A copy: for the compiler a write to a residual may change *j. */
    int64_t i = from;
    for (; i + STRIP <= to; i += STRIP) {
        for (int k = 0; k < STRIP; k += LINE) {
            __builtin_prefetch(p + i + k + NEXT, 1);
            __builtin_prefetch(g + i + k + NEXT, 0);
            __builtin_prefetch(m + i + k + NEXT, 1);
            __builtin_prefetch(v + i + k + NEXT, 1);
        }
        if (MASTERS) __builtin_prefetch(residual + i + NEXT, 1);
        elements(STRIP, p + i, MASTERS ? residual + i : 0, g + i, m + i, v + i, s, decoupled, sum ? sums : 0);
    }
    for (; STRIP > LINE && i < to; i += LINE)
        elements(LINE, p + i, MASTERS ? residual + i : 0, g + i, m + i, v + i, s, decoupled, sum ? sums : 0);
    for (int k = 0; k < STRIP; k++) total += sums[k];
    return total;
}

static double run_piece(const void *what, int64_t e, int64_t from, int64_t to, int sum) {
    const job *j = what;
    if (j->decoupled) return sum ? piece(j, e, from, to, 1, 1) : piece(j, e, from, to, 1, 0);
    return sum ? piece(j, e, from, to, 0, 1) : piece(j, e, from, to, 0, 0);
}

/* Return 0, or 1 if memory is missing: then nothing is done. */
int zerofn_fused_adam(const job *j, int threads, parallel run) {
    return over_entries(run_piece, j, j->entries, j->numel, j->squares, threads, run);
}
