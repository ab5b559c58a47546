/* What is done to each row by itself: norms, rotary angles, gated activations, the choice of experts. */
#include "stages.h"

#define ALONE 16384 /* numbers; fewer are not worth waking the other threads */

/* Four sums of W lanes, always over the same places, then one tree. */
static float mean_square(const float *x, long size) {
    vec sum[4] = {{0}, {0}, {0}, {0}};
    long i = 0;
    for (; i + 4 * W <= size; i += 4 * W) UNROLL for (int j = 0; j < 4; j++) {
        vec v = load(x + i + j * W);
        sum[j] += v * v;
    }
    float rest = 0.0f;
    for (; i < size; i++) rest += x[i] * x[i];
    return (lane_sum((sum[0] + sum[1]) + (sum[2] + sum[3])) + rest) / (float)size;
}

void norm_row(const float *x, const float *weight, float *y, long size, float eps) {
    float spread = 1.0f / sqrtf(mean_square(x, size) + eps);
    for (long i = 0; i < size; i++) y[i] = (x[i] * spread) * weight[i];
}

void rms_norm(const float *x, const float *weight, float *y, long rows, long size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > ALONE)
    for (long t = 0; t < rows; t++) norm_row(x + t * size, weight, y + t * size, size, eps);
}

/* The first 2R numbers of a head turned by the token's angles; `from` and `to` are apart. */
static void turn(const float *from, float *to, const float *cosine, const float *sine, long R, long size,
                 int interleaved) {
    long first = interleaved ? 2 : 1, second = interleaved ? 1 : R;
    for (long i = 0; i < R; i++) {
        float a = from[first * i], b = from[first * i + second], c = cosine[i], s = sine[i];
        to[i] = __builtin_fmaf(a, c, -(b * s));
        to[R + i] = __builtin_fmaf(b, c, a * s);
    }
    memcpy(to + 2 * R, from + 2 * R, (size - 2 * R) * sizeof *to);
}

void head_row(const float *from, const float *weight, float *to, const float *cosine, const float *sine, long R, long C,
              float eps, int interleaved) {
    float normed[C];
    if (weight) {
        norm_row(from, weight, normed, C, eps);
        from = normed;
    }
    turn(from, to, cosine, sine, R, C, interleaved);
}

/* Queries and keys out of one row per token of (queries, keys, values): normed if there are weights, then turned. */
void heads(const float *qkv, const float *q_weight, const float *k_weight, const float *cosine, const float *sine,
           float *q, float *k, long tokens, long H, long N, long C, long R, long stride, float eps, int interleaved,
           int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * (H + N) * C > ALONE)
    for (long t = 0; t < tokens; t++) {
        for (long h = 0; h < H + N; h++)
            head_row(qkv + t * stride + h * C, h < H ? q_weight : k_weight,
                     h < H ? q + (t * H + h) * C : k + (t * N + h - H) * C, cosine + t * R, sine + t * R, R, C, eps,
                     interleaved);
    }
}

void swiglu(const float *gate_up, float *y, long rows, long size, int kind, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > ALONE / 4)
    for (long t = 0; t < rows; t++) {
        const float *gate = gate_up + t * 2 * size;
        if (kind == BY_CLAMPED) clamped_swiglu_row(gate, gate + size, y + t * size, size, 1.0f);
        else if (kind == BY_SIGMOID) gate_row(gate, gate + size, y + t * size, size, 1.0f, BY_SIGMOID);
        else swiglu_row(gate, gate + size, y + t * size, size, 1.0f);
    }
}

static int ranks_before(float a, long i, float b, long j) { return a > b || (a == b && i < j); }

/* The `count` largest of `size` scores, largest first, the earlier of two equals first; NaN never. */
static void best(const float *score, long size, long count, int64_t *chosen) {
    for (long c = 0; c < count; c++) {
        long found = -1;
        for (long e = 0; e < size; e++) {
            if (found >= 0 && !ranks_before(score[e], e, score[found], found)) continue;
            if (c && !ranks_before(score[chosen[c - 1]], chosen[c - 1], score[e], e)) continue;
            found = e;
        }
        chosen[c] = found < 0 ? c : found;
    }
}

void route_row(const float *logits, const float *correction, int64_t *chosen, float *weights, long E, long K,
               long groups, long top_groups, int softmax, int normalize, float scale, int replayed) {
    float score[E], choice[E], strength[groups];
    int64_t open[groups];
    float most = logits[0], total = 0.0f;
    for (long e = 1; e < E; e++) most = logits[e] > most ? logits[e] : most;
    for (long e = 0; e < E; e++)
        total += score[e] = softmax ? exp1(logits[e] - most) : 1.0f / (1.0f + exp1(-logits[e]));
    if (softmax)
        for (long e = 0; e < E; e++) score[e] /= total;
    if (!replayed) {
        for (long e = 0; e < E; e++) choice[e] = correction ? score[e] + correction[e] : score[e];
        if (groups > 1) {
            long size = E / groups;
            for (long g = 0; g < groups; g++) {
                int64_t two[2];
                best(choice + g * size, size, 2, two);
                strength[g] = choice[g * size + two[0]] + choice[g * size + two[1]];
            }
            best(strength, groups, top_groups, open);
            for (long g = 0; g < groups; g++) {
                int closed = 1;
                for (long i = 0; i < top_groups; i++) closed &= open[i] != g;
                for (long e = 0; closed && e < size; e++) choice[g * size + e] = -INFINITY;
            }
        }
        best(choice, E, K, chosen);
    }
    float sum = 0.0f;
    for (long c = 0; c < K; c++) sum += weights[c] = score[chosen[c]];
    if (normalize)
        for (long c = 0; c < K; c++) weights[c] /= sum + (softmax ? 0.0f : 1e-20f);
    for (long c = 0; c < K; c++) weights[c] *= scale;
}

/* Router logits (T, E) to the chosen experts and their weights (T, K). With `replayed`, routes are given. */
void route(const float *logits, const float *correction, int64_t *routes, float *weights, long tokens, long E, long K,
           long groups, long top_groups, int softmax, int normalize, float scale, int replayed) {
    for (long t = 0; t < tokens; t++)
        route_row(logits + t * E, correction, routes + t * K, weights + t * K, E, K, groups, top_groups, softmax,
                  normalize, scale, replayed);
}
