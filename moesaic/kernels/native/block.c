/* A whole layer, or all, in one call, made of the same functions in the same order, so with the same bits as one by one. */
#include "matmul.h"
#include "retained.h"

typedef struct {
    const float *attention_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *ffn_norm;
    const float *gate_up, *gate_up_bias, *down, *down_bias; /* of a dense layer, or of the shared expert */
    const float *router, *correction, *experts_gate_up, *experts_down;
    long D, H, N, C, F, E, K, G, groups, top_groups, window; /* F: dense or shared, 0 for neither; G: of an expert */
    long interleaved, softmax, normalize;
    float eps, attention_scale, route_scale;
} Block;

static void norm_stage(Member *m, const float *x, const float *weight, float *y, long T, long D, float eps) {
    for (long t; take_one(m, T, &t);) norm_row(x + t * D, weight, y + t * D, D, eps);
}

/* Queries to q, keys and values to the cache. */
static void heads_stage(Member *m, const Block *b, const Attention *a, const float *qkv, float *q, const float *cosine,
                        const float *sine, long R, long T) {
    long H = b->H, N = b->N, C = b->C, each = H + 2 * N, from, to;
    while (take(m, T * each, &from, &to))
        for (long item = from, s = 0; item < to; item++) {
            long t = item / each, h = item % each;
            while (t >= a->spans[4 * s + 1]) s++;
            const float *head = qkv + item * C;
            if (h < H) head_row(head, b->q_norm, q + (t * H + h) * C, cosine + t * R, sine + t * R, R, C, b->eps, b->interleaved);
            else if (h < H + N)
                head_row(head, b->k_norm, a->keys + cache_row(a, s, t, h - H) * C, cosine + t * R, sine + t * R, R, C,
                         b->eps, b->interleaved);
            else memcpy(a->values + cache_row(a, s, t, h - H - N) * C, head, C * sizeof *head);
        }
}

/* Normed rows, and where there is a router, each row's experts. */
static void choose_stage(Member *m, const Block *b, const float *x, float *normed, float *logits, float *weights,
                         int64_t *routes, long T) {
    for (long item; take_one(m, (T + 3) / 4, &item);) {
        long first = item * 4, rows = T - first < 4 ? T - first : 4;
        const float *xs[4];
        float *ys[4];
        for (long r = 0; r < rows; r++) {
            long t = first + r;
            norm_row(x + t * b->D, b->ffn_norm, normed + t * b->D, b->D, b->eps);
            xs[r] = normed + t * b->D, ys[r] = logits + t * b->E;
        }
        if (!b->E) continue;
        matmul(b->router, b->D, b->E - 1, 0, b->E, xs, ys, rows);
        for (long t = first; t < first + rows; t++)
            route_row(logits + t * b->E, b->correction, routes + t * b->K, weights + t * b->K, b->E, b->K, b->groups,
                      b->top_groups, b->softmax, b->normalize, b->route_scale, 0);
    }
}

static void gated_stage(Member *m, const float *both, float *inner, long T, long F) {
    for (long t; take_one(m, T, &t);) swiglu_row(both + t * 2 * F, both + t * 2 * F + F, inner + t * F, F, 1.0f);
}

/* What all layers of a step have in common. */
typedef struct {
    const float *cosine, *sine;
    const int64_t *spans, *table;
    long R, T, S, columns, page_size;
    const Retained *retained; /* (S), or NULL: of one layer */
} Step;

static long scratch_size(const Block *b) {
    return 3 * b->D + (3 * b->H + 2 * b->N) * b->C + 3 * b->F + b->E + b->K + b->K * b->G;
}

static void block_stages(Member *m, const Block *b, const Step *step, const float *x, float *y, int64_t *routes,
                         float *keys, float *values, float *scratch) {
    long T = step->T, D = b->D, size = (b->H + 2 * b->N) * b->C, hidden = b->H * b->C;
    float *normed = scratch, *part = normed + T * D, *middle = part + T * D, *qkv = middle + T * D;
    float *q = qkv + T * size, *seen = q + T * hidden, *both = seen + T * hidden, *inner = both + 2 * T * b->F;
    float *logits = inner + T * b->F, *weights = logits + T * b->E, *gated = weights + T * b->K;
    Attention a = {.q = q, .keys = keys, .values = values, .out = seen, .spans = step->spans, .table = step->table,
                   .S = step->S, .columns = step->columns, .page_size = step->page_size, .q_stride = hidden, .H = b->H,
                   .N = b->N, .C = b->C, .X = b->C, .window = b->window, .scale = b->attention_scale,
                   .retained = step->retained};
    norm_stage(m, x, b->attention_norm, normed, T, D, b->eps), meet(m);
    linear_stage(m, normed, b->qkv, b->qkv_bias, NULL, qkv, T, D, size, D), meet(m);
    heads_stage(m, b, &a, qkv, q, step->cosine, step->sine, step->R, T), meet(m);
    attend_stage(m, &a), meet(m);
    linear_stage(m, seen, b->out, b->out_bias, x, middle, T, hidden, D, hidden), meet(m);
    choose_stage(m, b, middle, normed, logits, weights, routes, T), meet(m);
    if (b->F) {
        linear_stage(m, normed, b->gate_up, b->gate_up_bias, NULL, both, T, D, 2 * b->F, D), meet(m);
        gated_stage(m, both, inner, T, b->F), meet(m);
        linear_stage(m, inner, b->down, b->down_bias, b->E ? NULL : middle, b->E ? part : y, T, b->F, D, b->F), meet(m);
    }
    if (b->E) {
        experts_stage(m, normed, routes, weights, b->experts_gate_up, b->experts_down, NULL, b->F ? part : NULL, middle,
                      y, gated, T, D, b->G, b->E, b->K, 0);
        meet(m);
    }
}

/* All layers in one call: between two of them Python, which finds the caches full of weights, would take a tenth of the
   time. `slabs` holds each layer's keys and values, `routes` T * K places for each layer, `retained` what each layer of
   compact requests keeps (L, S), or NULL. */
void layers(const Block *blocks, long L, const float *x, float *y, int64_t *routes, const float *cosine,
            const float *sine, long R, float *const *slabs, const int64_t *spans, const int64_t *table, long T, long S,
            long columns, long page_size, long K, const Retained *retained, int threads) {
    long most = 0;
    for (long l = 0; l < L; l++) most = scratch_size(blocks + l) > most ? scratch_size(blocks + l) : most;
    float *scratch = malloc((most + blocks->D) * T * sizeof *scratch), *between = scratch + most * T;
    Team *teams = calloc(L, sizeof *teams); /* the last thread may still be leaving one when the first enters the next */
#pragma omp parallel num_threads(threads)
    for (long l = 0; l < L; l++) {
        Member me = join(teams + l);
        Step step = {cosine, sine, spans, table, R, T, S, columns, page_size, retained ? retained + l * S : NULL};
        float *to = (L - l) % 2 ? y : between;
        block_stages(&me, blocks + l, &step, l == 0 ? x : to == y ? between : y, to, routes + l * T * K, slabs[2 * l],
                     slabs[2 * l + 1], scratch);
    }
    free(scratch), free(teams);
}

