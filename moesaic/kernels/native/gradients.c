/* The way back through norms, rotary angles and SwiGLU, each in one pass over the rows.

   Gradients of weights are summed within blocks of rows, and then over the blocks in order: the number of threads does
   not change them. */
#include "vector.h"

#define BLOCK_ROWS 64

/* dx of y = x * spread * weight, spread = 1 / sqrt(mean(x^2) + eps); d_weight grows by its share. */
static void norm_back(const float *x, const float *weight, const float *dy, float *dx, float *d_weight, long size,
                      float eps) {
    vec squares = splat(0.0f), products = splat(0.0f);
    long i = 0;
    for (; i + W <= size; i += W) {
        vec v = load(x + i);
        squares += v * v;
        products += v * (load(dy + i) * load(weight + i));
    }
    float square = lane_sum(squares), product = lane_sum(products);
    for (; i < size; i++) square += x[i] * x[i], product += x[i] * (dy[i] * weight[i]);
    float spread = 1.0f / sqrtf(square / (float)size + eps);
    float pull = product / (float)size * spread * spread * spread;
    for (i = 0; i < size; i++) {
        d_weight[i] += dy[i] * x[i] * spread;
        dx[i] = dy[i] * weight[i] * spread - x[i] * pull;
    }
}

static void add_blocks(const float *parts, float *sum, long blocks, long size) {
    memset(sum, 0, size * sizeof *sum);
    for (long b = 0; b < blocks; b++)
        for (long i = 0; i < size; i++) sum[i] += parts[b * size + i];
}

void rms_norm_back(const float *x, const float *weight, const float *dy, float *dx, float *d_weight, long rows,
                   long size, float eps, int threads) {
    long blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    float *parts = calloc(blocks * size + 1, sizeof *parts);
#pragma omp parallel for num_threads(threads)
    for (long b = 0; b < blocks; b++)
        for (long t = b * BLOCK_ROWS; t < rows && t < (b + 1) * BLOCK_ROWS; t++)
            norm_back(x + t * size, weight, dy + t * size, dx + t * size, parts + b * size, size, eps);
    add_blocks(parts, d_weight, blocks, size);
    free(parts);
}

/* Turning back is turning by the negative angle; halves become neighbours again where they were. */
static void turn_back(const float *from, float *to, const float *cosine, const float *sine, long R, long size,
                      int interleaved) {
    long first = interleaved ? 2 : 1, second = interleaved ? 1 : R;
    for (long i = 0; i < R; i++) {
        float a = from[i], b = from[R + i], c = cosine[i], s = sine[i];
        to[first * i] = __builtin_fmaf(a, c, b * s);
        to[first * i + second] = __builtin_fmaf(b, c, -(a * s));
    }
    memcpy(to + 2 * R, from + 2 * R, (size - 2 * R) * sizeof *to);
}

/* The gradient of a token's whole projection (queries, keys, values) from those of its heads. */
void heads_back(const float *qkv, const float *q_weight, const float *k_weight, const float *cosine, const float *sine,
                const float *dq, const float *dk, const float *dv, float *d_qkv, float *d_q_weight, float *d_k_weight,
                long tokens, long H, long N, long C, long R, float eps, int interleaved, int threads) {
    long blocks = (tokens + BLOCK_ROWS - 1) / BLOCK_ROWS, X = H + 2 * N;
    float *parts = calloc(2 * blocks * C + 1, sizeof *parts);
#pragma omp parallel for num_threads(threads)
    for (long b = 0; b < blocks; b++) {
        float turned[C];
        for (long t = b * BLOCK_ROWS; t < tokens && t < (b + 1) * BLOCK_ROWS; t++) {
            for (long h = 0; h < H + N; h++) {
                const float *from = h < H ? dq + (t * H + h) * C : dk + (t * N + h - H) * C;
                const float *weight = h < H ? q_weight : k_weight;
                float *to = d_qkv + (t * X + h) * C;
                turn_back(from, weight ? turned : to, cosine + t * R, sine + t * R, R, C, interleaved);
                if (weight)
                    norm_back(qkv + (t * X + h) * C, weight, turned, to, parts + ((h >= H) * blocks + b) * C, C, eps);
            }
            memcpy(d_qkv + (t * X + H + N) * C, dv + t * N * C, N * C * sizeof *dv);
        }
    }
    if (q_weight) add_blocks(parts, d_q_weight, blocks, C);
    if (k_weight) add_blocks(parts + blocks * C, d_k_weight, blocks, C);
    free(parts);
}

/* y = silu(gate) * up; its slope is sigmoid + silu * (1 - sigmoid). */
void swiglu_back(const float *gate_up, const float *dy, float *d_gate_up, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long t = 0; t < rows; t++) {
        const float *gate = gate_up + t * 2 * size, *up = gate + size, *d = dy + t * size;
        float *d_gate = d_gate_up + t * 2 * size, *d_up = d_gate + size;
        long i = 0;
        for (; i + W <= size; i += W) {
            vec g = load(gate + i), sigmoid = splat(1.0f) / (splat(1.0f) + vexp(-g)), silu = g * sigmoid;
            store(d_up + i, load(d + i) * silu);
            store(d_gate + i, load(d + i) * load(up + i) * (sigmoid + silu * (splat(1.0f) - sigmoid)));
        }
        for (; i < size; i++) {
            float sigmoid = 1.0f / (1.0f + exp1(-gate[i])), silu = gate[i] * sigmoid;
            d_up[i] = d[i] * silu;
            d_gate[i] = d[i] * up[i] * (sigmoid + silu * (1.0f - sigmoid));
        }
    }
}
