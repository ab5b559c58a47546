/* Every output is W sums over the inputs (lane i takes inputs i, i + W, i + 2W ...), added up in one tree, then the
   inputs that are left over: the same for any number of rows. Adding strictly in order, as libraries do for many rows,
   was tried: the weights have to be turned in registers, and one row then takes a third longer. */
#include "matmul.h"

#define GROUP 96 /* rows that are taken at a time, so that they stay in a core's own cache */

/* W sums to one vector of their totals. */
INLINE vec totals(vec *sum) {
    transpose(sum);
    for (int half = W / 2; half; half /= 2) UNROLL for (int i = 0; i < half; i++) sum[i] += sum[i + half];
    return sum[0];
}

/* The sums of O outputs for R rows, those of a row `stride` apart, over inputs in whole vectors; how many those were.
   While it works, `lines` cache lines for every sixteen inputs are asked for from `next` on, near or nearest. */
INLINE long add_up(int O, int R, const float *const *w, const float *const *x, long inputs, vec *to, int stride,
                   const float *next, int lines, int nearest) {
    vec sum[24];
    UNROLL for (int i = 0; i < O * R; i++) sum[i] = splat(0.0f);
    long k = 0;
    for (; k + 16 <= inputs; k += 16) {
        UNROLL for (int i = 0; i < lines; i++) {
            if (nearest) __builtin_prefetch(next + k * lines + i * 16, 0, 3);
            else __builtin_prefetch(next + k * lines + i * 16, 0, 2);
        }
        UNROLL for (int s = 0; s < 16; s += W) {
            vec xs[4];
            UNROLL for (int r = 0; r < R; r++) xs[r] = load(x[r] + k + s);
            UNROLL for (int o = 0; o < O; o++) {
                vec ws = load(w[o] + k + s);
                UNROLL for (int r = 0; r < R; r++) sum[r * O + o] = fused(sum[r * O + o], ws, xs[r]);
            }
        }
    }
    for (; k + W <= inputs; k += W) UNROLL for (int o = 0; o < O; o++) UNROLL for (int r = 0; r < R; r++)
        sum[r * O + o] = fused(sum[r * O + o], load(w[o] + k), load(x[r] + k));
    UNROLL for (int o = 0; o < O; o++) UNROLL for (int r = 0; r < R; r++) to[r * stride + o] = sum[r * O + o];
    return k;
}

/* Outputs at..at+O (a multiple of W) for R rows. Rows of weights past `last` do not exist: the last is repeated, in
   vain. One or two rows wait for memory, and it is read fastest as one stream, an output after the other; more rows
   wait for arithmetic, and every number loaded is used as often as there are registers, while the weights `after` this
   tile, if they come from memory, are asked for. */
INLINE void tile(int O, int R, const float *weights, long inputs, long last, long at, long outputs,
                 const float *const *rows, float *const *y, long offset, const float *next, int lines) {
    vec sum[24];
    const float *w[8], *x[4];
    UNROLL for (int o = 0; o < O; o++) w[o] = weights + (at + o < last ? at + o : last) * inputs;
    UNROLL for (int r = 0; r < R; r++) x[r] = rows[r];
    long k = 0;
    if (R == 1) UNROLL for (int o = 0; o < O; o++) k = add_up(1, R, w + o, x, inputs, sum + o, O, w[o] + 256, 1, 1);
    else if (R == 2 && O == 4) UNROLL for (int o = 0; o < O; o++) k = add_up(1, R, w + o, x, inputs, sum + o, O, x[0], 0, 0);
    else k = add_up(O, R, w, x, inputs, sum, O, next, lines, 0);
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int g = 0; g < O; g += W) {
        vec total = totals(sum + r * O + g);
        for (long rest = k; rest < inputs; rest++) UNROLL for (int i = 0; i < W; i++)
            total[i] = __builtin_fmaf(w[g + i][rest], x[r][rest], total[i]);
        float *to = y[r] + offset + g;
        if (outputs - g >= W) store(to, total);
        else
            for (long i = 0; i < outputs - g; i++) to[i] = total[i];
    }
}

static void some_rows(const float *w, long inputs, long last, long at, long outputs, const float *const *x,
                      float *const *y, long rows) {
#define TILES(O, R, part, lines)                                                                                       \
    (tile(O, R, w, inputs, last, at + o, outputs - o, x + t, y + t, o, w + (at + o + O + part) * inputs, lines), t += R)
#if W == 4
    long O = rows <= 4 ? 4 : 8;
#else
    long O = 8;
#endif
    for (long o = 0; o < outputs; o += O) {
        long t = 0;
#if W == 4
        if (rows == 4) TILES(4, 4, 0, 4);
        else if (rows == 3) TILES(4, 3, 0, 4);
        else if (rows == 2) TILES(4, 2, 0, 0);
        else if (rows == 1) TILES(4, 1, 0, 0);
        else if (rows < 6) TILES(8, 3, 0, 8);
        else if (rows < 12)
            for (int part = 0; part < 8; part += 4) TILES(8, 3, part, 4);
        else
            for (int part = 0; part < 8; part += 2) TILES(8, 3, part, 2);
        while (rows - t > 4 || rows - t == 3) TILES(8, 3, 0, 0);
#endif
        while (rows - t >= 2) TILES(8, 2, 0, 0);
        if (t < rows) TILES(8, 1, 0, 0);
    }
#undef TILES
}

void matmul(const float *w, long inputs, long last, long at, long outputs, const float *const *x, float *const *y,
             long rows) {
    for (long t = 0; t < rows; t += GROUP)
        some_rows(w, inputs, last, at, outputs, x + t, y + t, rows - t < GROUP ? rows - t : GROUP);
}
