/* One AdamW step over lists of tensors, with the bits of zerofn/kernels/adam.py. It can also sum squares.
 *
 * zerofn/kernels/native.py builds this file on first use, once for each combination of dtypes and rounding:
 *   -DZF_P=, -DZF_G=, -DZF_M=, -DZF_V=    The dtypes of parameter, gradient, first and second moment: f32, bf16 or f16.
 *   -DZF_MODE=                            The sum of KAHAN, STOCHASTIC_P, ...: how each of them is rounded.
 *   -DZF_STRIDE=                          The difference between the counters of neighbouring elements.
 * A build has one combination: all together would compile for half a minute, and a program uses one or two.
 *
 * The loop is plain C, which the compiler vectorises. To have the bits of eager torch, each float operation must round
 * by itself. So the build uses -ffp-contract=off, which keeps products and sums apart, and no -ffast-math.
 */
#include <math.h>

#include "native_draws.h"
#include "native_numbers.h"
#include "native_prefetch.h"
#include "native_sums.h"

/* ---- the update ---- */

typedef struct { float beta2, one_minus_beta1, one_minus_beta2, rate, eps, keep, decay; } scalars;

enum { KAHAN = 1, STOCHASTIC_P = 2, STOCHASTIC_M = 4, STOCHASTIC_V = 8 };

typedef struct { uint32_t p, m, v, c; } codes;

INLINE codes element(float p, float g, float m, float v, float c, uint32_t index, scalars s, stream first,
                     stream second) {
    codes out = {0, 0, 0, 0};
    uint32_t count = index * ZF_STRIDE; /* a constant: `index` is known when compiled */
    uint32_t r = ZF_MODE & (STOCHASTIC_P | STOCHASTIC_V) ? draw(count + first.k0, first.k1) : 0;
    m = (g - m) * s.one_minus_beta1 + m;
    v = v * s.beta2 + (g * s.one_minus_beta2) * g;
    float step = (m * s.rate) / (sqrtf(v) + s.eps);
    if (ZF_MODE & KAHAN) {
        float pull = p - p == 0.0f ? (p + c) * s.decay : 0.0f; /* 0 for an infinite or NaN parameter */
        float drop = (pull + step) - c;
        out.p = PASTE(nearest_, ZF_P)(p - drop);
        float stored = PASTE(value_, ZF_P)(out.p);
        float lost = (p - stored) - drop;
        out.c = PASTE(nearest_, ZF_P)(stored - stored == 0.0f ? lost : 0.0f);
    } else {
        p = p * s.keep - step;
        out.p = ZF_MODE & STOCHASTIC_P ? PASTE(stochastic_, ZF_P)(p, r) : PASTE(nearest_, ZF_P)(p);
    }
    out.m = ZF_MODE & STOCHASTIC_M ? PASTE(stochastic_, ZF_M)(m, draw(count + second.k0, second.k1))
                                   : PASTE(nearest_, ZF_M)(m);
    out.v = ZF_MODE & STOCHASTIC_V ? PASTE(stochastic_, ZF_V)(v, r >> 16) : PASTE(nearest_, ZF_V)(v);
    return out;
}

/* The bits of norms need not be those of torch. A fused multiply-add halves their cost. Without that instruction fmaf
 * is a call of a slow function. */
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define PLUS_SQUARE(sum, x) __builtin_fmaf(x, x, sum)
#else
#define PLUS_SQUARE(sum, x) ((sum) + (x) * (x))
#endif

/* ---- the update of a line of 32 elements ----
 * Its length is constant, so element numbers are constants too. A loop of variable length would compute a vector of
 * them in each pass. A line also has room for one prefetch for each cache line. */

#define PREFETCH(pointer, dtype, write) \
    for (int b = 0; b < LINE * BYTES(dtype); b += 64) __builtin_prefetch((pointer) + AHEAD + b, write)

INLINE void line(char *restrict p, const char *restrict g, char *restrict m, char *restrict v,
                 char *restrict c, scalars s, stream first, stream second, float *restrict sums) {
    float p_room[LINE], g_room[LINE], c_room[LINE], p_new[LINE], c_new[LINE];
    const char *p_in = PASTE(opened_, ZF_P)(p, p_room), *g_in = PASTE(opened_, ZF_G)(g, g_room);
    const char *c_in = ZF_MODE & KAHAN ? PASTE(opened_, ZF_P)(c, c_room) : 0;
    char *p_out = PASTE(output_, ZF_P)(p, p_new), *c_out = PASTE(output_, ZF_P)(c, c_new);
    for (int32_t i = 0; i < LINE; i += 2) {
        float p0, p1, g0, g1, m0, m1, v0, v1, c0 = 0, c1 = 0;
        LOAD2(ZF_P)(IN(p_in, ZF_P, i), &p0, &p1);
        LOAD2(ZF_G)(IN(g_in, ZF_G, i), &g0, &g1);
        PASTE(load2_, ZF_M)(AT(m, ZF_M, i), &m0, &m1);
        PASTE(load2_, ZF_V)(AT(v, ZF_V, i), &v0, &v1);
        if (ZF_MODE & KAHAN) LOAD2(ZF_P)(IN(c_in, ZF_P, i), &c0, &c1);
        codes a = element(p0, g0, m0, v0, c0, (uint32_t)i, s, first, second);
        codes b = element(p1, g1, m1, v1, c1, (uint32_t)i + 1, s, first, second);
        STORE2(ZF_P)(IN(p_out, ZF_P, i), a.p, b.p);
        PASTE(store2_, ZF_M)(AT(m, ZF_M, i), a.m, b.m);
        PASTE(store2_, ZF_V)(AT(v, ZF_V, i), a.v, b.v);
        if (ZF_MODE & KAHAN) STORE2(ZF_P)(IN(c_out, ZF_P, i), a.c, b.c);
    }
    if (sums) { /* In the loop above gcc would add element by element, for a fifth of the update's time. */
        float room[LINE];
        const float *x = PASTE(floats_, ZF_G)(g, room);
        for (int32_t i = 0; i < LINE; i++) sums[i] = PLUS_SQUARE(sums[i], x[i]);
    }
    PASTE(close_, ZF_P)(p, p_new);
    if (ZF_MODE & KAHAN) PASTE(close_, ZF_P)(c, c_new);
}

/* The squares of this many lines are summed in float. To sum all in double takes a third of the update's time. */
enum { RUN = 16 };

INLINE void fold(float *sums, double *totals) {
    for (int i = 0; i < LINE; i++) totals[i] += sums[i];
    memset(sums, 0, LINE * sizeof *sums);
}

INLINE double update(int64_t n, char *p, const char *g, char *m, char *v, char *c, scalars s, stream first,
                     stream second, int squares) {
    float sums[LINE] = {0};
    double totals[LINE] = {0}, total = 0;
    int64_t i = 0;
    for (; i + LINE <= n; i += LINE) {
        if (squares && i % (LINE * RUN) == 0) fold(sums, totals);
        PREFETCH(AT(p, ZF_P, i), ZF_P, 1);
        PREFETCH(AT(g, ZF_G, i), ZF_G, 0);
        PREFETCH(AT(m, ZF_M, i), ZF_M, 1);
        PREFETCH(AT(v, ZF_V, i), ZF_V, 1);
        if (ZF_MODE & KAHAN) PREFETCH(AT(c, ZF_P, i), ZF_P, 1);
        line(AT(p, ZF_P, i), AT(g, ZF_G, i), AT(m, ZF_M, i), AT(v, ZF_V, i),
             ZF_MODE & KAHAN ? AT(c, ZF_P, i) : 0, s, first, second, squares ? sums : 0);
        first.k0 += LINE * ZF_STRIDE;
        second.k0 += LINE * ZF_STRIDE;
    }
    size_t rest = (size_t)(n - i);
    if (rest) { /* The last elements are copied into a line that is padded with zeros. */
        char p_[LINE * 4] = {0}, g_[LINE * 4] = {0}, m_[LINE * 4] = {0}, v_[LINE * 4] = {0};
        char c_[LINE * 4] = {0};
        memcpy(p_, AT(p, ZF_P, i), rest * BYTES(ZF_P));
        memcpy(g_, AT(g, ZF_G, i), rest * BYTES(ZF_G));
        memcpy(m_, AT(m, ZF_M, i), rest * BYTES(ZF_M));
        memcpy(v_, AT(v, ZF_V, i), rest * BYTES(ZF_V));
        if (ZF_MODE & KAHAN) memcpy(c_, AT(c, ZF_P, i), rest * BYTES(ZF_P));
        line(p_, g_, m_, v_, c_, s, first, second, squares ? sums : 0);
        memcpy(AT(p, ZF_P, i), p_, rest * BYTES(ZF_P));
        memcpy(AT(m, ZF_M, i), m_, rest * BYTES(ZF_M));
        memcpy(AT(v, ZF_V, i), v_, rest * BYTES(ZF_V));
        if (ZF_MODE & KAHAN) memcpy(AT(c, ZF_P, i), c_, rest * BYTES(ZF_P));
    }
    fold(sums, totals);
    for (int k = 0; k < LINE; k++) total += totals[k];
    return total;
}

/* ---- entries and threads ---- */

typedef struct {
    int64_t entries;
    void *const *p, *const *g, *const *m, *const *v, *const *c; /* c is null unless KAHAN */
    const int64_t *numel;
    const uint64_t *key, *offset;
    uint64_t seed, step;
    scalars s;
    double *squares; /* one sum for each gradient, or null: sums are not wanted */
} job;

INLINE double run_piece(const job *j, int64_t e, int64_t from, int64_t to, int squares) {
    double sum = 0;
    char *p = j->p[e], *m = j->m[e], *v = j->v[e], *c = ZF_MODE & KAHAN ? j->c[e] : 0;
    const char *g = j->g[e];
    while (from < to) {
        uint64_t index = j->offset[e] + (uint64_t)from;
        uint64_t left = (1ull << 32) - (index & 0xffffffffu);
        int64_t n = (uint64_t)(to - from) < left ? to - from : (int64_t)left;
        stream k[2];
        for (uint32_t i = 0; i < 2; i++) k[i] = stream_of(j->seed, j->step, j->key[e], index, i);
        sum += update(n, AT(p, ZF_P, from), AT(g, ZF_G, from), AT(m, ZF_M, from), AT(v, ZF_V, from),
                      ZF_MODE & KAHAN ? AT(c, ZF_P, from) : 0, j->s, k[0], k[1], squares);
        from += n;
    }
    return sum;
}

static double one_piece(const void *what, int64_t e, int64_t from, int64_t to, int squares) {
    return squares ? run_piece(what, e, from, to, 1) : run_piece(what, e, from, to, 0);
}

/* Return 0, or 1 if memory is missing: then nothing is done. */
int zerofn_adam(const job *j, int threads, parallel run) {
    return over_entries(one_piece, j, j->entries, j->numel, j->squares, threads, run);
}

/* ---- the sum of squares of numbers stored as ZF_G ----
 * It is computed in double: squares of 16-bit numbers are exact, and no sum of finite ones overflows. The pieces depend
 * on the length only, so the sum is the same on any number of threads. */

enum { PARTS = 256 };

typedef struct { const char *x; int64_t each; double *parts; } addends;

INLINE void line_squares(const char *at, double *sums) {
    float room[LINE];
    const float *x = PASTE(floats_, ZF_G)(at, room);
    for (int i = 0; i < LINE; i++) sums[i] += (double)x[i] * x[i];
}

static void add_squares(const void *what, int64_t first, int64_t last) {
    const addends *a = what;
    double sums[LINE] = {0}, sum = 0;
    int64_t at = first;
    for (; at + LINE <= last; at += LINE) {
        PREFETCH(AT(a->x, ZF_G, at), ZF_G, 0);
        line_squares(AT(a->x, ZF_G, at), sums);
    }
    if (at < last) { /* The last elements are copied into a line that is padded with zeros. */
        char copy[LINE * 4] = {0};
        line_squares(memcpy(copy, AT(a->x, ZF_G, at), (size_t)(last - at) * BYTES(ZF_G)), sums);
    }
    for (int i = 0; i < LINE; i++) sum += sums[i];
    a->parts[first / a->each] = sum;
}

double zerofn_squares(const char *x, int64_t n, int threads, parallel run) {
    double parts[PARTS] = {0}, sum = 0;
    addends a = {x, whole_units((n + PARTS - 1) / PARTS), parts};
    team t = {add_squares, &a, n, a.each, 0};
    share_out(&t, useful(threads, n), run);
    for (int i = 0; i < PARTS; i++) sum += parts[i];
    return sum;
}
