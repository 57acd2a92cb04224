/* Loads and rounds numbers of 16 bits, in lines of 32. NAN_SURVIVES is defined before this file is included.
 *
 * bfloat16 is converted by integer arithmetic, since the vector instructions for it flush subnormals to zero. Two
 * neighbours are read as one word: to split a word, or to join two, takes half the instructions of widening or
 * narrowing vectors. Words may have addresses that are odd multiples of two bytes.
 *
 * Source that defines NO_F16 first neither opens nor closes lines of float16. The header of vector instructions takes
 * half the time of the compiler.
 */
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__F16C__) && !defined(NO_F16)
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pairs of 16-bit numbers are read as little-endian words"
#endif

#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#endif

/* The length is constant, so element numbers are constants too: a loop of variable length would compute a vector of
 * them in each pass. A line also has room for one prefetch for each cache line. */
enum { LINE = 32 };

/* No element depends on another: without this gcc compares the addresses of all columns, or gives up if they are many.
 * If the loop has few instructions, gcc would unroll it first, and then compute one number after the other. */
#if defined(__clang__)
#define IVDEP _Pragma("clang loop vectorize(assume_safety)")
#else
#define IVDEP _Pragma("GCC ivdep") _Pragma("GCC unroll 1")
#endif

typedef uint32_t __attribute__((aligned(2), may_alias)) word;

INLINE uint32_t to_bits(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
INLINE float from_bits(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

/* ---- bfloat16: a code is the bits of a float, of which the upper half is stored and the lower half is arbitrary ----
 * If all inputs are bfloat16, the low half of a NaN is zero, so rounding cannot carry into the sign bit. */

INLINE uint32_t bf16_code(float x) {
    uint32_t b = to_bits(x);
    b += 0x7fffu + ((b >> 16) & 1u);
    return !NAN_SURVIVES && x != x ? 0x7fc00000u : b;
}
/* The low 16 bits of `r` are random. From the largest finite bfloat16 on, numbers round to nearest, so that random bits
 * make no infinity. */
INLINE uint32_t bf16_code_random(float x, uint32_t r) {
    uint32_t b = to_bits(x);
    b += (b & 0x7fffffffu) >= 0x7f7f0000u ? 0x8000u : r & 0xffffu;
    return !NAN_SURVIVES && x != x ? 0x7fc00000u : b;
}

/* ---- float16: a number rounded to it, as a float ---- */

INLINE float f16_value(float x) {
    uint32_t b = to_bits(x) & 0x7fffffffu;
    uint32_t r = (b + 0x0fffu + ((b >> 13) & 1u)) & ~0x1fffu;
    r = b < (113u << 23) ? to_bits((from_bits(b) + 0.5f) - 0.5f) : r; /* a subnormal of float16 */
    r = r >= 0x47800000u ? 0x7f800000u : r;
    r = b >= 0x7f800000u ? b : r;
    return from_bits(r | (to_bits(x) & 0x80000000u));
}
INLINE float f16_value_random(float x, uint32_t r) {
    uint32_t b = to_bits(x) & 0x7fffffffu;
    const float lift = 0x1p-14f; /* A subnormal plus this has the last bit of the smallest normal numbers. */
    uint32_t lifted = b < (113u << 23) ? to_bits(from_bits(b) + lift) : b;
    uint32_t cut = (lifted + (lifted >= 0x477fe000u ? 0x1000u : r & 0x1fffu)) & ~0x1fffu;
    cut = b < (113u << 23) ? to_bits(from_bits(cut) - lift) : cut;
    cut = cut >= 0x47800000u ? 0x7f800000u : cut;
    cut = b >= 0x7f800000u ? b : cut;
    return from_bits(cut | (to_bits(x) & 0x80000000u));
}

/* A line is widened into a buffer before the loop over pairs, and narrowed behind it. x86 has instructions for whole
 * vectors of float16, with which an update takes half the time of integer arithmetic. These vectors are as wide as
 * those of the loop: processors do not forward narrow stores to wider loads. */
#if defined(NO_F16)
#elif defined(__AVX512F__)
INLINE const float *opened_f16(const uint16_t *at, float *room) {
    for (int i = 0; i < LINE; i += 16)
        _mm512_storeu_ps(room + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(at + i))));
    return room;
}
INLINE void close_f16(uint16_t *at, const float *room) {
    for (int i = 0; i < LINE; i += 16)
        _mm256_storeu_si256((__m256i *)(at + i), _mm512_cvtps_ph(_mm512_loadu_ps(room + i), 8 /* nearest */));
}
#elif defined(__F16C__)
INLINE const float *opened_f16(const uint16_t *at, float *room) {
    for (int i = 0; i < LINE; i += 8)
        _mm256_storeu_ps(room + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at + i))));
    return room;
}
INLINE void close_f16(uint16_t *at, const float *room) {
    for (int i = 0; i < LINE; i += 8)
        _mm_storeu_si128((__m128i *)(at + i), _mm256_cvtps_ph(_mm256_loadu_ps(room + i), 0 /* nearest */));
}
#else
INLINE const float *opened_f16(const uint16_t *at, float *room) {
    for (int i = 0; i < LINE; i++) {
        uint32_t code = at[i], b = (code & 0x7fffu) << 13;
        float subnormal = from_bits(b + (113u << 23)) - from_bits(113u << 23); /* without rounding */
        uint32_t magnitude = b + (b >= 0x0f800000u ? 224u << 23 : 112u << 23); /* not finite; or normal */
        magnitude = b < 0x00800000u ? to_bits(subnormal) : magnitude;
        room[i] = from_bits(magnitude | ((code & 0x8000u) << 16));
    }
    return room;
}
/* `room` holds numbers that float16 can represent. */
INLINE void close_f16(uint16_t *at, const float *room) {
    for (int i = 0; i < LINE; i++) {
        uint32_t b = to_bits(room[i]) & 0x7fffffffu;
        uint32_t subnormal = to_bits(from_bits(b) + 0.5f) - to_bits(0.5f); /* without rounding */
        uint32_t code = (b - (112u << 23)) >> 13;
        code = b < (113u << 23) ? subnormal : code;
        code = b == 0x7f800000u ? 0x7c00u : code;
        code = b > 0x7f800000u ? 0x7e00u : code;
        at[i] = (uint16_t)(code | (to_bits(room[i]) >> 16 & 0x8000u));
    }
}
#endif

/* ---- sums, in double ---- */

INLINE double total(const double *totals) {
    double sum = 0;
    for (int i = 0; i < LINE; i++) sum += totals[i];
    return sum;
}

#define PREFETCH(pointer, write) \
    for (int b = 0; b < LINE * (int)sizeof *(pointer); b += 64) \
        __builtin_prefetch((const char *)(pointer) + AHEAD + b, write)
