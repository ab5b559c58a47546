/* Every output is W sums over the inputs (lane i takes inputs i, i + W, i + 2W ...), added up in one tree, then the
   inputs that are left over: the same for any number of rows. Adding strictly in order, as libraries do for many rows,
   was tried: the weights have to be turned in registers, and one row then takes a third longer. */
#ifdef __AVX512F__
#define W 16
#endif
#include "matmul.h"

#define STRETCH 1024 /* inputs that many rows are multiplied by before the next, so that weights stay in the nearest cache */

/* W sums, or with sixteen lanes also 8, to one vector of their totals. */
INLINE vec totals(const vec *low, const vec *high, int count) {
    vec sum[W];
    UNROLL for (int i = 0; i < count; i++) sum[i] = i < count / 2 ? low[i] : high[i - count / 2];
#if W == 16
    /* The same tree without turning the sums: two of them, or of their parts, are halved into one vector. What stays in
       its place is blended, which spares the one port that moves lanes. */
    int left = count;
#define HALVE(stay, ...)                                                                                               \
    left /= 2;                                                                                                         \
    UNROLL for (int i = 0; i < left; i++)                                                                              \
        sum[i] = (vec)_mm512_mask_blend_ps(stay, (__m512)sum[i + left], (__m512)sum[i]) +                              \
                 __builtin_shufflevector(sum[i], sum[i + left], __VA_ARGS__)
    HALVE(0x00ff, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
    HALVE(0x0f0f, 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    HALVE(0x3333, 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29);
    if (count == 8)
        return __builtin_shufflevector(sum[0], sum[0], 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14) +
               __builtin_shufflevector(sum[0], sum[0], 1, 3, 5, 7, 9, 11, 13, 15, 1, 3, 5, 7, 9, 11, 13, 15);
    HALVE(0x5555, 1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
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
    UNROLL for (int g = 0; g < O * R; g += W) { /* sums of one row, or, where W is 16, of two */
        const int count = O * R - g < W ? 8 : W;
        vec total = totals(sum + g, sum + g + count / 2, count);
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

#if W == 16
/* 8 outputs for three rows, over a stretch from..to of the inputs: on top of sums that are `held` from the stretch before, and
   held again until the last. Steps are unrolled because a loop's end that the processor does not see coming takes as long
   as the totals: with it, the next tile begins meanwhile. Weights from `next` on are asked for as in `add_up`. */
INLINE void wide_tile(const float *const *w, const float *const *x, float *const *y, long from, long to, long inputs,
                      vec *held, long offset, long count, const float *next, int lines) {
    vec sum[3][8];
    long k = from;
    if (from) UNROLL for (int r = 0; r < 3; r++) UNROLL for (int o = 0; o < 8; o++) sum[r][o] = held[r * 8 + o];
    else UNROLL for (int r = 0; r < 3; r++) UNROLL for (int o = 0; o < 8; o++) sum[r][o] = splat(0.0f);
#define STEP                                                                                                           \
    do {                                                                                                               \
        vec xs[3];                                                                                                     \
        UNROLL for (int i = 0; i < lines; i++) __builtin_prefetch(next + k * lines + i * 16, 0, 2);                    \
        UNROLL for (int r = 0; r < 3; r++) xs[r] = load(x[r] + k);                                                     \
        UNROLL for (int o = 0; o < 8; o++) {                                                                           \
            vec ws = load(w[o] + k);                                                                                   \
            UNROLL for (int r = 0; r < 3; r++) sum[r][o] = fused(sum[r][o], ws, xs[r]);                                \
        }                                                                                                              \
        k += W;                                                                                                        \
    } while (0)
    while (k + 4 * W <= to) UNROLL for (int i = 0; i < 4; i++) STEP;
    while (k + W <= to) STEP;
#undef STEP
    if (to < inputs) {
        UNROLL for (int r = 0; r < 3; r++) UNROLL for (int o = 0; o < 8; o++) held[r * 8 + o] = sum[r][o];
        return;
    }
    float found[2 * W];
    store(found, totals(sum[0], sum[1], 16)), store(found + W, totals(sum[2], sum[2] + 4, 8));
    for (; k < inputs; k++)
        for (int i = 0; i < 24; i++) found[i] = __builtin_fmaf(w[i % 8][k], x[i / 8][k], found[i]);
    for (int r = 0; r < 3; r++) {
        if (count >= 8) memcpy(y[r] + offset, found + r * 8, 8 * sizeof *found);
        else memcpy(y[r] + offset, found + r * 8, count * sizeof *found);
    }
}

/* The first rows, in threes, of which the rest are none, two or four: how many they were. */
static long wide_rows(const float *weights, long inputs, long last, long at, long outputs, const float *const *x,
                      float *const *y, long rows) {
    long done = rows % 3 != 1 ? rows / 3 * 3 : rows < 4 ? 0 : rows - 4;
    long parts = (inputs + STRETCH - 1) / STRETCH, stretch = ((inputs + parts - 1) / parts + W - 1) / W * W;
    vec held[8 * GROUP];
    for (long o = 0; o < outputs && done; o += 8)
        for (long from = 0; from < inputs; from += stretch) {
            const float *w[8], *next = weights + (at + o + 8) * inputs;
            long to = from + stretch < inputs ? from + stretch : inputs, t = 0;
            UNROLL for (int i = 0; i < 8; i++) w[i] = weights + (at + o + i < last ? at + o + i : last) * inputs;
#define TILE(next, lines) wide_tile(w, x + t, y + t, from, to, inputs, held + t * 8, o, outputs - o, next, lines)
            for (int part = 0; part < 8 && t < done; part += 2, t += 3) TILE(next + part * inputs, 2);
            for (; t < done; t += 3) TILE(w[0], 0);
#undef TILE
        }
    return done;
}
#endif

static void some_rows(const float *w, long inputs, long last, long at, long outputs, const float *const *x,
                      float *const *y, long rows) {
#define TILES(O, R, part, lines)                                                                                       \
    (tile(O, R, w, inputs, last, at + o, outputs - o, x + t, y + t, o, w + (at + o + O + part) * inputs, lines), t += R)
#if W == 4
    long O = rows <= 4 ? 4 : 8;
#else
    long O = 8;
#endif
    long done = 0;
#if W == 16
    done = wide_rows(w, inputs, last, at, outputs, x, y, rows);
    if (done == rows) return;
#endif
    for (long o = 0; o < outputs; o += O) {
        long t = done;
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
