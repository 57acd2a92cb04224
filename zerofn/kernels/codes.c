/* Rows of floats as codes of 8 or 4 bits, and back: the formulas of zerofn/kernels/codes.py, bit for bit.
 *
 * Built by it on first use: -DZF_BITS= 8 or 4, -DZF_COMPANDED= 1 or 0, -DZF_SIGNED= 1 or 0, -DZF_STRIDE= of counters
 * (rounding.py).
 */
#include <math.h>
#include <string.h>

#include "native_threads.h"

#define INLINE static inline __attribute__((always_inline))

enum { STRIP = 64, LAST_SIGNED = (1 << (ZF_BITS - 1)) - 1, LAST = (1 << ZF_BITS) - 1 };

typedef struct {
    float *x;
    uint8_t *codes;
    float *scales;
    int64_t row, block; /* numbers in a row, and in a block */
    int random; /* 1: by counters; 2: by counters that follow from the numbers of a block */
    uint32_t k0, k1; /* the counter of the first number */
} job;

INLINE uint32_t draw(uint32_t counter, uint32_t k1) {
    uint32_t x = counter;
    x ^= x >> 16; x *= 0x7feb352du; x += k1; x ^= x >> 15; x *= 0x846ca68bu; return x ^ (x >> 16);
}

/* To the nearest whole number, of two the even one. */
INLINE float rounded(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

INLINE float number(float code, float scale, int is_signed) {
    const float n = 2 * LAST_SIGNED, one = (float)(1.0 / LAST_SIGNED), all = (float)(1.0 / LAST);
    const float square = (float)(1.0 / ((double)LAST * LAST));
    if (ZF_COMPANDED) return (is_signed ? code / (n - fabsf(code)) : code * code * square) * scale;
    return code * (is_signed ? one : all) * scale;
}

INLINE float coded(float x, float scale, int is_signed, int random, uint32_t counter, uint32_t k1) {
    float y = x / scale, least = is_signed ? -LAST_SIGNED : y > 0.0f ? 1.0f : 0.0f;
    float t = !ZF_COMPANDED ? y : is_signed ? 2.0f * y / (1.0f + fabsf(y)) : sqrtf(y);
    float code = rounded(t * (is_signed ? LAST_SIGNED : LAST));
    code = code < least ? least : code;
    if (random) {
        float u = (float)(int32_t)(draw(counter, k1) >> 8) * 0x1p-24f;
        float here = number(code, scale, is_signed), off = x - here;
        float other = code + (off > 0.0f ? 1.0f : off < 0.0f ? -1.0f : 0.0f);
        other = other < least ? least : other;
        code = u * fabsf(number(other, scale, is_signed) - here) < fabsf(off) ? other : code;
    }
    return is_signed ? code + LAST_SIGNED : code;
}

/* Codes of a row from its number `at` on; two of 4 bits share a byte, the first one below. */
INLINE void put(uint8_t *row, int64_t at, const uint8_t *codes, int64_t n) {
    if (ZF_BITS == 8) {
        memcpy(row + at, codes, (size_t)n);
        return;
    }
    int64_t i = 0;
    if (at & 1) row[at >> 1] |= (uint8_t)(codes[i++] << 4);
    uint8_t *pairs = row + ((at + i) >> 1);
    for (int64_t k = 0; k < (n - i) / 2; k++)
        pairs[k] = (uint8_t)(codes[i + 2 * k] | codes[i + 2 * k + 1] << 4);
    if ((n - i) & 1) pairs[(n - i) / 2] = codes[n - 1];
}

INLINE void get(const uint8_t *row, int64_t at, uint8_t *codes, int64_t n) {
    if (ZF_BITS == 8) {
        memcpy(codes, row + at, (size_t)n);
        return;
    }
    int64_t i = 0;
    if (at & 1) codes[i++] = row[at >> 1] >> 4;
    const uint8_t *pairs = row + ((at + i) >> 1);
    for (int64_t k = 0; k < (n - i) / 2; k++) {
        codes[i + 2 * k] = pairs[k] & 15;
        codes[i + 2 * k + 1] = pairs[k] >> 4;
    }
    if ((n - i) & 1) codes[n - 1] = pairs[(n - i) / 2] & 15;
}

INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t bytes_of(int64_t row) { return ZF_BITS == 8 ? row : (row + 1) / 2; }

INLINE void encode_block(const job *j, const float *x, uint8_t *row, int64_t at, int64_t n, float scale, int is_signed,
                         int random, uint32_t counter) {
    for (int64_t i = 0; i < n; i += STRIP) {
        uint8_t codes[STRIP];
        int64_t m = least_of(STRIP, n - i);
        for (int64_t k = 0; k < m; k++)
            codes[k] = (uint8_t)(int32_t)coded(x[i + k], scale, is_signed, random,
                                               counter + (uint32_t)(i + k) * ZF_STRIDE, j->k1);
        put(row, at + i, codes, m);
    }
}

static void encode(const void *what, int64_t first, int64_t last) {
    const job *j = what;
    int64_t blocks = (j->row + j->block - 1) / j->block;
    for (int64_t r = first; r < last; r++) {
        uint8_t *row = j->codes + r * bytes_of(j->row);
        for (int64_t b = 0; b < blocks; b++) {
            int64_t at = b * j->block, n = least_of(j->block, j->row - at);
            const float *x = j->x + r * j->row + at;
            uint32_t most = 0, signs = 0, bits;
            for (int64_t i = 0; i < n; i++) {
                memcpy(&bits, x + i, 4);
                uint32_t size = bits & 0x7fffffffu;
                most = size > most ? size : most;
                signs |= bits;
            }
            int is_signed = ZF_SIGNED || signs >> 31, finite = most < 0x7f800000u;
            float scale;
            memcpy(&scale, &most, 4);
            scale = finite ? scale : NAN;
            j->scales[r * blocks + b] = is_signed ? -scale : scale;
            if (!most || !finite) {
                uint8_t none[STRIP] = {0};
                for (int64_t i = 0; i < n; i += STRIP) put(row, at + i, none, least_of(STRIP, n - i));
                continue;
            }
            uint32_t counter = j->k0 + (uint32_t)(r * j->row + at) * ZF_STRIDE;
            if (j->random == 2) {
                uint32_t sum = 0;
                for (int64_t i = 0; i < n; i++) {
                    memcpy(&bits, x + i, 4);
                    sum += bits;
                }
                counter = draw(sum, j->k0);
            }
            if (is_signed && j->random) encode_block(j, x, row, at, n, scale, 1, 1, counter);
            else if (is_signed) encode_block(j, x, row, at, n, scale, 1, 0, counter);
            else if (j->random) encode_block(j, x, row, at, n, scale, 0, 1, counter);
            else encode_block(j, x, row, at, n, scale, 0, 0, counter);
        }
    }
}

INLINE void decode_block(float *x, const uint8_t *row, int64_t at, int64_t n, float scale, int is_signed) {
    for (int64_t i = 0; i < n; i += STRIP) {
        uint8_t codes[STRIP];
        int64_t m = least_of(STRIP, n - i);
        get(row, at + i, codes, m);
        for (int64_t k = 0; k < m; k++) {
            float c = (float)codes[k];
            x[i + k] = number(is_signed ? -(LAST_SIGNED - c) : c, scale, is_signed);
        }
    }
}

static void decode(const void *what, int64_t first, int64_t last) {
    const job *j = what;
    int64_t blocks = (j->row + j->block - 1) / j->block;
    for (int64_t r = first; r < last; r++) {
        const uint8_t *row = j->codes + r * bytes_of(j->row);
        for (int64_t b = 0; b < blocks; b++) {
            int64_t at = b * j->block, n = least_of(j->block, j->row - at);
            float scale = j->scales[r * blocks + b], *x = j->x + r * j->row + at;
            if (scale < 0.0f) decode_block(x, row, at, n, fabsf(scale), 1);
            else decode_block(x, row, at, n, fabsf(scale), 0);
        }
    }
}

static void over_rows(task run_rows, const job *j, int64_t rows, int threads, parallel run) {
    int64_t each = GRAIN / (j->row > 0 ? j->row : 1);
    team t = {run_rows, j, rows, each > 0 ? each : 1, 0};
    share_out(&t, useful(threads, rows * j->row), run);
}

void zerofn_encode(const job *j, int64_t rows, int threads, parallel run) { over_rows(encode, j, rows, threads, run); }
void zerofn_decode(const job *j, int64_t rows, int threads, parallel run) { over_rows(decode, j, rows, threads, run); }
