/* How far ahead of its elements a kernel asks for memory: bytes of each tensor.
 *
 * A processor's own prefetching stops at the end of each page of 4 KiB. If the distance is too small, memory comes too
 * late. If it is too large, memory has left the nearest cache before it is used. Measured: on an Intel Xeon, 4096 saves
 * a quarter of the time. On an AMD EPYC (Zen 4) a bf16 update takes 0.49 ns (nearest), 0.64 ns (stochastic) and 0.66 ns
 * (Kahan) an element with 4096, and 0.38, 0.59 and 0.58 ns with 512. An fp32 update takes 0.75 and 0.65 ns.
 * Programs of two to six fp32 tensors take up to 7 % less with 256 than with 512, and those of bf16 the same.
 */
#pragma once

#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
enum { AHEAD = 256 };
#else
enum { AHEAD = 4096 };
#endif
