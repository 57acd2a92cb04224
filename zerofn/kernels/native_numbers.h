/* Loads numbers of 4 and 2 bytes as float, rounds them and stores them. ZF_P, ZF_G, ZF_M and ZF_V are dtypes.
 *
 * bfloat16 is converted by integer arithmetic, since the vector instructions for it flush subnormals to zero.
 */
#pragma once
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pairs of 16-bit numbers are read as little-endian words"
#endif

#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#endif
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
#define AT(pointer, dtype, i) ((pointer) + (int64_t)(i) * BYTES(dtype))

/* If all inputs are bfloat16, the low half of a NaN is zero, so rounding cannot carry into the sign bit. */
enum { NAN_SURVIVES = IS_BF16(ZF_P) && IS_BF16(ZF_G) && IS_BF16(ZF_M) && IS_BF16(ZF_V) };

INLINE uint32_t to_bits(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
INLINE float from_bits(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

/* ---- two neighbours at a time ----
 * To split a word into two 16-bit numbers, or to join two, takes half the instructions of widening or narrowing
 * vectors. A "code" is the bits of the float to store. bfloat16 stores the high half, and the low half is arbitrary.
 * Words may have addresses that are odd multiples of two bytes. */

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

/* ---- rounding to a code; the low 16 bits of `r` are random ---- */

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
    /* From the largest finite bfloat16 on, numbers round to nearest, so that random bits make no infinity. */
    b += (b & 0x7fffffffu) >= 0x7f7f0000u ? 0x8000u : r & 0xffffu;
    return !NAN_SURVIVES && x != x ? 0x7fc00000u : b;
}
INLINE float value_bf16(uint32_t code) { return from_bits(code & 0xffff0000u); }

INLINE float value_f16(uint32_t code) { return from_bits(code); }
INLINE uint32_t nearest_f16(float x) {
    uint32_t b = to_bits(x) & 0x7fffffffu;
    uint32_t r = (b + 0x0fffu + ((b >> 13) & 1u)) & ~0x1fffu;
    r = b < (113u << 23) ? to_bits((from_bits(b) + 0.5f) - 0.5f) : r; /* a subnormal of float16 */
    r = r >= 0x47800000u ? 0x7f800000u : r;
    r = b >= 0x7f800000u ? b : r;
    return r | (to_bits(x) & 0x80000000u);
}
INLINE uint32_t stochastic_f16(float x, uint32_t r) {
    uint32_t b = to_bits(x) & 0x7fffffffu;
    const float lift = 0x1p-14f; /* A subnormal plus this has the last bit of the smallest normal numbers. */
    uint32_t lifted = b < (113u << 23) ? to_bits(from_bits(b) + lift) : b;
    uint32_t cut = (lifted + (lifted >= 0x477fe000u ? 0x1000u : r & 0x1fffu)) & ~0x1fffu;
    cut = b < (113u << 23) ? to_bits(from_bits(cut) - lift) : cut;
    cut = cut >= 0x47800000u ? 0x7f800000u : cut;
    cut = b >= 0x7f800000u ? b : cut;
    return cut | (to_bits(x) & 0x80000000u);
}

/* ---- a line of 32 numbers, loaded and stored in pairs ----
 * float16 is widened into a buffer before the loop over pairs, and narrowed after it. x86 has instructions for whole
 * vectors of float16, with which an update takes half the time of integer arithmetic. */

enum { LINE = 32 };

#define AS_f32 f32
#define AS_bf16 bf16
#define AS_f16 f32
#define LOAD2(dtype) PASTE(load2_, PASTE(AS_, dtype))
#define STORE2(dtype) PASTE(store2_, PASTE(AS_, dtype))
#define IN(opened, dtype, i) AT(opened, PASTE(AS_, dtype), i)

/* opened_ returns the address from which the numbers of a line are read. output_ returns the address for new ones.
 * close_ stores the new ones if that address is a buffer. */
INLINE const char *opened_f32(const char *at, float *room) { (void)room; return at; }
INLINE const char *opened_bf16(const char *at, float *room) { (void)room; return at; }
INLINE char *output_f32(char *at, float *room) { (void)room; return at; }
INLINE char *output_bf16(char *at, float *room) { (void)room; return at; }
INLINE char *output_f16(char *at, float *room) { (void)at; return (char *)room; }
INLINE void close_f32(char *at, const float *room) { (void)at; (void)room; }
INLINE void close_bf16(char *at, const float *room) { (void)at; (void)room; }

/* These vectors are as wide as those of the loop: processors do not forward narrow stores to wider loads. */
#if defined(__AVX512F__)
INLINE const char *opened_f16(const char *at, float *room) {
    for (int i = 0; i < LINE; i += 16)
        _mm512_storeu_ps(room + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(at + 2 * i))));
    return (const char *)room;
}
INLINE void close_f16(char *at, const float *room) {
    for (int i = 0; i < LINE; i += 16)
        _mm256_storeu_si256((__m256i *)(at + 2 * i), _mm512_cvtps_ph(_mm512_loadu_ps(room + i), 8 /* nearest */));
}
#elif defined(__F16C__)
INLINE const char *opened_f16(const char *at, float *room) {
    for (int i = 0; i < LINE; i += 8)
        _mm256_storeu_ps(room + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at + 2 * i))));
    return (const char *)room;
}
INLINE void close_f16(char *at, const float *room) {
    for (int i = 0; i < LINE; i += 8)
        _mm_storeu_si128((__m128i *)(at + 2 * i), _mm256_cvtps_ph(_mm256_loadu_ps(room + i), 0 /* nearest */));
}
#else
INLINE const char *opened_f16(const char *at, float *room) {
    for (int i = 0; i < LINE; i++) {
        uint16_t code;
        memcpy(&code, at + 2 * i, 2);
        uint32_t b = (code & 0x7fffu) << 13;
        float subnormal = from_bits(b + (113u << 23)) - from_bits(113u << 23); /* without rounding */
        uint32_t magnitude = b + (b >= 0x0f800000u ? 224u << 23 : 112u << 23); /* not finite; or normal */
        magnitude = b < 0x00800000u ? to_bits(subnormal) : magnitude;
        room[i] = from_bits(magnitude | ((code & 0x8000u) << 16));
    }
    return (const char *)room;
}
/* `room` holds numbers that float16 can represent. */
INLINE void close_f16(char *at, const float *room) {
    for (int i = 0; i < LINE; i++) {
        uint32_t b = to_bits(room[i]) & 0x7fffffffu;
        uint32_t subnormal = to_bits(from_bits(b) + 0.5f) - to_bits(0.5f); /* without rounding */
        uint32_t code = (b - (112u << 23)) >> 13;
        code = b < (113u << 23) ? subnormal : code;
        code = b == 0x7f800000u ? 0x7c00u : code;
        code = b > 0x7f800000u ? 0x7e00u : code;
        uint16_t narrow = (uint16_t)(code | (to_bits(room[i]) >> 16 & 0x8000u));
        memcpy(at + 2 * i, &narrow, 2);
    }
}
#endif

/* The numbers of a line, in the order that is cheapest to load. */
INLINE const float *floats_f32(const char *at, float *room) { (void)room; return (const float *)at; }
INLINE const float *floats_f16(const char *at, float *room) { return (const float *)opened_f16(at, room); }
INLINE const float *floats_bf16(const char *at, float *room) {
    for (int i = 0; i < LINE / 2; i++) load2_bf16(at + 4 * i, room + i, room + LINE / 2 + i);
    return room;
}
