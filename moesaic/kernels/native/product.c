/* Every output is one chain of fused multiply-adds over the inputs, from zero, in order: the order of the common
   libraries' large products, so the bits are those, too, whatever the number of rows. W outputs share a vector; the
   weights are turned W x W in registers, which costs less than reading them from memory. */
#include "product.h"

#define PACKED_ROWS 6 /* from how many rows on it pays to turn the weights first */
#ifndef NEAR
#define NEAR 64 /* floats of each row to bring close before they are needed */
#define FAR 1
#endif

#if W == 4
#define LANE(memory, loaded, i) (loaded)[i] /* multiplying by one lane of a register is free here, */
#else
#define LANE(memory, loaded, i) (memory)[i] /* and by a number from memory there */
#endif

/* One step of W inputs, for G groups of W outputs and R rows. Sums take turns, so that none waits for itself. */
INLINE void step(int G, int R, vec *sum, const float *const *w, const float *const *x, long k) {
    vec m[BLOCK], xs[4];
    UNROLL for (int r = 0; r < R; r++) xs[r] = load(x[r] + k);
    UNROLL for (int i = 0; i < G * W; i++) m[i] = load(w[i] + k);
    UNROLL for (int g = 0; g < G; g++) transpose(m + g * W);
    UNROLL for (int i = 0; i < W; i++) UNROLL for (int g = 0; g < G; g++) UNROLL for (int r = 0; r < R; r++)
        sum[g * R + r] += m[g * W + i] * LANE(x[r] + k, xs[r], i);
}

INLINE void put(float *to, vec sums, long outputs) {
    if (outputs >= W) store(to, sums);
    else
        for (long i = 0; i < outputs; i++) to[i] = sums[i];
}

/* Few rows: outputs at..at+G*W for R of them, the weights turned as they come. Rows of weights past `last` do not
   exist: the last is repeated, in vain. */
INLINE void tile(int G, int R, const float *weights, long inputs, long last, long at, long outputs,
                 const float *const *rows, float *const *y, long offset) {
    vec sum[BLOCK];
    const float *w[BLOCK], *x[4], *next = weights + (at + BLOCK) * inputs;
    UNROLL for (int i = 0; i < G * W; i++) w[i] = weights + (at + i < last ? at + i : last) * inputs;
    UNROLL for (int r = 0; r < R; r++) x[r] = rows[r];
    UNROLL for (int i = 0; i < G * R; i++) sum[i] = splat(0.0f);
    long k = 0;
    for (; k + 16 <= inputs; k += 16) {
        if (FAR) UNROLL for (int i = 0; i < G * W; i++) __builtin_prefetch(next + k * G * W + i * 16, 0, FAR + 1);
        if (NEAR) UNROLL for (int i = 0; i < G * W; i++) __builtin_prefetch(w[i] + k + NEAR);
        UNROLL for (int s = 0; s < 16; s += W) step(G, R, sum, w, x, k + s);
    }
    for (; k + W <= inputs; k += W) step(G, R, sum, w, x, k);
    for (; k < inputs; k++)
        UNROLL for (int g = 0; g < G; g++) {
            vec m;
            UNROLL for (int i = 0; i < W; i++) m[i] = w[g * W + i][k];
            UNROLL for (int r = 0; r < R; r++) sum[g * R + r] += m * x[r][k];
        }
    UNROLL for (int g = 0; g < G; g++) UNROLL for (int r = 0; r < R; r++)
        put(y[r] + offset + g * W, sum[g * R + r], outputs - g * W);
}

/* Many rows: the weights of 2W outputs are turned once into `packed` (inputs x 2W), and then met by all rows. */
static void pack(const float *weights, long inputs, long last, long at, float *packed) {
    const float *w[2 * W];
    for (int i = 0; i < 2 * W; i++) w[i] = weights + (at + i < last ? at + i : last) * inputs;
    long k = 0;
    for (; k + W <= inputs; k += W) UNROLL for (int g = 0; g < 2; g++) {
        vec m[W];
        UNROLL for (int i = 0; i < W; i++) m[i] = load(w[g * W + i] + k);
        transpose(m);
        UNROLL for (int i = 0; i < W; i++) store(packed + (k + i) * 2 * W + g * W, m[i]);
    }
    for (; k < inputs; k++)
        for (int i = 0; i < 2 * W; i++) packed[k * 2 * W + i] = w[i][k];
}

INLINE void packed_tile(int R, const float *packed, long inputs, long outputs, const float *const *rows,
                        float *const *y, long offset) {
    vec sum[16];
    const float *x[8];
    UNROLL for (int r = 0; r < R; r++) x[r] = rows[r];
    UNROLL for (int i = 0; i < 2 * R; i++) sum[i] = splat(0.0f);
    long k = 0;
#if W == 4
    for (; k + W <= inputs; k += W) {
        vec xs[8];
        UNROLL for (int r = 0; r < R; r++) xs[r] = load(x[r] + k);
        UNROLL for (int i = 0; i < W; i++) {
            vec low = load(packed + (k + i) * 2 * W), high = load(packed + (k + i) * 2 * W + W);
            UNROLL for (int r = 0; r < R; r++) sum[r] += low * xs[r][i];
            UNROLL for (int r = 0; r < R; r++) sum[R + r] += high * xs[r][i];
        }
    }
#endif
    for (; k < inputs; k++) {
        vec low = load(packed + k * 2 * W), high = load(packed + k * 2 * W + W);
        UNROLL for (int r = 0; r < R; r++) sum[r] += low * x[r][k];
        UNROLL for (int r = 0; r < R; r++) sum[R + r] += high * x[r][k];
    }
    UNROLL for (int r = 0; r < R; r++) {
        put(y[r] + offset, sum[r], outputs);
        put(y[r] + offset + W, sum[R + r], outputs - W);
    }
}

void product(const float *w, long inputs, long last, long at, long outputs, const float *const *x, float *const *y,
             long rows, float *packed) {
    long t = 0;
    if (rows >= PACKED_ROWS)
        for (long o = 0; o < outputs; o += 2 * W) {
            pack(w, inputs, last, at + o, packed);
            for (t = 0; t + 8 <= rows; t += 8) packed_tile(8, packed, inputs, outputs - o, x + t, y + t, o);
            if (t + 4 <= rows) packed_tile(4, packed, inputs, outputs - o, x + t, y + t, o), t += 4;
            if (t + 2 <= rows) packed_tile(2, packed, inputs, outputs - o, x + t, y + t, o), t += 2;
            if (t < rows) packed_tile(1, packed, inputs, outputs - o, x + t, y + t, o);
        }
    else
        while (t < rows) {
            long left = rows - t;
#define TILES(G, R)                                                                                                    \
    do {                                                                                                               \
        for (long o = 0; o < outputs; o += (G) * W)                                                                    \
            tile(G, R, w, inputs, last, at + o, outputs - o, x + t, y + t, o);                                         \
        t += R;                                                                                                        \
    } while (0)
            if (left >= 4) TILES(2, 4);
            else if (left >= 3) TILES(2, 3);
            else if (left >= 2) TILES(2, 2);
            else TILES(BLOCK / W, 1);
#undef TILES
        }
}
