/* Every output is W sums over the inputs (lane i takes inputs i, i + W, i + 2W ...), added up in one tree, then the
   inputs that are left over: the same for any number of rows. Adding strictly in order, as libraries do for many rows,
   was tried: the weights have to be turned in registers, and one row then takes a third longer. */
#include "product.h"

/* W sums to one vector of their totals. */
INLINE vec totals(vec *sum) {
    transpose(sum);
    for (int half = W / 2; half; half /= 2) UNROLL for (int i = 0; i < half; i++) sum[i] += sum[i + half];
    return sum[0];
}

/* Outputs at..at+O (a multiple of W) for R rows. Rows of weights past `last` do not exist: the last is repeated, in
   vain. */
INLINE void tile(int O, int R, const float *weights, long inputs, long last, long at, long outputs,
                 const float *const *rows, float *const *y, long offset) {
    vec sum[16];
    const float *w[8], *x[4];
    /* The rows of weights lie one behind the other, so what comes after this tile is asked for as one stream. */
    const float *next = weights + (at + O) * inputs;
    UNROLL for (int o = 0; o < O; o++) w[o] = weights + (at + o < last ? at + o : last) * inputs;
    UNROLL for (int r = 0; r < R; r++) x[r] = rows[r];
    UNROLL for (int i = 0; i < O * R; i++) sum[i] = splat(0.0f);
    long k = 0;
    for (; k + 16 <= inputs; k += 16) {
        UNROLL for (int o = 0; o < O; o++) __builtin_prefetch(next + k * O + o * 16, 0, 2);
        for (int s = 0; s < 16; s += W) {
            vec xs[4];
            UNROLL for (int r = 0; r < R; r++) xs[r] = load(x[r] + k + s);
            UNROLL for (int o = 0; o < O; o++) {
                vec ws = load(w[o] + k + s);
                UNROLL for (int r = 0; r < R; r++) sum[r * O + o] += ws * xs[r];
            }
        }
    }
    for (; k + W <= inputs; k += W) UNROLL for (int o = 0; o < O; o++) UNROLL for (int r = 0; r < R; r++)
        sum[r * O + o] += load(w[o] + k) * load(x[r] + k);
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

void product(const float *w, long inputs, long last, long at, long outputs, const float *const *x, float *const *y,
             long rows) {
    for (long t = 0; t < rows;) {
        long left = rows - t;
#define TILES(O, R)                                                                                                    \
    do {                                                                                                               \
        for (long o = 0; o < outputs; o += O)                                                                          \
            tile(O, R, w, inputs, last, at + o, outputs - o, x + t, y + t, o);                                         \
        t += R;                                                                                                        \
    } while (0)
#if W == 4
        if (left >= 4) TILES(4, 4);
        else if (left >= 3) TILES(4, 3);
        else
#endif
        if (left >= 2) TILES(8, 2);
        else TILES(8, 1);
#undef TILES
    }
}
