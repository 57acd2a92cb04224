/* Joins a bf16 number and a residual to a master of 24 bits, and splits it, with the bits of zerofn/kernels/masters.py.
 *
 * masters.c includes this file, and so do the updates of masters.
 */
#pragma once
#include <stdint.h>
#include <string.h>

#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#endif

INLINE float joined_bits(uint16_t p, int8_t residual) {
    uint32_t bits = (uint32_t)p << 16, size = bits & 0x7fffffffu;
    float x;
    int usual = size - 1 < 0x7f7fffffu; /* `p` is neither zero nor infinite nor NaN. */
    bits += (uint32_t)(usual ? (int32_t)residual : 0) << 8;
    memcpy(&x, &bits, 4);
    return x;
}

/* `x` rounded to its first 24 bits. The bf16 number and the residual are made of these. */
INLINE int32_t first_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    int32_t found = (int32_t)(bits + 0x7fu + (bits >> 8 & 1u)) >> 8;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc000 : found;
}

INLINE uint16_t bf16_of(int32_t first) { return (uint16_t)((first + 0x80) >> 8); }
INLINE int8_t residual_of(int32_t first) { return (int8_t)(first - (int32_t)((uint32_t)((first + 0x80) >> 8) << 8)); }

INLINE float joined(float p, int8_t residual) {
    uint32_t bits;
    memcpy(&bits, &p, 4);
    return joined_bits((uint16_t)(bits >> 16), residual);
}
INLINE int8_t residual(float x) { return residual_of(first_bits(x)); }
