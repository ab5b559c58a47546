/* Products of many rows with a matrix that was packed once: panels of NR outputs, in which the NR weights of one input
   lie side by side. Sums run over the inputs in order, one fused multiply-add each, so a row's result is the same
   wherever in a tile it stands. */
#pragma once

#include "vector.h"

#ifdef __aarch64__
#include <arm_neon.h>
#define MR 8
#define NR 12
#elif defined(__AVX512F__)
#define LANES 16
#define MR 12
#define NR 32
#else
#define LANES 8
#define MR 6
#define NR 16
#endif

#define DEPTH 384     /* inputs whose weights, of one panel, stay in the nearest cache */
#define TILE_ROWS 48  /* rows that go through a layer together; a multiple of MR */

/* Numbers that a packed matrix takes. */
INLINE long packed_size(long outputs, long inputs) { return (outputs + NR - 1) / NR * NR * inputs; }

/* A tile of MR rows and NR outputs: `start` (rows start_stride apart, or NULL for zeros) added to sums over `depth`
   inputs, of which the MR numbers of `a`, a_step apart from the next ones, and the NR of `b` lie side by side. Meanwhile
   `next` is fetched, 16 numbers an input: what the weights of a tile after this begin with, or anything that is near. */
void micro(const float *a, long a_step, const float *b, long depth, const float *start, long start_stride, float *to,
           long to_stride, const float *next);

/* The same for as many rows as MR leaves of NR: where the rows are the columns of such a tile. */
void micro_rest(const float *a, long a_step, const float *b, long depth, const float *start, long start_stride,
                float *to, long to_stride);

/* y[t][o] = bias[o] + sum over i of x[t][i] * w[o][i], for at most TILE_ROWS rows. `panel` has room for
   TILE_ROWS * DEPTH numbers. Rows of y lie y_stride apart. */
void packed_matmul(const float *x, long x_stride, const float *w, const float *bias, float *y, long y_stride, long rows,
                   long inputs, long outputs, float *panel);
