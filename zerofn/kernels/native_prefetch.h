/* How far ahead of its elements a kernel asks for memory: bytes of each tensor.
 *
 * A processor's own prefetching stops at the end of each page of 4 KiB. Too near, and the memory comes late; too far,
 * and it has left the nearest cache again. Measured: on an Intel Xeon 4096 save a quarter of the time. On an AMD EPYC
 * (Zen 4) bf16 updates take 0.49, 0.64 and 0.66 ns an element with 4096 (nearest, stochastic, Kahan), and 0.38, 0.59
 * and 0.58 with 512; fp32 takes 0.75 and 0.65.
 */
#pragma once

#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
enum { AHEAD = 512 };
#else
enum { AHEAD = 4096 };
#endif
