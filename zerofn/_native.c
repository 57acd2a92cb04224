/* One AdamW step over lists of tensors: the formula of zerofn/_adam_formula.py, bit for bit; and sums of squares.
 *
 * Built by zerofn/_native.py on first use, once for each combination of dtypes and rounding:
 *   -DZF_P=, -DZF_G=, -DZF_M=, -DZF_V=    f32, bf16 or f16: parameter, gradient, first and second moment;
 *   -DZF_MODE=                            sum of KAHAN, STOCHASTIC_P, ...: how each is rounded.
 * One combination a build: together they would take half a minute to compile, and a program uses one or two.
 *
 * The loop is plain C for the compiler to vectorise. Bits equal to eager torch need every float operation
 * rounded by itself: no -ffast-math, and -ffp-contract=off, or products are fused with sums. Conversions are
 * integer arithmetic, since the vector instructions for bfloat16 flush subnormals to zero.
 */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pairs of 16-bit numbers are read as little-endian words"
#endif

#define INLINE static inline __attribute__((always_inline))
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define BYTES_f32 4
#define BYTES_bf16 2
#define BYTES_f16 2
#define IS_BF16_f32 0
#define IS_BF16_bf16 1
#define IS_BF16_f16 0
#define BYTES(dtype) PASTE(BYTES_, dtype)
#define IS_BF16(dtype) PASTE(IS_BF16_, dtype)

/* A NaN made from bfloat16 inputs has zeros below its bfloat16 part, so rounding cannot carry it into the sign. */
enum { NAN_SURVIVES = IS_BF16(ZF_P) && IS_BF16(ZF_G) && IS_BF16(ZF_M) && IS_BF16(ZF_V) };

INLINE uint32_t to_bits(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
INLINE float from_bits(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

/* ---- two neighbours at a time ----
 * Splitting a word into two 16-bit numbers, and joining two, takes half the instructions that widening and
 * narrowing vectors takes. "Code": what a number is stored as, in the high half for bfloat16 (low half: waste),
 * in the low half for float16. Words may lie at odd multiples of two bytes. */

typedef uint32_t __attribute__((aligned(2), may_alias)) word;

INLINE void load2_f32(const void *at, float *a, float *b) { const float *x = at; *a = x[0]; *b = x[1]; }
INLINE void load2_bf16(const void *at, float *a, float *b) {
    uint32_t w = *(const word *)at;
    *a = from_bits(w << 16);
    *b = from_bits(w & 0xffff0000u);
}
INLINE void store2_f32(void *at, uint32_t a, uint32_t b) {
    float *x = at;
    x[0] = from_bits(a);
    x[1] = from_bits(b);
}
INLINE void store2_bf16(void *at, uint32_t a, uint32_t b) { *(word *)at = (a >> 16) | (b & 0xffff0000u); }
INLINE void store2_f16(void *at, uint32_t a, uint32_t b) { *(word *)at = a | (b << 16); }

/* ---- rounding to a code; `r` holds random bits, of which the low 16 count ---- */

INLINE uint32_t nearest_f32(float x) { return to_bits(x); }
INLINE uint32_t stochastic_f32(float x, uint32_t r) { (void)r; return to_bits(x); }
INLINE float value_f32(uint32_t code) { return from_bits(code); }

INLINE uint32_t nearest_bf16(float x) {
    uint32_t b = to_bits(x);
    b += 0x7fffu + ((b >> 16) & 1u);
    return !NAN_SURVIVES && x != x ? 0x7fc00000u : b;
}
INLINE uint32_t stochastic_bf16(float x, uint32_t r) {
    uint32_t b = to_bits(x);
    /* From the largest finite value on, to nearest: noise must not make infinities. */
    b += (b & 0x7fffffffu) >= 0x7f7f0000u ? 0x8000u : r & 0xffffu;
    return !NAN_SURVIVES && x != x ? 0x7fc00000u : b;
}
INLINE float value_bf16(uint32_t code) { return from_bits(code & 0xffff0000u); }

INLINE float value_f16(uint32_t code) {
    uint32_t b = (code & 0x7fffu) << 13;
    float subnormal = from_bits(b + (113u << 23)) - from_bits(113u << 23); /* exact */
    uint32_t magnitude = b + (b >= 0x0f800000u ? 224u << 23 : 112u << 23); /* infinity and NaN, or normal */
    magnitude = b < 0x00800000u ? to_bits(subnormal) : magnitude;
    return from_bits(magnitude | ((code & 0x8000u) << 16));
}

/* ---- a line of 32 numbers ready to be loaded in pairs ----
 * float16 is widened before the loop over pairs, since x86 has an instruction for that: half the time of an update. */

enum { LINE = 32 };

#define AS_f32 f32
#define AS_bf16 bf16
#define AS_f16 f32
#define LOAD2(dtype) PASTE(load2_, PASTE(AS_, dtype))
#define READY(dtype) PASTE(ready_, dtype)

INLINE const char *ready_f32(const char *at, float *room) { (void)room; return at; }
INLINE const char *ready_bf16(const char *at, float *room) { (void)room; return at; }
INLINE const char *ready_f16(const char *at, float *room) {
    /* As wide as the loads that follow: what narrower stores leave is not forwarded to them. */
#if defined(__AVX512F__)
    for (int i = 0; i < LINE; i += 16)
        _mm512_storeu_ps(room + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(at + 2 * i))));
#elif defined(__F16C__)
    for (int i = 0; i < LINE; i += 8)
        _mm256_storeu_ps(room + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at + 2 * i))));
#else
    for (int i = 0; i < LINE; i++) {
        uint16_t code;
        memcpy(&code, at + 2 * i, 2);
        room[i] = value_f16(code);
    }
#endif
    return (const char *)room;
}

/* `b`: bits of a magnitude that float16 holds exactly, that is too large for it, or below 2**-14. */
INLINE uint32_t pack_f16(uint32_t b) {
    uint32_t subnormal = to_bits(from_bits(b) + 0.5f) - to_bits(0.5f); /* the sum rounds to nearest */
    uint32_t code = (b - (112u << 23)) >> 13;
    code = b < (113u << 23) ? subnormal : code;
    code = b >= 0x47800000u ? 0x7c00u : code;
    return b > 0x7f800000u ? 0x7e00u : code;
}
INLINE uint32_t nearest_f16(float x) {
    uint32_t b = to_bits(x) & 0x7fffffffu;
    uint32_t rounded = (b + 0x0fffu + ((b >> 13) & 1u)) & ~0x1fffu;
    rounded = (b < (113u << 23)) | (b >= 0x7f800000u) ? b : rounded;
    return pack_f16(rounded) | ((to_bits(x) >> 16) & 0x8000u);
}
INLINE uint32_t stochastic_f16(float x, uint32_t r) {
    uint32_t b = to_bits(x) & 0x7fffffffu;
    const float lift = 0x1p-14f; /* gives a subnormal the last bit of the smallest normal numbers */
    uint32_t lifted = b < (113u << 23) ? to_bits(from_bits(b) + lift) : b;
    uint32_t cut = (lifted + (lifted >= 0x477fe000u ? 0x1000u : r & 0x1fffu)) & ~0x1fffu;
    cut = b < (113u << 23) ? to_bits(from_bits(cut) - lift) : cut;
    cut = b >= 0x7f800000u ? b : cut;
    return pack_f16(cut) | ((to_bits(x) >> 16) & 0x8000u);
}

/* ---- random bits: zerofn/_rounding.py ---- */

INLINE uint32_t mix(uint32_t x) {
    x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; return x ^ (x >> 16);
}

static uint32_t lane(uint32_t h, uint64_t seed, uint64_t step, uint64_t key, uint32_t block, uint32_t stream) {
    const uint32_t words[8] = {seed, seed >> 32, step, step >> 32, key, key >> 32, block, stream};
    for (int i = 0; i < 8; i++) h = mix(h ^ words[i]) + 0x9e3779b9u;
    return h;
}

INLINE uint32_t draw(uint32_t counter, uint32_t k1) {
    uint32_t x = counter;
    x ^= x >> 16; x *= 0x7feb352du; x += k1; x ^= x >> 15; x *= 0x846ca68bu; return x ^ (x >> 16);
}

/* ---- the update ---- */

typedef struct { float beta2, one_minus_beta1, one_minus_beta2, rate, eps, keep, decay; } scalars;
typedef struct { uint32_t k0, k1; } stream;

enum { KAHAN = 1, STOCHASTIC_P = 2, STOCHASTIC_M = 4, STOCHASTIC_V = 8 };

typedef struct { uint32_t p, m, v, c; } codes;

INLINE codes element(float p, float g, float m, float v, float c, uint32_t index, scalars s, stream first,
                     stream second) {
    codes out = {0, 0, 0, 0};
    uint32_t r = ZF_MODE & (STOCHASTIC_P | STOCHASTIC_V) ? draw(index + first.k0, first.k1) : 0;
    m = (g - m) * s.one_minus_beta1 + m;
    v = v * s.beta2 + (g * s.one_minus_beta2) * g;
    float step = (m * s.rate) / (sqrtf(v) + s.eps);
    if (ZF_MODE & KAHAN) {
        float pull = p - p == 0.0f ? (p + c) * s.decay : 0.0f; /* finite */
        float drop = (pull + step) - c;
        out.p = PASTE(nearest_, ZF_P)(p - drop);
        float stored = PASTE(value_, ZF_P)(out.p);
        float lost = (p - stored) - drop;
        out.c = PASTE(nearest_, ZF_P)(stored - stored == 0.0f ? lost : 0.0f);
    } else {
        p = p * s.keep - step;
        out.p = ZF_MODE & STOCHASTIC_P ? PASTE(stochastic_, ZF_P)(p, r) : PASTE(nearest_, ZF_P)(p);
    }
    out.m = ZF_MODE & STOCHASTIC_M ? PASTE(stochastic_, ZF_M)(m, draw(index + second.k0, second.k1))
                                   : PASTE(nearest_, ZF_M)(m);
    out.v = ZF_MODE & STOCHASTIC_V ? PASTE(stochastic_, ZF_V)(v, r >> 16) : PASTE(nearest_, ZF_V)(v);
    return out;
}

/* ---- a line of 32 elements: the whole loop body, of constant length ----
 * A constant length makes the element numbers constants too, where a loop of variable length rebuilds
 * a vector of them each time, and leaves room for one prefetch a cache line. Prefetching is worth a
 * quarter of the time: the processor's own stops at the end of each page of 4 KiB. */

enum { AHEAD = 4096 /* bytes */ };

#define AT(pointer, dtype, i) ((pointer) + (int64_t)(i) * BYTES(dtype))
#define IN(ready, dtype, i) ((ready) + (int64_t)(i) * PASTE(BYTES_, PASTE(AS_, dtype)))
#define PREFETCH(pointer, dtype, write) \
    for (int b = 0; b < LINE * BYTES(dtype); b += 64) __builtin_prefetch((pointer) + AHEAD + b, write)

INLINE void line(char *restrict p, const char *restrict g, char *restrict m, char *restrict v,
                 char *restrict c, scalars s, stream first, stream second) {
    float p_room[LINE], g_room[LINE], c_room[LINE];
    const char *p_in = READY(ZF_P)(p, p_room), *g_in = READY(ZF_G)(g, g_room);
    const char *c_in = ZF_MODE & KAHAN ? READY(ZF_P)(c, c_room) : 0;
    for (int32_t i = 0; i < LINE; i += 2) {
        float p0, p1, g0, g1, m0, m1, v0, v1, c0 = 0, c1 = 0;
        LOAD2(ZF_P)(IN(p_in, ZF_P, i), &p0, &p1);
        LOAD2(ZF_G)(IN(g_in, ZF_G, i), &g0, &g1);
        PASTE(load2_, ZF_M)(AT(m, ZF_M, i), &m0, &m1);
        PASTE(load2_, ZF_V)(AT(v, ZF_V, i), &v0, &v1);
        if (ZF_MODE & KAHAN) LOAD2(ZF_P)(IN(c_in, ZF_P, i), &c0, &c1);
        codes a = element(p0, g0, m0, v0, c0, (uint32_t)i, s, first, second);
        codes b = element(p1, g1, m1, v1, c1, (uint32_t)i + 1, s, first, second);
        PASTE(store2_, ZF_P)(AT(p, ZF_P, i), a.p, b.p);
        PASTE(store2_, ZF_M)(AT(m, ZF_M, i), a.m, b.m);
        PASTE(store2_, ZF_V)(AT(v, ZF_V, i), a.v, b.v);
        if (ZF_MODE & KAHAN) PASTE(store2_, ZF_P)(AT(c, ZF_P, i), a.c, b.c);
    }
}

static void update(int64_t n, char *p, const char *g, char *m, char *v, char *c, scalars s, stream first,
                   stream second) {
    int64_t i = 0;
    for (; i + LINE <= n; i += LINE) {
        PREFETCH(AT(p, ZF_P, i), ZF_P, 1);
        PREFETCH(AT(g, ZF_G, i), ZF_G, 0);
        PREFETCH(AT(m, ZF_M, i), ZF_M, 1);
        PREFETCH(AT(v, ZF_V, i), ZF_V, 1);
        if (ZF_MODE & KAHAN) PREFETCH(AT(c, ZF_P, i), ZF_P, 1);
        line(AT(p, ZF_P, i), AT(g, ZF_G, i), AT(m, ZF_M, i), AT(v, ZF_V, i),
             ZF_MODE & KAHAN ? AT(c, ZF_P, i) : 0, s, first, second);
        first.k0 += LINE;
        second.k0 += LINE;
    }
    size_t rest = (size_t)(n - i);
    if (rest) { /* a copy, filled up with zeros */
        char p_[LINE * 4] = {0}, g_[LINE * 4] = {0}, m_[LINE * 4] = {0}, v_[LINE * 4] = {0};
        char c_[LINE * 4] = {0};
        memcpy(p_, AT(p, ZF_P, i), rest * BYTES(ZF_P));
        memcpy(g_, AT(g, ZF_G, i), rest * BYTES(ZF_G));
        memcpy(m_, AT(m, ZF_M, i), rest * BYTES(ZF_M));
        memcpy(v_, AT(v, ZF_V, i), rest * BYTES(ZF_V));
        if (ZF_MODE & KAHAN) memcpy(c_, AT(c, ZF_P, i), rest * BYTES(ZF_P));
        line(p_, g_, m_, v_, c_, s, first, second);
        memcpy(AT(p, ZF_P, i), p_, rest * BYTES(ZF_P));
        memcpy(AT(m, ZF_M, i), m_, rest * BYTES(ZF_M));
        memcpy(AT(v, ZF_V, i), v_, rest * BYTES(ZF_V));
        if (ZF_MODE & KAHAN) memcpy(AT(c, ZF_P, i), c_, rest * BYTES(ZF_P));
    }
}

/* ---- entries and threads ---- */

typedef struct {
    int64_t entries;
    void *const *p, *const *g, *const *m, *const *v, *const *c; /* c is null unless KAHAN */
    const int64_t *numel;
    const uint64_t *key, *offset;
    uint64_t seed, step;
    scalars s;
} job;

static void run_piece(const job *j, int64_t e, int64_t from, int64_t to) {
    char *p = j->p[e], *m = j->m[e], *v = j->v[e], *c = ZF_MODE & KAHAN ? j->c[e] : 0;
    const char *g = j->g[e];
    while (from < to) {
        uint64_t index = j->offset[e] + (uint64_t)from;
        uint64_t left = (1ull << 32) - (index & 0xffffffffu);
        int64_t n = (uint64_t)(to - from) < left ? to - from : (int64_t)left;
        stream k[2];
        for (uint32_t i = 0; i < 2; i++) {
            k[i].k0 = lane(0x243f6a88u, j->seed, j->step, j->key[e], index >> 32, i) + (uint32_t)index;
            k[i].k1 = lane(0x85a308d3u, j->seed, j->step, j->key[e], index >> 32, i);
        }
        update(n, AT(p, ZF_P, from), AT(g, ZF_G, from), AT(m, ZF_M, from), AT(v, ZF_V, from),
               ZF_MODE & KAHAN ? AT(c, ZF_P, from) : 0, j->s, k[0], k[1]);
        from += n;
    }
}

/* Shares are handed out as threads come for them: a thread that starts late or is interrupted does fewer. */
enum { MAX_THREADS = 256, GRAIN = 1 << 14, SHARES = 8 /* for each thread */ };

typedef void (*task)(const void *what, int64_t first, int64_t last);
typedef struct { task run; const void *what; int64_t total, each; int64_t next; } team;

static void work(void *argument) {
    team *t = argument;
    for (;;) {
        int64_t from = __atomic_fetch_add(&t->next, t->each, __ATOMIC_RELAXED);
        if (from >= t->total) return;
        t->run(t->what, from, t->total - from < t->each ? t->total : from + t->each);
    }
}

static void *work_thread(void *argument) { work(argument); return 0; }

/* GOMP_parallel of the OpenMP runtime that torch has loaded: its threads wait for work by spinning, and threads
 * of our own would have to share the processors with them. Null: there is none, and we start our own. */
typedef void (*parallel)(void (*)(void *), void *, unsigned, unsigned);

static int useful(int threads, int64_t total) {
    if (threads > total / GRAIN) threads = (int)(total / GRAIN);
    return threads > MAX_THREADS ? MAX_THREADS : threads;
}

static void share_out(team *t, int threads, parallel run) {
    if (threads <= 1) {
        work(t);
        return;
    }
    if (run) {
        run(work, t, (unsigned)threads, 0);
        return;
    }
    pthread_t ids[MAX_THREADS];
    int started = 0;
    while (started < threads - 1 && !pthread_create(&ids[started], 0, work_thread, t)) started++;
    work(t);
    while (started > 0) pthread_join(ids[--started], 0);
}

static int64_t whole_lines(int64_t n) { return ((n < GRAIN ? GRAIN : n) + LINE - 1) / LINE * LINE; }

/* Elements `first` to `last` of the concatenation of all entries. */
static void run_share(const void *what, int64_t first, int64_t last) {
    const job *j = what;
    int64_t begin = 0;
    for (int64_t e = 0; e < j->entries && begin < last; e++) {
        int64_t n = j->numel[e];
        int64_t from = first > begin ? first - begin : 0, to = last - begin < n ? last - begin : n;
        if (from < to) run_piece(j, e, from, to);
        begin += n;
    }
}

void zerofn_adam(const job *j, int threads, parallel run) {
    team t = {run_share, j, 0, 0, 0};
    for (int64_t e = 0; e < j->entries; e++) t.total += j->numel[e];
    threads = useful(threads, t.total);
    t.each = threads <= 1 ? t.total : whole_lines(t.total / threads / SHARES);
    if (t.total) share_out(&t, threads, run);
}

/* ---- the sum of squares of numbers stored as ZF_G ----
 * In double: squares of 16-bit numbers are exact there, and no sum of finite ones overflows. Cut in places
 * that depend on nothing but the length, so that the sum is the same on any number of threads. */

enum { PARTS = 256 };

typedef struct { const char *x; int64_t each; double *parts; } addends;

/* Its numbers in any order: what is cheapest to load. */
INLINE const float *floats_f32(const char *at, float *room) { (void)room; return (const float *)at; }
INLINE const float *floats_f16(const char *at, float *room) { return (const float *)ready_f16(at, room); }
INLINE const float *floats_bf16(const char *at, float *room) {
    for (int i = 0; i < LINE / 2; i++) load2_bf16(at + 4 * i, room + i, room + LINE / 2 + i);
    return room;
}

static void add_squares(const void *what, int64_t first, int64_t last) {
    const addends *a = what;
    double sums[LINE] = {0}, sum = 0;
    for (int64_t at = first; at < last; at += LINE) {
        char copy[LINE * 4] = {0};
        float room[LINE];
        const char *line = AT(a->x, ZF_G, at);
        if (last - at < LINE) line = memcpy(copy, line, (size_t)(last - at) * BYTES(ZF_G));
        else PREFETCH(line, ZF_G, 0);
        const float *x = PASTE(floats_, ZF_G)(line, room);
        for (int i = 0; i < LINE; i++) sums[i] += (double)x[i] * x[i];
    }
    for (int i = 0; i < LINE; i++) sum += sums[i];
    a->parts[first / a->each] = sum;
}

double zerofn_squares(const char *x, int64_t n, int threads, parallel run) {
    double parts[PARTS] = {0}, sum = 0;
    addends a = {x, whole_lines((n + PARTS - 1) / PARTS), parts};
    team t = {add_squares, &a, n, a.each, 0};
    share_out(&t, useful(threads, n), run);
    for (int i = 0; i < PARTS; i++) sum += parts[i];
    return sum;
}
