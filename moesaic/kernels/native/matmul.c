/* Every output is W sums over the inputs (lane i takes inputs i, i + W, i + 2W ...), added up in one tree, then the
   inputs that are left over: the same for any number of rows. Adding strictly in order, as libraries do for many rows,
   was tried: the weights have to be turned in registers, and one row then takes a third longer. */
#ifdef __AVX512F__
#define W 16
#endif
#include "matmul.h"

#define GROUP 96 /* rows that are taken at a time, so that they stay in a core's own cache */

/* W sums to one vector of their totals. */
INLINE vec totals(vec *sum) {
#if W == 16
    /* The same tree without turning the sums: two of them, or of their parts, are halved into one vector. */
#define HALVE(count)                                                                                                   \
    UNROLL for (int i = 0; i < count; i++)                                                                             \
        sum[i] = __builtin_shufflevector(sum[2 * i], sum[2 * i + 1], FIRST) +                                          \
                 __builtin_shufflevector(sum[2 * i], sum[2 * i + 1], SECOND)
#define FIRST 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define SECOND 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
    HALVE(8);
#undef FIRST
#undef SECOND
#define FIRST 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define SECOND 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
    HALVE(4);
#undef FIRST
#undef SECOND
#define FIRST 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29
#define SECOND 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31
    HALVE(2);
#undef FIRST
#undef SECOND
#define FIRST 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define SECOND 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
    HALVE(1);
#undef FIRST
#undef SECOND
#undef HALVE
#else
    transpose(sum);
    for (int half = W / 2; half; half /= 2) UNROLL for (int i = 0; i < half; i++) sum[i] += sum[i + half];
#endif
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

/* Outputs at..at+O (8, or a multiple of W) for R rows. Rows of weights past `last` do not exist: the last is repeated, in
   vain. One or two rows wait for memory, and it is read fastest as one stream, an output after the other; more rows
   wait for arithmetic, and every number loaded is used as often as there are registers, while the weights `after` this
   tile, if they come from memory, are asked for. */
INLINE void tile(int O, int R, const float *weights, long inputs, long last, long at, long outputs,
                 const float *const *rows, float *const *y, long offset, const float *next, int lines) {
    vec sum[32];
    const float *w[8], *x[4];
    UNROLL for (int o = 0; o < O; o++) w[o] = weights + (at + o < last ? at + o : last) * inputs;
    UNROLL for (int r = 0; r < R; r++) x[r] = rows[r];
    long k = 0;
    if (R == 1) UNROLL for (int o = 0; o < O; o++) k = add_up(1, R, w + o, x, inputs, sum + o, O, w[o] + 256, 1, 1);
    else if (R == 2 && O == 4) UNROLL for (int o = 0; o < O; o++) k = add_up(1, R, w + o, x, inputs, sum + o, O, x[0], 0, 0);
    else k = add_up(O, R, w, x, inputs, sum, O, next, lines, 0);
    UNROLL for (int i = O * R; i % W; i++) sum[i] = splat(0.0f);
    UNROLL for (int g = 0; g < O * R; g += W) { /* sums of one row, or, where W is 16, of two */
        vec total = totals(sum + g);
        for (long rest = k; rest < inputs; rest++) UNROLL for (int i = 0; i < W; i++)
            if (g + i < O * R) total[i] = __builtin_fmaf(w[(g + i) % O][rest], x[(g + i) / O][rest], total[i]);
        for (int part = 0; part < W && g + part < O * R; part += O) {
            float *to = y[(g + part) / O] + offset + (g + part) % O;
            long left = outputs - (g + part) % O;
            const int most = O < W ? O : W;
            if (left >= most) memcpy(to, (float *)&total + part, most * sizeof *to);
            else
                for (long i = 0; i < left; i++) to[i] = total[part + i];
        }
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
#if W == 16
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
