/* Encodes a block of floats as codes of 8 or 4 bits, and decodes it, with the bits of zerofn/kernels/codes.py.
 *
 * codes.c and printed programs (print_c.py) include this file. The macros:
 *   -DZF_BITS=              8 or 4.
 *   -DZF_MAP=               0: linear. 1: companded. 2: dynamic, with -DZF_TABLE= and -DZF_POSITIVE_TABLE=.
 *   -DZF_SIGNED=            1: every block is signed. 0: a block is signed if it has a negative number.
 *   -DZF_STRIDE=            The difference between the counters of neighbouring elements (rounding.py).
 *   -DZF_NARROW=            1: numbers are bfloat16, and so are scales. By default they are float.
 */
#pragma once
#include <math.h>
#include <string.h>

#include "native_draws.h"

#ifndef ZF_NARROW
#define ZF_NARROW 0
#endif
#if ZF_NARROW
#include "native_lines.h"
typedef uint16_t stored_as;
INLINE float narrowed(float x) { return from_bits(bf16_code(x) & 0xffff0000u); }
INLINE float loaded_scale(stored_as x) { return from_bits((uint32_t)x << 16); }
INLINE stored_as scale_code(float x) { return (stored_as)(bf16_code(x) >> 16); }
#else
typedef float stored_as;
INLINE float narrowed(float x) { return x; }
INLINE float loaded_scale(stored_as x) { return x; }
INLINE stored_as scale_code(float x) { return x; }
#endif

enum { STRIP = 64, LAST_SIGNED = (1 << (ZF_BITS - 1)) - 1, LAST = (1 << ZF_BITS) - 1, TWICE = 2 * LAST_SIGNED };

/* The nearest whole number. If two are as near, the even one. */
INLINE float rounded(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

#if ZF_MAP == 2
static const float of_signed[LAST + 1] = {ZF_TABLE}, of_positive[LAST + 1] = {ZF_POSITIVE_TABLE};
#define TABLE(is_signed) ((is_signed) ? of_signed : of_positive)
#endif

INLINE float number(float code, float scale, int is_signed) {
    const float n = TWICE, one = (float)(1.0 / LAST_SIGNED), all = (float)(1.0 / LAST);
    const float square = (float)(1.0 / ((double)LAST * LAST));
    if (ZF_MAP == 1) return narrowed((is_signed ? code / (n - fabsf(code)) : code * code * square) * scale);
    return narrowed(code * (is_signed ? one : all) * scale);
}

INLINE float decoded(uint8_t code, float scale, int is_signed) {
#if ZF_MAP == 2
    return narrowed(TABLE(is_signed)[code] * scale);
#endif
    float c = (float)code;
    return number(is_signed ? -(LAST_SIGNED - c) : c, scale, is_signed);
}

/* `scale` is the largest magnitude of a block. Magnitudes times `lift` and `reciprocal` are at most 1. One factor would
 * not do: 1 / scale is infinite if the scale is subnormal. */
typedef struct { float scale, lift, reciprocal; int is_signed, finite, common; } of_block;

INLINE of_block block_of(uint32_t most, uint32_t signs) {
    float scale, lift;
    memcpy(&scale, &most, 4);
    lift = scale < 0x1p-64f ? 0x1p64f : scale > 0x1p64f ? 0x1p-64f : 1;
    return (of_block){scale, lift, 1.0f / (scale * lift), ZF_SIGNED || signs >> 31, most < 0x7f800000u,
                      lift == 1 && !ZF_NARROW};
}

INLINE void see(uint32_t *restrict most, uint32_t *restrict signs, const float *restrict x, int64_t n) {
    for (int64_t k = 0; k < n; k++) {
        uint32_t bits, size;
        memcpy(&bits, x + k, 4);
        size = bits & 0x7fffffffu;
        most[k] = size > most[k] ? size : most[k];
        signs[k] |= bits;
    }
}

/* Find the largest magnitude and the signs of a block. A maximum does not depend on the order of its strips. */
INLINE of_block seen(const float *x, int64_t n) {
    uint32_t most[STRIP] = {0}, signs[STRIP] = {0}, all = 0, any = 0;
    int64_t i = 0;
    for (; i + STRIP <= n; i += STRIP) see(most, signs, x + i, STRIP);
    see(most, signs, x + i, n - i);
    for (int k = 0; k < STRIP; k++) all = most[k] > all ? most[k] : all;
    for (int k = 0; k < STRIP; k++) any |= signs[k];
    return block_of(all, any);
}

INLINE float stored_scale(of_block b) {
    float scale = b.finite ? b.scale : NAN;
    return b.is_signed ? -scale : scale;
}

#if ZF_MAP == 2
/* The index of the last entry that is at most `y`; 0 if all entries are greater. */
INLINE int place(const float *table, float y) {
    int low = 0;
    if (ZF_BITS == 8) {
        low = table[128] <= y ? 128 : 0;
        low += table[low + 64] <= y ? 64 : 0;
        low += table[low + 32] <= y ? 32 : 0;
        low += table[low + 16] <= y ? 16 : 0;
    }
    low += table[low + 8] <= y ? 8 : 0;
    low += table[low + 4] <= y ? 4 : 0;
    low += table[low + 2] <= y ? 2 : 0;
    return low + (table[low + 1] <= y);
}

INLINE float from_table(float x, of_block b, int is_signed, int random, uint32_t counter, uint32_t k1) {
    const float *table = TABLE(is_signed);
    float y = x * b.lift * b.reciprocal;
    int low = place(table, y), high = low < LAST ? low + 1 : LAST;
    float below = table[low], above = table[high];
    int code = y - below > above - y ? high : low;
    if (random) {
        float u = (float)(int32_t)((draw(counter, k1) >> 16 & 0xfff0u) | 8u) * 0x1p-16f;
        int found = u * (above - below) < y - below ? high : low;
        code = narrowed(table[code] * b.scale) == x ? code : found;
    }
    return (float)(!is_signed && x > 0.0f && code < 1 ? 1 : code);
}
#endif

/* The code of `x`. In a `common` block `lift` is 1, and numbers are float. There random rounding cannot change a number
 * that a code represents exactly, so the code need not be decoded to test for that. */
INLINE float coded(float x, of_block b, int is_signed, int random, int common, uint32_t counter, uint32_t k1) {
#if ZF_MAP == 2
    (void)common;
    return from_table(x, b, is_signed, random, counter, k1);
#endif
    float size = is_signed ? fabsf(x) : x, y = (common ? size : size * b.lift) * b.reciprocal;
    float at = ZF_MAP == 0 ? y * (is_signed ? LAST_SIGNED : LAST)
             : is_signed ? y * TWICE / (y + 1.0f) : sqrtf(y) * LAST;
    float code = rounded(at);
    if (random) {
        float u = (float)(int32_t)((draw(counter, k1) >> 16 & 0xfff0u) | 8u), low = floorf(at), above, gap = 0x1p-16f;
        if (ZF_MAP == 0) above = at - low;
        else if (is_signed) { above = (y * (TWICE - low) - low) * (TWICE - 1 - low); gap *= TWICE; }
        else { above = y * (LAST * LAST) - low * low; gap *= low + low + 1.0f; }
        float found = u * gap < above ? low + 1.0f : low;
        code = !common && number(code, b.scale, is_signed) == size ? code : found;
    }
    if (is_signed) return copysignf(code, x) + LAST_SIGNED;
    float least = x > 0.0f ? 1.0f : 0.0f; /* A second moment above zero gets a code above zero. */
    return code < least ? least : code;
}

/* Write codes into a row from index `at` on. Two codes of 4 bits share a byte: the first one has the low bits. */
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

/* The functions below work on a block that begins at index `at` of its row. Strips of constant length save a sixth of
 * the time. */

INLINE void decode_strip(float *x, const uint8_t *row, int64_t at, int64_t n, float scale, int is_signed) {
    uint8_t codes[STRIP];
    get(row, at, codes, n);
    for (int64_t k = 0; k < n; k++) x[k] = decoded(codes[k], scale, is_signed);
}

INLINE void decode_as(float *x, const uint8_t *row, int64_t at, int64_t n, float scale, int is_signed) {
    int64_t i = 0;
    for (; i + STRIP <= n; i += STRIP) decode_strip(x + i, row, at + i, STRIP, scale, is_signed);
    if (i < n) decode_strip(x + i, row, at + i, n - i, scale, is_signed);
}

static __attribute__((noinline)) void decode_block(float *x, const uint8_t *row, int64_t at, int64_t n, float scale) {
    if (scale < 0.0f) decode_as(x, row, at, n, fabsf(scale), 1);
    else decode_as(x, row, at, n, fabsf(scale), 0);
}

INLINE void encode_strip(const float *x, uint8_t *row, int64_t at, int64_t n, of_block b, int is_signed, int random,
                         int common, stream s) {
    uint8_t codes[STRIP];
    for (int64_t k = 0; k < n; k++)
        codes[k] = (uint8_t)(int32_t)coded(x[k], b, is_signed, random, common, s.k0 + (uint32_t)k * ZF_STRIDE, s.k1);
    put(row, at, codes, n);
}

INLINE void encode_as(const float *x, uint8_t *row, int64_t at, int64_t n, of_block b, int is_signed, int random,
                      stream s) {
    int64_t i = 0;
    if (random && b.common)
        for (; i + STRIP <= n; i += STRIP, s.k0 += STRIP * ZF_STRIDE)
            encode_strip(x + i, row, at + i, STRIP, b, is_signed, 1, 1, s);
    for (; i < n; i += STRIP, s.k0 += STRIP * ZF_STRIDE)
        encode_strip(x + i, row, at + i, least_of(STRIP, n - i), b, is_signed, random, 0, s);
}

INLINE void no_codes(uint8_t *row, int64_t at, int64_t n) {
    int64_t from = ZF_BITS == 8 ? at : (at + 1) / 2, to = ZF_BITS == 8 ? at + n : (at + n + 1) / 2;
    memset(row + from, 0, (size_t)(to - from));
}

/* `of` is passed by address. Its fields have just been written one by one, and a copy by wider loads waits for them. */
static __attribute__((noinline)) void encode_block(const float *x, uint8_t *row, int64_t at, int64_t n,
                                                   const of_block *of, int random, uint32_t k0, uint32_t k1) {
    const of_block b = *of;
    const stream s = {k0, k1};
    if (!b.scale || !b.finite) no_codes(row, at, n);
    else if (b.is_signed && random) encode_as(x, row, at, n, b, 1, 1, s);
    else if (b.is_signed) encode_as(x, row, at, n, b, 1, 0, s);
    else if (random) encode_as(x, row, at, n, b, 0, 1, s);
    else encode_as(x, row, at, n, b, 0, 0, s);
}
