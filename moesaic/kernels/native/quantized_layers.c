/* Layers of few bits in one call, made of the same functions in the same order as one by one, so with the same bits. */
#include "matmul.h"
#include "quantized.h"
#include "retained.h"

#define FEW 4 /* rows that every thread makes ready for itself, which is quicker than sharing them out and meeting */

typedef struct {
    const float *attention_norm, *q_norm, *k_norm, *ffn_norm, *qkv_bias, *out_bias, *gate_up_bias, *down_bias;
    const float *router, *correction;
    const Matrix *qkv, *out, *gate_up, *down, *experts_gate_up, *experts_down; /* experts: one behind the other */
    long D, H, N, C, F, E, K, G, groups, top_groups, window; /* F: dense or shared, 0 for neither; G: of an expert */
    long interleaved, softmax, normalize;
    float eps, attention_scale, route_scale;
} QuantizedBlock;

/* What all layers of a step have in common. */
typedef struct {
    const float *cosine, *sine;
    const int64_t *spans, *table;
    long R, T, S, columns, page_size;
    const Retained *retained; /* (S), or NULL: of one layer */
} Step;

/* Where rows are made ready to be multiplied: each thread has one for few rows, and all have one for many. */
typedef struct {
    float *rows;
    void *rounded;
} Room;

typedef enum { AS_THEY_ARE, NORMED, GATED } Making;

/* Rows for a matrix: normed with a weight, or gated, and rounded. */
static Rounded ready(Member *m, const Matrix *matrix, Making making, const float *x, const float *weight, float eps,
                     long count, const Room *own, const Room *common) {
    long size = matrix->inputs, few = count <= FEW;
    const Room *room = few ? own : common;
    Rounded to = rounded_at(matrix, room->rounded, count);
    for (long t = 0; few ? t < count : take_one(m, count, &t); t++) {
        const float *row = x + t * (making == GATED ? 2 * size : size);
        float *made = room->rows + t * size;
        if (making == NORMED) norm_row(row, weight, made, size, eps);
        if (making == GATED) swiglu_row(row, row + size, made, size, 1.0f);
        round_row(making == AS_THEY_ARE ? row : made, matrix, &to, t);
    }
    if (!few) meet(m);
    return to;
}

/* Queries to q, keys and values to the cache. */
static void heads_stage(Member *m, const QuantizedBlock *b, const Attention *a, const float *qkv, float *q,
                        const Step *step) {
    long H = b->H, N = b->N, C = b->C, R = step->R, each = H + 2 * N, from, to;
    while (take(m, step->T * each, &from, &to))
        for (long item = from, s = 0; item < to; item++) {
            long t = item / each, h = item % each;
            while (t >= a->spans[4 * s + 1]) s++;
            const float *head = qkv + item * C, *weight = h < H ? b->q_norm : b->k_norm;
            float *place = h < H ? q + (t * H + h) * C : a->keys + cache_row(a, s, t, (h - H) % N) * C;
            if (h >= H + N) memcpy(a->values + cache_row(a, s, t, h - H - N) * C, head, C * sizeof *head);
            else head_row(head, weight, place, step->cosine + t * R, step->sine + t * R, R, C, b->eps, b->interleaved);
        }
}

/* Normed rows and each one's experts. */
static void choose_stage(Member *m, const QuantizedBlock *b, const float *x, float *normed, float *logits,
                         float *weights, int64_t *routes, long T) {
    for (long t; take_one(m, T, &t);) {
        const float *row = normed + t * b->D;
        float *scores = logits + t * b->E;
        norm_row(x + t * b->D, b->ffn_norm, normed + t * b->D, b->D, b->eps);
        matmul(b->router, b->D, b->E - 1, 0, b->E, &row, &scores, 1);
        route_row(scores, b->correction, routes + t * b->K, weights + t * b->K, b->E, b->K, b->groups, b->top_groups,
                  b->softmax, b->normalize, b->route_scale, 0);
    }
}

/* Assignments, a token and one of its experts each, sorted by expert: those of e are first[e]..first[e + 1]. */
typedef struct {
    long *first, *token;
    float *share;
} Sorted;

static Sorted sorted(const int64_t *routes, const float *weights, long A, long E, long K) {
    Sorted s = {calloc(E + 2 + A, sizeof(long)), NULL, malloc(A * sizeof(float))};
    s.token = s.first + E + 2;
    for (long a = 0; a < A; a++) s.first[routes[a] + 2]++;
    for (long e = 0; e < E; e++) s.first[e + 2] += s.first[e + 1];
    for (long a = 0; a < A; a++) {
        long at = s.first[routes[a] + 1]++;
        s.token[at] = a / K, s.share[at] = weights[a];
    }
    return s;
}

/* y = plus + (the experts' weighted sum (+ shared)); experts in order, a share weighed and kept before it is added, or
   the two would be rounded as one. */
static void experts_stages(Member *m, const QuantizedBlock *b, const float *x, const int64_t *routes,
                           const float *weights, const float *shared, const float *plus, float *y, float *both, long T,
                           const Room *own, const Room *common) {
    long D = b->D, G = b->G, A = T * b->K, from, to;
    Sorted s = sorted(routes, weights, A, b->E, b->K);
    long *active = malloc(b->E * sizeof *active), actives = 0;
    for (long e = 0; e < b->E; e++)
        if (s.first[e + 1] > s.first[e]) active[actives++] = e;
    long tiles = tiles_together(A / actives), wide = tiles * TILE; /* by the rows of a usual expert */
    long ups = (tiles_of(b->experts_gate_up) + tiles - 1) / tiles, downs = (tiles_of(b->experts_down) + tiles - 1) / tiles;
    float *found = numbers((A + T) * wide), *sums = found + A * wide;

    Rounded rows = ready(m, b->experts_gate_up, AS_THEY_ARE, x, NULL, 0.0f, T, own, common);
    while (take(m, actives * ups, &from, &to))
        for (long item = from; item < to; item++) {
            long e = active[item / ups], at = item % ups * wide, first = s.first[e], count = s.first[e + 1] - first;
            long outputs = 2 * G - at < wide ? 2 * G - at : wide;
            tile_product(b->experts_gate_up + e, &rows, item % ups * tiles, tiles, s.token + first, count, found);
            for (long a = 0; a < count; a++)
                memcpy(both + (first + a) * 2 * G + at, found + a * wide, outputs * sizeof *found);
        }
    meet(m);

    rows = ready(m, b->experts_down, GATED, both, NULL, 0.0f, A, own, common);
    long *place = malloc(A * sizeof *place);
    for (long a = 0; a < A; a++) place[a] = a;
    while (take(m, downs, &from, &to))
        for (long item = from; item < to; item++) {
            long at = item * wide, outputs = D - at < wide ? D - at : wide;
            memset(sums, 0, T * wide * sizeof *sums);
            for (long i = 0; i < actives; i++) {
                long e = active[i], first = s.first[e], count = s.first[e + 1] - first;
                tile_product(b->experts_down + e, &rows, item * tiles, tiles, place + first, count, found);
                for (long a = 0; a < count; a++)
                    for (long o = 0; o < outputs; o++) found[a * wide + o] *= s.share[first + a];
                __asm__ volatile("" ::: "memory");
                for (long a = 0; a < count; a++)
                    for (long o = 0; o < outputs; o++) sums[s.token[first + a] * wide + o] += found[a * wide + o];
            }
            for (long t = 0; t < T; t++)
                for (long o = 0; o < outputs; o++) {
                    float sum = sums[t * wide + o];
                    if (shared) sum += shared[t * D + at + o];
                    y[t * D + at + o] = plus[t * D + at + o] + sum;
                }
        }
    meet(m);
    free(s.first), free(s.share), free(active), free(found), free(place);
}

static long widest(const QuantizedBlock *b) {
    long most = b->D > b->H * b->C ? b->D : b->H * b->C;
    most = b->F > most ? b->F : most;
    return b->G > most ? b->G : most;
}

static long scratch_size(const QuantizedBlock *b) {
    return 3 * b->D + (3 * b->H + 2 * b->N) * b->C + 2 * b->F + b->E + b->K + 2 * b->K * b->G;
}

static Room room_for(long rows, long width) {
    return (Room){malloc(rows * width * sizeof(float)), malloc(rows * (3 * width + 192))};
}

static void block_stages(Member *m, const QuantizedBlock *b, const Step *step, const float *x, float *y, int64_t *routes,
                         float *keys, float *values, float *scratch, const Room *own, const Room *common) {
    long T = step->T, D = b->D, size = (b->H + 2 * b->N) * b->C, hidden = b->H * b->C;
    float *normed = scratch, *part = normed + T * D, *middle = part + T * D, *qkv = middle + T * D;
    float *q = qkv + T * size, *seen = q + T * hidden, *both = seen + T * hidden, *logits = both + 2 * T * b->F;
    float *weights = logits + T * b->E, *gated = weights + T * b->K;
    Attention a = {.q = q, .keys = keys, .values = values, .out = seen, .spans = step->spans, .table = step->table,
                   .S = step->S, .columns = step->columns, .page_size = step->page_size, .q_stride = hidden, .H = b->H,
                   .N = b->N, .C = b->C, .X = b->C, .window = b->window, .scale = b->attention_scale,
                   .retained = step->retained};
    Rounded rows = ready(m, b->qkv, NORMED, x, b->attention_norm, b->eps, T, own, common);
    quantized_stage(m, b->qkv, &rows, b->qkv_bias, NULL, qkv, T), meet(m);
    heads_stage(m, b, &a, qkv, q, step), meet(m);
    attend_stage(m, &a), meet(m);
    rows = ready(m, b->out, AS_THEY_ARE, seen, NULL, 0.0f, T, own, common);
    quantized_stage(m, b->out, &rows, b->out_bias, x, middle, T), meet(m);
    if (b->E) choose_stage(m, b, middle, normed, logits, weights, routes, T), meet(m);
    if (b->F) {
        rows = b->E ? ready(m, b->gate_up, AS_THEY_ARE, normed, NULL, 0.0f, T, own, common)
                    : ready(m, b->gate_up, NORMED, middle, b->ffn_norm, b->eps, T, own, common);
        quantized_stage(m, b->gate_up, &rows, b->gate_up_bias, NULL, both, T), meet(m);
        rows = ready(m, b->down, GATED, both, NULL, 0.0f, T, own, common);
        quantized_stage(m, b->down, &rows, b->down_bias, b->E ? NULL : middle, b->E ? part : y, T), meet(m);
    }
    if (b->E) experts_stages(m, b, normed, routes, weights, b->F ? part : NULL, middle, y, gated, T, own, common);
}

/* As `layers` in block.c. */
void quantized_layers(const QuantizedBlock *blocks, long L, const float *x, float *y, int64_t *routes,
                      const float *cosine, const float *sine, long R, float *const *slabs, const int64_t *spans,
                      const int64_t *table, long T, long S, long columns, long page_size, long K,
                      const Retained *retained, int threads) {
    long most = 0, width = 0;
    for (long l = 0; l < L; l++) {
        most = scratch_size(blocks + l) > most ? scratch_size(blocks + l) : most;
        width = widest(blocks + l) > width ? widest(blocks + l) : width;
    }
    float *scratch = malloc((most + blocks->D) * T * sizeof *scratch), *between = scratch + most * T;
    Team *teams = calloc(L, sizeof *teams); /* the last thread may still be leaving one when the first enters the next */
    Room common = room_for(T * (K > 1 ? K : 1), width);
#pragma omp parallel num_threads(threads)
    {
        Room own = room_for(FEW, width);
        for (long l = 0; l < L; l++) {
            Member me = join(teams + l);
            Step step = {cosine, sine, spans, table, R, T, S, columns, page_size, retained ? retained + l * S : NULL};
            float *to = (L - l) % 2 ? y : between;
            block_stages(&me, blocks + l, &step, l == 0 ? x : to == y ? between : y, to, routes + l * T * K,
                         slabs[2 * l], slabs[2 * l + 1], scratch, &own, &common);
        }
        free(own.rows), free(own.rounded);
    }
    free(scratch), free(teams), free(common.rows), free(common.rounded);
}
