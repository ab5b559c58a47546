/* All layers of an encoder over a flat batch of whole sequences, without a cache.

   Sequences meet only their own, so threads take runs of sequences through all layers without waiting for each other;
   where there are fewer runs than threads, they share the rows of one. Either way every number is made by the same
   operations in the same order: a text's hidden states do not depend on what is in its batch, nor on the threads. */
#ifdef __AVX512F__
#define W 16
#endif
#include "bytes.h"
#include "packed.h"
#include "stages.h"

#define RUN 128 /* tokens of a run, about: what a layer makes of them stays in a core's own cache */

enum { GELU, GELU_TANH, SILU, RELU, TANH };

typedef struct {
    const void *qkv; /* matrices are packed floats, or where they are rounded to 8 bits, a Matrix each */
    const float *qkv_bias;
    const void *out;
    const float *out_bias;
    const void *up;
    const float *up_bias;
    const void *down;
    const float *down_bias, *attention_norm, *attention_norm_bias, *ffn_norm, *ffn_norm_bias;
    const float *cosine, *sine; /* of every token, (T, R), or NULL */
    long D, H, C, F, R, window, interleaved, gated, norm_after, activation;
    long rounded; /* 1: to tiles of 8 bits, 2: to panels of bytes.h */
    float eps, scale;
} EncoderLayer;

/* erf to within 3e-7: x P(x^2) / Q(x^2), fitted to the least relative error up to 3.9, where float ends. */
INLINE vec verf(vec x) {
    vec z = smaller(splat(3.9f), larger(splat(-3.9f), x)), t = z * z;
    vec p = splat(2.01482262e-8f), q = splat(9.40529513e-4f);
    p = p * t + splat(-1.96317887e-6f);
    p = p * t + splat(1.40593809e-4f);
    p = p * t + splat(3.63207655e-3f);
    p = p * t + splat(5.03442734e-2f);
    p = p * t + splat(0.198177427f);
    p = p * t + splat(1.12837911f);
    q = q * t + splat(1.42074469e-2f);
    q = q * t + splat(0.114278883f);
    q = q * t + splat(0.508961916f);
    q = q * t + splat(1.0f);
    vec e = z * p * inverse(q);
    return smaller(splat(1.0f), larger(splat(-1.0f), e));
}

INLINE vec activated(vec x, long kind) {
    switch (kind) {
    case GELU: return splat(0.5f) * x * (splat(1.0f) + verf(x * splat(0.70710678f)));
    case GELU_TANH: {
        vec u = splat(0.79788456f) * (x + splat(0.044715f) * x * x * x);
        return x / (splat(1.0f) + vexp(splat(-2.0f) * u));
    }
    case SILU: return x / (splat(1.0f) + vexp(-x));
    case RELU: return pick(x > splat(0.0f), x, splat(0.0f));
    default: return splat(2.0f) / (splat(1.0f) + vexp(splat(-2.0f) * x)) - splat(1.0f);
    }
}

INLINE vec load_some(const float *from, long count) {
    float part[W] = {0};
    if (count >= W) return load(from);
    memcpy(part, from, count * sizeof *part);
    return load(part);
}

INLINE void store_some(float *to, vec value, long count) {
    if (count >= W) store(to, value);
    else {
        float part[W];
        store(part, value);
        memcpy(to, part, count * sizeof *part);
    }
}

/* One row of a feed-forward layer, in place; with a gate, activation(first half) * second half. */
static void activate_row(float *x, long size, int gated, long kind) {
    for (long i = 0; i < size; i += W) {
        vec y = activated(load_some(x + i, size - i), kind);
        if (gated) y *= load_some(x + size + i, size - i);
        store_some(x + i, y, size - i);
    }
}

/* LayerNorm of x (+ plus), which is written back to `sum` if there is such. */
static void layer_norm_row(const float *x, const float *plus, const float *weight, const float *bias, float *sum,
                           float *y, long size, float eps) {
    vec total = splat(0.0f), square = splat(0.0f);
    for (long i = 0; i < size; i += W) {
        vec v = load_some(x + i, size - i);
        if (plus) v += load_some(plus + i, size - i);
        total += v;
        store_some(sum + i, v, size - i);
    }
    float mean = lane_sum(total) / (float)size;
    for (long i = 0; i < size; i += W) {
        vec v = load_some(sum + i, size - i) - splat(mean);
        if (size - i < W)
            for (long j = size - i; j < W; j++) v[j] = 0.0f;
        square += v * v;
    }
    vec spread = splat(1.0f / sqrtf(lane_sum(square) / (float)size + eps));
    for (long i = 0; i < size; i += W) {
        vec v = (load_some(sum + i, size - i) - splat(mean)) * spread * load_some(weight + i, size - i);
        if (bias) v += load_some(bias + i, size - i);
        store_some(y + i, v, size - i);
    }
}

void layer_norm(const float *x, const float *plus, const float *weight, const float *bias, float *y, long rows,
                long size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 16384)
    for (long t = 0; t < rows; t++) {
        const float *more = plus ? plus + t * size : NULL;
        layer_norm_row(x + t * size, more, weight, bias, y + t * size, y + t * size, size, eps);
    }
}

void activate(float *x, long rows, long size, long stride, int gated, long kind, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 4096)
    for (long t = 0; t < rows; t++) activate_row(x + t * stride, size, gated, kind);
}

typedef struct {
    float *panel, *part, *normed, *hidden; /* a tile's */
    float *found;  /* of rounded matrices: what some of their outputs are, */
    void *rounded; /* and the rows that they are multiplied by */
} Tile;

static Tile new_tile(const EncoderLayer *l) {
    Tile tile;
    tile.panel = malloc((TILE_ROWS * (DEPTH + 2 * l->D + (l->gated ? 2 : 1) * l->F)) * sizeof(float));
    tile.part = tile.panel + TILE_ROWS * DEPTH, tile.normed = tile.part + TILE_ROWS * l->D;
    tile.hidden = tile.normed + TILE_ROWS * l->D;
    long widest = l->F > l->D ? l->F : l->D, seen = l->H * l->C;
    widest = (widest > seen ? widest : seen) + BLOCK_INPUTS + 3 * (long)sizeof(float);
    tile.found = l->rounded ? numbers(TILE_ROWS * PANEL) : NULL;
    tile.rounded = l->rounded ? malloc(TILE_ROWS * widest) : NULL;
    return tile;
}

static void free_tile(Tile *tile) { free(tile->panel), free(tile->found), free(tile->rounded); }

/* y = x w' + bias, for at most TILE_ROWS rows. */
static void multiply(const EncoderLayer *l, const Tile *tile, const float *x, long x_stride, const void *w,
                     const float *bias, float *y, long rows, long inputs, long outputs) {
    if (!l->rounded) {
        packed_matmul(x, x_stride, w, bias, y, outputs, rows, inputs, outputs, tile->panel);
        return;
    }
    const Matrix *m = w;
    Rounded rounded = rounded_at(m, tile->rounded, rows);
    if (l->rounded == 2) {
        for (long t = 0; t < rows; t++) round_bytes(x + t * x_stride, m, &rounded, t);
        bytes_matmul(m, &rounded, bias, y, rows);
        return;
    }
    for (long t = 0; t < rows; t++) round_row(x + t * x_stride, m, &rounded, t);
    long tiles = tiles_together(rows), wide = tiles * TILE;
    for (long first = 0; first < outputs; first += wide) {
        long count = outputs - first < wide ? outputs - first : wide;
        tile_product(m, &rounded, first / TILE, tiles, NULL, rows, tile->found);
        for (long t = 0; t < rows; t++)
            for (long o = 0; o < count; o++)
                y[t * outputs + first + o] = tile->found[t * wide + o] + (bias ? bias[first + o] : 0.0f);
    }
}

/* Queries, keys and values of some rows, turned by the tokens' angles; `first` is the number of row 0 in the batch. */
static void project(const EncoderLayer *l, Tile *tile, const float *x, float *qkv, long rows, long first) {
    long D = l->D, size = l->H * l->C;
    if (!l->norm_after && l->attention_norm) {
        for (long t = 0; t < rows; t++)
            layer_norm_row(x + t * D, NULL, l->attention_norm, l->attention_norm_bias, tile->part + t * D,
                           tile->normed + t * D, D, l->eps);
        x = tile->normed;
    }
    multiply(l, tile, x, D, l->qkv, l->qkv_bias, qkv, rows, D, 3 * size);
    for (long t = 0; l->cosine && t < rows; t++)
        for (long h = 0; h < 2 * l->H; h++) {
            float head[l->C], *to = qkv + t * 3 * size + h * l->C;
            memcpy(head, to, sizeof head);
            head_row(head, NULL, to, l->cosine + (first + t) * l->R, l->sine + (first + t) * l->R, l->R, l->C, l->eps,
                     (int)l->interleaved);
        }
}

/* The rest of a layer for some rows, in place, from what they saw. */
static void feed_forward(const EncoderLayer *l, Tile *tile, float *x, const float *seen, long rows) {
    long D = l->D, size = l->H * l->C, width = (l->gated ? 2 : 1) * l->F;
    multiply(l, tile, seen, size, l->out, l->out_bias, tile->part, rows, size, D);
    for (long t = 0; t < rows; t++) {
        float *to = l->norm_after ? x + t * D : tile->normed + t * D;
        const float *weight = l->norm_after ? l->attention_norm : l->ffn_norm;
        const float *bias = l->norm_after ? l->attention_norm_bias : l->ffn_norm_bias;
        layer_norm_row(x + t * D, tile->part + t * D, weight, bias, x + t * D, to, D, l->eps);
    }
    multiply(l, tile, l->norm_after ? x : tile->normed, D, l->up, l->up_bias, tile->hidden, rows, D, width);
    for (long t = 0; t < rows; t++) activate_row(tile->hidden + t * width, l->F, (int)l->gated, l->activation);
    multiply(l, tile, tile->hidden, width, l->down, l->down_bias, tile->part, rows, l->F, D);
    for (long t = 0; t < rows; t++) {
        float *at = x + t * D, *more = tile->part + t * D;
        if (l->norm_after) layer_norm_row(at, more, l->ffn_norm, l->ffn_norm_bias, at, at, D, l->eps);
        else
            for (long i = 0; i < D; i++) at[i] += more[i];
    }
}

#define KEYS 72 /* looked at together: with their values and scores they stay in the nearest cache; a multiple of MR */

/* Room for one sequence's keys and values of a head, as `micro` reads them. */
static long head_size(long tokens, long C) {
    return (tokens + MR - 1) / MR * MR * C + tokens * ((C + NR - 1) / NR * NR);
}

/* NR queries as they have seen some keys: the largest score of each, the sum of its weights, and what these must be
   multiplied by to be weights of the next keys too. */
typedef struct {
    float most[NR], sum[NR], factor[NR];
} Seen;

/* Scores of the next n keys, rows of NR, become weights. Query r is at place `first` + r of these keys; with a window it
   sees only keys nearer than that. */
static void weigh(float *scores, long n, long first, long window, Seen *seen) {
    vec most[NR / W], sum[NR / W];
    if (window > 0 && (first + NR > window || n - first > window))
        for (long j = 0; j < n; j++)
            for (long r = 0; r < NR; r++)
                if (labs(first + r - j) >= window) scores[j * NR + r] = -INFINITY;
    UNROLL for (int i = 0; i < NR / W; i++) most[i] = load(seen->most + i * W);
    for (long j = 0; j < n; j++)
        UNROLL for (int i = 0; i < NR / W; i++) most[i] = larger(load(scores + j * NR + i * W), most[i]);
    UNROLL for (int i = 0; i < NR / W; i++) {
        vec before = load(seen->most + i * W);
        store(seen->most + i * W, most[i]);
        most[i] = pick(most[i] > splat(-INFINITY), most[i], splat(0.0f)); /* nothing may have been seen yet */
        vec factor = vexp(before - most[i]);
        store(seen->factor + i * W, factor);
        sum[i] = load(seen->sum + i * W) * factor;
    }
    for (long j = 0; j < n; j++)
        UNROLL for (int i = 0; i < NR / W; i++) {
            vec p = vexp(load(scores + j * NR + i * W) - most[i]);
            store(scores + j * NR + i * W, p);
            sum[i] += p;
        }
    UNROLL for (int i = 0; i < NR / W; i++) store(seen->sum + i * W, sum[i]);
}

/* One head of one sequence: scores stand key by key, so that queries are the columns of a tile, and then its rows. */
static void see(const EncoderLayer *l, const float *qkv, float *seen, long n, long h, float *room) {
    long C = l->C, size = l->H * C, stride = 3 * size, wide = (C + NR - 1) / NR * NR;
    float *keys = room, *values = keys + (n + MR - 1) / MR * MR * C;
    const float *q = qkv + h * C, *k = q + size, *v = k + size;
    for (long j = 0; j < n; j += MR) turn_rows(k + j * stride, stride, n - j < MR ? n - j : MR, C, keys + j * C, MR);
    for (long c = 0; c < C; c += NR)
        for (long j = 0; j < n; j++) {
            float *to = values + c * n + j * NR;
            for (long i = 0; i < NR; i += W)
                store(to + i, c + i < C ? load_some(v + j * stride + c + i, C - c - i) : splat(0.0f));
        }
    for (long first = 0; first < n; first += NR) {
        long count = n - first < NR ? n - first : NR, low = 0, high = n;
        float queries[C * NR], scores[KEYS * NR], out[wide * NR];
        Seen so_far = {.sum = {0}};
        for (long r = 0; r < NR; r++) so_far.most[r] = -INFINITY;
        if (l->window > 0) { /* keys that no query of the tile sees are left out */
            low = first - l->window + 1 > 0 ? (first - l->window + 1) / MR * MR : 0;
            high = first + count - 1 + l->window < n ? first + count - 1 + l->window : n;
        }
        turn_rows(q + first * stride, stride, count, C, queries, NR);
        for (long i = 0; i < C * NR; i += W) store(queries + i, load(queries + i) * splat(l->scale));
        for (long from = low; from < high; from += KEYS) {
            long here = high - from < KEYS ? high - from : KEYS;
            for (long j = 0; j < here; j += MR)
                micro(keys + (from + j) * C, MR, queries, C, NULL, 0, scores + j * NR, NR, queries);
            weigh(scores, here, first - from, l->window, &so_far);
            if (from > low)
                for (long i = 0; i < wide * NR; i += W)
                    store(out + i, load(out + i) * splat(so_far.factor[i / NR % NR]));
            for (long c = 0; c < C; c += NR) {
                const float *panel = values + c * n + from * NR, *before = from > low ? out + c * NR : NULL;
                long r = 0;
                for (; r + MR <= NR; r += MR)
                    micro(scores + r, NR, panel, here, before ? before + r * NR : NULL, NR, out + c * NR + r * NR, NR, panel);
                micro_rest(scores + r, NR, panel, here, before ? before + r * NR : NULL, NR, out + c * NR + r * NR, NR);
            }
        }
        for (long r = 0; r < count; r++)
            for (long c = 0; c < C; c += W) {
                float share = 1.0f / so_far.sum[r];
                const float *from = out + c / NR * NR * NR + r * NR + c % NR;
                store_some(seen + (first + r) * size + h * C + c, load(from) * splat(share), C - c);
            }
    }
}

/* Sequences s..s+S through all layers, by all members of a team; `qkv` and `seen` have room for their rows. */
static void run(const EncoderLayer *layers, long L, float *x, const int64_t *spans, long S, float *qkv, float *seen,
                Team *teams, long rows_a_tile) {
    long first = spans[0], T = spans[4 * (S - 1) + 1] - first, item;
    long longest = 0;
    for (long s = 0; s < S; s++) {
        long n = spans[4 * s + 1] - spans[4 * s];
        longest = n > longest ? n : longest;
    }
    float *head = malloc(head_size(longest, layers->C) * sizeof *head);
    Tile tile = new_tile(layers);
    long tiles = (T + rows_a_tile - 1) / rows_a_tile;
    for (long l = 0; l < L; l++) {
        const EncoderLayer *layer = layers + l;
        long D = layer->D, size = layer->H * layer->C;
        Member m = teams ? join(teams + l) : (Member){&(Team){0}, 1, 0};
        while (take_one(&m, tiles, &item)) {
            long t = item * rows_a_tile, rows = T - t < rows_a_tile ? T - t : rows_a_tile;
            project(layer, &tile, x + (first + t) * D, qkv + t * 3 * size, rows, first + t);
        }
        meet(&m);
        while (take_one(&m, S * layer->H, &item)) {
            long s = item / layer->H, from = spans[4 * s] - first, n = spans[4 * s + 1] - spans[4 * s];
            see(layer, qkv + from * 3 * size, seen + from * size, n, item % layer->H, head);
        }
        meet(&m);
        while (take_one(&m, tiles, &item)) {
            long t = item * rows_a_tile, rows = T - t < rows_a_tile ? T - t : rows_a_tile;
            feed_forward(layer, &tile, x + (first + t) * D, seen + t * size, rows);
        }
        meet(&m);
    }
    free_tile(&tile), free(head);
}

/* x (T, D) is written over. Sequences lie side by side, none is empty. */
void encode(const EncoderLayer *layers, long L, float *x, const int64_t *spans, long S, int threads) {
    long T = spans[4 * (S - 1) + 1], size = layers->H * layers->C, most = 0, runs = 0;
    long wanted = T / (4 * threads) < RUN ? T / (4 * threads) : RUN;
    long *start = malloc((S + 1) * sizeof *start);
    for (long s = 0; s < S; runs++) {
        long from = s;
        while (s < S && (s == from || spans[4 * s + 1] - spans[4 * from] <= wanted)) s++;
        start[runs] = from, start[runs + 1] = s;
        long tokens = spans[4 * (s - 1) + 1] - spans[4 * from];
        most = tokens > most ? tokens : most;
    }
    if (runs >= threads) {
#pragma omp parallel num_threads(threads)
        {
            float *scratch = malloc(most * 4 * size * sizeof *scratch);
#pragma omp for schedule(dynamic, 1)
            for (long r = 0; r < runs; r++)
                run(layers, L, x, spans + 4 * start[r], start[r + 1] - start[r], scratch, scratch + most * 3 * size, NULL,
                    TILE_ROWS);
            free(scratch);
        }
    } else {
        float *scratch = malloc(T * 4 * size * sizeof *scratch);
        Team *teams = calloc(L, sizeof *teams);
        long share = (T + threads - 1) / threads, tile = (share + MR - 1) / MR * MR;
        tile = tile < TILE_ROWS ? tile : TILE_ROWS;
#pragma omp parallel num_threads(threads)
        run(layers, L, x, spans, S, scratch, scratch + T * 3 * size, teams, tile);
        free(scratch), free(teams);
    }
    free(start);
}
