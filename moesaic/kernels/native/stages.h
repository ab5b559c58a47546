/* What a layer is made of, as stages that every thread of a team enters. Whoever reads what a stage wrote meets first. */
#pragma once

#include "team.h"
#include "vector.h"

/* y = x w' + bias (+ plus, rows as y's). */
void linear_stage(Member *m, const float *x, const float *w, const float *bias, const float *plus, float *y, long rows,
                  long inputs, long outputs, long x_stride);

typedef struct Retained Retained;

typedef struct {
    const float *q, *k, *v; /* of the new tokens, or of all where nothing is paged */
    float *keys, *values;   /* slabs of the cache (pages, page_size, N, C), or NULL */
    float *out;
    float *sums;          /* (T, H): the logarithm of each query's softmax sum, for the way back, or NULL */
    const int64_t *spans; /* (S, 4): first and last+1 row of the batch, tokens before them, first row in k and v */
    const int64_t *table; /* (S, columns): pages */
    const int64_t *masks; /* (S): address of a mask (new, total) of bytes, or 0 */
    long S, columns, page_size, q_stride, k_stride, v_stride, H, N, C, X, window;
    float scale;
    /* `window` is how far back a token sees, 0 for all; below 0 it is the size of chunks. */
    int both_ways; /* an encoder: as far ahead as back */
    const float *sinks; /* (H): a score of no token in every head's softmax, or NULL */
    const Retained *retained; /* (S): of compact requests, whose keys and values are not in pages of their own; or NULL */
} Attention;

/* The row of the cache for a place of sequence s. */
INLINE long page_row(const Attention *a, long s, long place) {
    return a->table[s * a->columns + place / a->page_size] * a->page_size + place % a->page_size;
}

/* Every token attends to its own sequence so far; keys and values are where they belong. */
void attend_stage(Member *m, const Attention *a);

/* The same for compact requests (`retained.h`). */
void retained_stage(Member *m, const Attention *a);

/* Two stages with a meeting between; y = the experts' weighted sum (+ shared) (+ plus); `bias` (E, 2F) or NULL comes
   before the gate, which may be the clamped one; `hidden` has room for tokens * K * F. */
void experts_stage(Member *m, const float *x, const int64_t *routes, const float *weights, const float *gate_up,
                   const float *down, const float *bias, const float *shared, const float *plus, float *y,
                   float *hidden, long tokens, long D, long F, long E, long K, int clamped);

void norm_row(const float *x, const float *weight, float *y, long size, float eps);

/* One head: normed if there is a weight, then turned by the token's angles. */
void head_row(const float *from, const float *weight, float *to, const float *cosine, const float *sine, long R, long C,
              float eps, int interleaved);

/* One token's router logits to its experts and their weights; with `replayed`, the experts are given. */
void route_row(const float *logits, const float *correction, int64_t *chosen, float *weights, long E, long K,
               long groups, long top_groups, int softmax, int normalize, float scale, int replayed);
