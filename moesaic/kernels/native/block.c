/* A whole layer in one call, made of the same functions in the same order, so with the same bits as one by one. */
#include "vector.h"

void linear(const float *, const float *, const float *, float *, long, long, long, long, int);
void rms_norm(const float *, const float *, float *, long, long, float, int);
void heads(const float *, const float *, const float *, const float *, const float *, float *, float *, long, long,
           long, long, long, long, float, int, int);
void swiglu(const float *, float *, long, long, int);
void route(const float *, const float *, int64_t *, float *, long, long, long, long, long, int, int, float, int);
void experts(const float *, const int64_t *, const float *, const float *, const float *, float *, long, long, long,
             long, long, int);
void attend(const float *, const float *, const float *, float *, float *, float *, float *, const int64_t *,
            const int64_t *, const int64_t *, long, long, long, long, long, long, long, long, long, long, long, float,
            int);

typedef struct {
    const float *attention_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *ffn_norm;
    const float *gate_up, *gate_up_bias, *down, *down_bias; /* of a dense layer, or of the shared expert */
    const float *router, *correction, *experts_gate_up, *experts_down;
    long D, H, N, C, F, E, K, G, groups, top_groups, window; /* F: dense or shared, 0 for neither; G: of an expert */
    long interleaved, softmax, normalize;
    float eps, attention_scale, route_scale;
} Block;

static void add(const float *a, const float *b, float *sum, long size) {
    for (long i = 0; i < size; i++) sum[i] = a[i] + b[i];
}

void block(const Block *b, const float *x, float *y, int64_t *routes, const float *cosine, const float *sine, long R,
           float *keys, float *values, const int64_t *spans, const int64_t *table, long T, long S, long columns,
           long page_size, int threads) {
    long D = b->D, size = (b->H + 2 * b->N) * b->C, hidden = b->H * b->C;
    float *scratch = malloc(T * (3 * D + size + 2 * hidden + b->N * b->C + 3 * b->F + b->E + b->K) * sizeof *scratch);
    float *normed = scratch, *part = normed + T * D, *more = part + T * D, *qkv = more + T * D, *q = qkv + T * size;
    float *k = q + T * hidden, *seen = k + T * b->N * b->C, *both = seen + T * hidden, *inner = both + 2 * T * b->F;
    float *logits = inner + T * b->F, *weights = logits + T * b->E;

    rms_norm(x, b->attention_norm, normed, T, D, b->eps, threads);
    linear(normed, b->qkv, b->qkv_bias, qkv, T, D, size, D, threads);
    heads(qkv, b->q_norm, b->k_norm, cosine, sine, q, k, T, b->H, b->N, b->C, R, size, b->eps, b->interleaved, threads);
    attend(q, k, qkv + (b->H + b->N) * b->C, keys, values, seen, NULL, spans, table, NULL, S, columns, page_size,
           hidden, b->N * b->C, size, b->H, b->N, b->C, b->C, b->window, b->attention_scale, threads);
    linear(seen, b->out, b->out_bias, part, T, hidden, D, hidden, threads);
    add(x, part, y, T * D);

    rms_norm(y, b->ffn_norm, normed, T, D, b->eps, threads);
    if (b->E) {
        linear(normed, b->router, NULL, logits, T, D, b->E, D, threads);
        route(logits, b->correction, routes, weights, T, b->E, b->K, b->groups, b->top_groups, b->softmax, b->normalize,
              b->route_scale, 0);
        experts(normed, routes, weights, b->experts_gate_up, b->experts_down, part, T, D, b->G, b->E, b->K, threads);
    }
    if (b->F) {
        float *to = b->E ? more : part;
        linear(normed, b->gate_up, b->gate_up_bias, both, T, D, 2 * b->F, D, threads);
        swiglu(both, inner, T, b->F, threads);
        linear(inner, b->down, b->down_bias, to, T, b->F, D, b->F, threads);
        if (b->E) add(part, more, part, T * D);
    }
    add(y, part, y, T * D);
    free(scratch);
}
