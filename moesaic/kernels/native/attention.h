/* The two products of attention for a few queries and a block of keys: scores, and sums of weighed values. */
#pragma once

#include "vector.h"

#define B 64 /* keys in a block; blocks begin at its multiples */

#if W <= 8
/* Scores of R queries against W keys. */
INLINE void score(int R, const float *const *q, const float *const *k, long C, float *to, float scale) {
    vec sum[4 * W];
    UNROLL for (int i = 0; i < R * W; i++) sum[i] = splat(0.0f);
    long c = 0;
    for (; c + W <= C; c += W) {
        vec ks[W];
        UNROLL for (int j = 0; j < W; j++) ks[j] = load(k[j] + c);
        UNROLL for (int r = 0; r < R; r++) {
            vec qs = load(q[r] + c);
            UNROLL for (int j = 0; j < W; j++) sum[r * W + j] = fused(sum[r * W + j], qs, ks[j]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        vec *m = sum + r * W;
        transpose(m);
        for (int half = W / 2; half; half /= 2) UNROLL for (int i = 0; i < half; i++) m[i] += m[i + half];
        for (long rest = c; rest < C; rest++) UNROLL for (int j = 0; j < W; j++) m[0][j] += q[r][rest] * k[j][rest];
        store(to + r * B, m[0] * splat(scale));
    }
}

/* Scores of R (at most 4) queries against keys begin..count; those of one query are B apart from the next's. */
static void scores(int R, const float *const *q, const float *const *k, long C, long begin, long count, float *to,
                   float scale) {
    for (long m = begin / W * W; m < count; m += W) {
        if (R == 4) score(4, q, k + m, C, to + m, scale);
        else if (R == 3) score(3, q, k + m, C, to + m, scale);
        else if (R == 2) score(2, q, k + m, C, to + m, scale);
        else score(1, q, k + m, C, to + m, scale);
    }
}
#endif

/* Adds keys begin..end's values, weighed, to V vectors of R queries: p[r * row + m * column] is what m counts to r. */
INLINE void weigh(int R, int V, const float *p, long row, long column, const float *const *v, long begin, long end,
                  float *const *o, long at) {
    vec sum[16];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < V; i++) sum[r * V + i] = load(o[r] + at + i * W);
    for (long m = begin; m < end; m++) UNROLL for (int i = 0; i < V; i++) {
        vec values = load(v[m] + at + i * W);
        UNROLL for (int r = 0; r < R; r++) sum[r * V + i] = fused(sum[r * V + i], values, splat(p[r * row + m * column]));
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < V; i++) store(o[r] + at + i * W, sum[r * V + i]);
}

/* The same for the whole width of R (at most 4) queries. */
static void weigh_all(int R, const float *p, long row, long column, const float *const *v, long begin, long end,
                      float *const *o, long width) {
    long at = 0;
    for (; at + 4 * W <= width; at += 4 * W) {
        if (R == 4) weigh(4, 4, p, row, column, v, begin, end, o, at);
        else if (R == 3) weigh(3, 4, p, row, column, v, begin, end, o, at);
        else if (R == 2) weigh(2, 4, p, row, column, v, begin, end, o, at);
        else weigh(1, 4, p, row, column, v, begin, end, o, at);
    }
    for (; at + W <= width; at += W)
        for (long r = 0; r < R; r++) weigh(1, 1, p + r * row, row, column, v, begin, end, o + r, at);
    for (; at < width; at++)
        for (long r = 0; r < R; r++)
            for (long m = begin; m < end; m++) o[r][at] += p[r * row + m * column] * v[m][at];
}
