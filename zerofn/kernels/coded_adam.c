/* One step of Adam over lists of leaves whose moments are codes. A block is decoded, updated and encoded in the cache.
 *
 * zerofn/kernels/coded_adam.py builds this file on first use, with the macros of native_codes.h and these:
 *   -DZF_P=, -DZF_G=        The dtypes of parameter and gradient: f32 or bf16.
 *   -DZF_FUSED=             1: the arithmetic of fused_adam.py. 0: that of adam.py, with fp32 moments.
 *   -DZF_RANDOM_P=          1: parameters are rounded at random.
 *   -DZF_MASTERS=           1: parameters are masters of 24 bits, ZF_P is bf16; the arithmetic is of fused_adam.py.
 */
#define ZF_M f32
#define ZF_V f32
#include "native_codes.h"
#include "native_masters.h"
#include "native_numbers.h"
#include "native_prefetch.h"
#include "native_sums.h"

enum { MOST = 1024 /* elements in the largest block */ };

/* Numbers of both kinds of arithmetic. The last two are used with ZF_FUSED only. */
typedef struct { float beta2, weight, one_minus_beta2, rate, eps, keep, decay, spread; } scalars;

typedef struct {
    int64_t entries;
    char *const *p;
    const char *const *g;
    uint8_t *const *m, *const *v;
    float *const *m_scales, *const *v_scales;
    int8_t *const *residuals; /* null without ZF_MASTERS */
    const int64_t *numel, *row;
    const uint64_t *p_key, *m_key, *v_key, *offset, *m_step, *v_step;
    int64_t block;
    uint64_t seed, codes_seed, step; /* seeds for parameters and for codes; the number of this update */
    int random, decoupled;
    scalars s;
    double *squares; /* one sum for each gradient, or null: sums are not wanted */
} job;

INLINE void widen_f32(float *x, const char *at, int64_t n) { memcpy(x, at, (size_t)n * 4); }
INLINE void widen_bf16(float *x, const char *at, int64_t n) {
    const uint16_t *from = (const uint16_t *)at;
    for (int64_t i = 0; i < n; i++) x[i] = from_bits((uint32_t)from[i] << 16);
}
INLINE void narrow_f32(char *at, const float *x, int64_t n) { memcpy(at, x, (size_t)n * 4); }
INLINE void narrow_bf16(char *at, const float *x, int64_t n) {
    uint16_t *to = (uint16_t *)at;
    for (int64_t i = 0; i < n; i++) to[i] = (uint16_t)(to_bits(x[i]) >> 16);
}

INLINE void join(float *restrict x, const char *at, const int8_t *restrict residual, int64_t n) {
    const uint16_t *p = (const uint16_t *)at;
    for (int64_t i = 0; i < n; i++) x[i] = joined_bits(p[i], residual[i]);
}
INLINE void split(char *at, int8_t *restrict residual, const float *restrict x, int64_t n) {
    uint16_t *p = (uint16_t *)at;
    for (int64_t i = 0; i < n; i++) p[i] = bf16_of(first_bits(x[i]));
    for (int64_t i = 0; i < n; i++) residual[i] = residual_of(first_bits(x[i]));
}

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define PLUS_PRODUCT(a, b, sum) __builtin_fmaf(a, b, sum)
/* The quotient rounded as a division rounds it (Markstein, 1990), if no intermediate overflows or underflows.
 * The correction of an infinite quotient would be NaN, so an infinite quotient is returned as it is. */
INLINE float quotient(float x, float divisor, float reciprocal) {
    float q = x * reciprocal;
    float exact = __builtin_fmaf(__builtin_fmaf(-q, divisor, x), reciprocal, q);
    return q - q == 0.0f ? exact : q;
}
#else
#define PLUS_PRODUCT(a, b, sum) fmaf(a, b, sum)
INLINE float quotient(float x, float divisor, float reciprocal) { (void)reciprocal; return x / divisor; }
#endif

/* Write the new parameters and moments over the old ones in these buffers of one strip. */
INLINE void update(int64_t n, float *restrict x, const float *restrict g, float *restrict m, float *restrict v,
                   const job *j, stream p) {
    const scalars s = j->s;
    const int decoupled = j->decoupled, near = s.weight < 0.5f;
    const float reciprocal = 1.0f / s.spread;
    for (int64_t i = 0; i < n; i++) {
        float now = x[i], d = g[i], m1, v1;
        if (ZF_FUSED) {
            if (decoupled) now *= s.keep;
            else d = PLUS_PRODUCT(now, s.decay, d);
            m1 = near ? PLUS_PRODUCT(s.weight, d - m[i], m[i]) : PLUS_PRODUCT(s.weight - 1.0f, d - m[i], d);
            v1 = PLUS_PRODUCT(s.one_minus_beta2 * d, d, v[i] * s.beta2);
            now = now + (s.rate * m1) / (quotient(sqrtf(v1), s.spread, reciprocal) + s.eps);
        } else {
            m1 = (d - m[i]) * s.weight + m[i];
            v1 = v[i] * s.beta2 + (d * s.one_minus_beta2) * d;
            now = now * s.keep - (m1 * s.rate) / (sqrtf(v1) + s.eps);
            now = from_bits(ZF_RANDOM_P ? PASTE(stochastic_, ZF_P)(now, draw(p.k0 + (uint32_t)i * ZF_STRIDE, p.k1))
                                        : PASTE(nearest_, ZF_P)(now));
        }
        x[i] = now;
        m[i] = m1;
        v[i] = v1;
    }
}

INLINE void add_squares(float *restrict sums, const float *restrict g, int64_t n) {
    for (int64_t k = 0; k < n; k++) sums[k] = PLUS_PRODUCT(g[k], g[k], sums[k]);
}

/* Sums are float within a block, and double over blocks. */
INLINE void sum_of_squares(const float *g, int64_t n, double *totals) {
    float sums[STRIP] = {0};
    int64_t i = 0;
    for (; i + STRIP <= n; i += STRIP) add_squares(sums, g + i, STRIP);
    add_squares(sums, g + i, n - i);
    for (int k = 0; k < STRIP; k++) totals[k] += sums[k];
}

typedef struct { stream p, m, v; } streams;

INLINE stream moved(stream s, int64_t by) { s.k0 += (uint32_t)by * ZF_STRIDE; return s; }

/* Update the `n` elements of a block of entry `e`. Its first element is `begin` in the leaf, and `at` in row `r`. */
INLINE void one_block(const job *j, int64_t e, int64_t r, int64_t at, int64_t n, int64_t begin, int64_t place,
                      const streams *s, double *totals) {
    _Alignas(64) float x[MOST], g_room[MOST], m[MOST], v[MOST];
    char *p = AT(j->p[e], ZF_P, begin);
    const char *g_at = AT(j->g[e], ZF_G, begin);
    uint8_t *m_row = j->m[e] + r * bytes_of(j->row[e]), *v_row = j->v[e] + r * bytes_of(j->row[e]);
    for (int64_t b = 0; b < n * BYTES(ZF_P); b += 64) __builtin_prefetch(p + AHEAD + b, 1);
    for (int64_t b = 0; b < n * BYTES(ZF_G); b += 64) __builtin_prefetch(g_at + AHEAD + b, 0);
    for (int64_t b = 0; b < n * ZF_BITS / 8; b += 64) {
        __builtin_prefetch(m_row + at * ZF_BITS / 8 + AHEAD / 4 + b, 1);
        __builtin_prefetch(v_row + at * ZF_BITS / 8 + AHEAD / 4 + b, 1);
    }
    const float *g = (const float *)g_at;
    if (BYTES(ZF_G) == 2) PASTE(widen_, ZF_G)(g_room, g_at, n), g = g_room;
    if (totals) sum_of_squares(g, n, totals);
    float *now = (float *)p;
    int8_t *residual = ZF_MASTERS ? j->residuals[e] + begin : 0;
    if (ZF_MASTERS) __builtin_prefetch(residual + AHEAD / 4, 1);
    if (ZF_MASTERS) join(x, p, residual, n), now = x;
    else if (BYTES(ZF_P) == 2) PASTE(widen_, ZF_P)(x, p, n), now = x;
    decode_block(m, m_row, at, n, j->m_scales[e][place]);
    decode_block(v, v_row, at, n, j->v_scales[e][place]);
    int64_t i = 0;
    for (; i + STRIP <= n; i += STRIP)
        update(STRIP, now + i, g + i, m + i, v + i, j, moved(s->p, begin + i));
    if (i < n) update(n - i, now + i, g + i, m + i, v + i, j, moved(s->p, begin + i));
    if (ZF_MASTERS) split(p, residual, x, n);
    else if (BYTES(ZF_P) == 2) PASTE(narrow_, ZF_P)(p, x, n);
    of_block m_block = seen(m, n), v_block = seen(v, n);
    j->m_scales[e][place] = stored_scale(m_block);
    j->v_scales[e][place] = stored_scale(v_block);
    encode_block(m, m_row, at, n, &m_block, j->random, moved(s->m, begin).k0, s->m.k1);
    encode_block(v, v_row, at, n, &v_block, j->random, moved(s->v, begin).k0, s->v.k1);
}

/* Update the blocks that begin at one of the elements `from` to `to`. */
static double blocks(const void *what, int64_t e, int64_t from, int64_t to, int squares) {
    const job *j = what;
    int64_t row = j->row[e], in_row = (row + j->block - 1) / j->block, r = from / row;
    int64_t b = (from - r * row + j->block - 1) / j->block;
    double totals[STRIP] = {0}, sum = 0;
    streams s = {
        stream_of(j->seed, j->step, j->p_key[e], j->offset[e], 0),
        stream_of(j->codes_seed, j->m_step[e], j->m_key[e], j->offset[e], 0),
        stream_of(j->codes_seed, j->v_step[e], j->v_key[e], j->offset[e], 0),
    };
    for (;; b++) {
        if (b == in_row) b = 0, r++;
        int64_t at = b * j->block, begin = r * row + at, n = least_of(j->block, row - at);
        if (begin >= to) break;
        one_block(j, e, r, at, n, begin, r * in_row + b, &s, squares ? totals : 0);
    }
    for (int k = 0; k < STRIP; k++) sum += totals[k];
    return sum;
}

/* Return 0, or 1 if memory is missing: then nothing is done. */
int zerofn_coded_adam(const job *j, int threads, parallel run) {
    return over_entries(blocks, j, j->entries, j->numel, j->squares, threads, run);
}
