/* Random bits from a counter, with the bits of zerofn/kernels/rounding.py. */
#pragma once
#include <stdint.h>

#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#endif

typedef struct { uint32_t k0, k1; } stream;

INLINE uint32_t mix(uint32_t x) {
    x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; return x ^ (x >> 16);
}

static inline uint32_t lane(uint32_t h, uint64_t seed, uint64_t step, uint64_t key, uint32_t block, uint32_t number) {
    const uint32_t words[8] = {seed, seed >> 32, step, step >> 32, key, key >> 32, block, number};
    for (int i = 0; i < 8; i++) h = mix(h ^ words[i]) + 0x9e3779b9u;
    return h;
}

/* The stream of a leaf from its element `index` on, up to the next multiple of 2**32 elements. */
static inline stream stream_of(uint64_t seed, uint64_t step, uint64_t key, uint64_t index, uint32_t number) {
    uint32_t block = index >> 32;
    stream s = {lane(0x243f6a88u, seed, step, key, block, number), lane(0x85a308d3u, seed, step, key, block, number)};
    s.k0 += (uint32_t)index * ZF_STRIDE;
    return s;
}

INLINE uint32_t draw(uint32_t counter, uint32_t k1) {
    uint32_t x = counter;
    x ^= x >> 16; x *= 0x7feb352du; x += k1; x ^= x >> 15; x *= 0x846ca68bu; return x ^ (x >> 16);
}
