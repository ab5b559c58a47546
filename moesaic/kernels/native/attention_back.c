/* The way back through attention without a cache: each sequence's key head is one piece of work, which owns the
   gradients of its keys and values. Weights are computed again from the sums that the forward kept. */
#include "attention.h"

#define QUERIES 32 /* queries that meet a block of keys at a time */

typedef struct {
    const float *q, *k, *v, *out, *sums, *d_out;
    float *dq, *dk, *dv;
    long q_stride, k_stride, v_stride, H, N, C, X, window;
    float scale;
} Back;

static void back_head(const Back *a, long start, long stop, long n) {
    long group = a->H / a->N, rows = (stop - start) * group, C = a->C, X = a->X;
    float p[QUERIES * B], ds[QUERIES * B], dot[rows];
    for (long r = 0; r < rows; r++) {
        long at = ((start + r / group) * a->H + n * group + r % group) * X;
        vec sum = splat(0.0f);
        long i = 0;
        for (; i + W <= X; i += W) sum += load(a->out + at + i) * load(a->d_out + at + i);
        dot[r] = lane_sum(sum);
        for (; i < X; i++) dot[r] += a->out[at + i] * a->d_out[at + i];
    }
    for (long block = 0; block < stop - start; block += B) {
        long count = stop - start - block < B ? stop - start - block : B;
        const float *k[B], *v[B];
        float *dk[B], *dv[B];
        for (long m = 0; m < B; m++) {
            long row = start + block + (m < count ? m : count - 1);
            k[m] = a->k + row * a->k_stride + n * C, v[m] = a->v + row * a->v_stride + n * X;
            dk[m] = a->dk + (row * a->N + n) * C, dv[m] = a->dv + (row * a->N + n) * X;
            if (m < count) memset(dk[m], 0, C * sizeof(float)), memset(dv[m], 0, X * sizeof(float));
        }
        long last = a->window > 0 ? block + count + a->window - 1 : stop - start, chunk = -a->window;
        if (chunk > 0) last = ((block + count - 1) / chunk + 1) * chunk;
        if (last > stop - start) last = stop - start;
        for (long first = block * group; first < last * group; first += QUERIES) {
            long queries = last * group - first < QUERIES ? last * group - first : QUERIES;
            const float *q[QUERIES], *d_out[QUERIES];
            float *dq[QUERIES];
            for (long r = 0; r < queries; r++) {
                long t = start + (first + r) / group, h = n * group + (first + r) % group;
                q[r] = a->q + t * a->q_stride + h * C;
                d_out[r] = a->d_out + (t * a->H + h) * X;
                dq[r] = a->dq + (t * a->H + h) * C;
            }
            for (long r = 0; r < queries; r += 4) {
                long R = queries - r < 4 ? queries - r : 4;
                scores(R, q + r, k, C, 0, count, p + r * B, a->scale);
                scores(R, d_out + r, v, X, 0, count, ds + r * B, 1.0f);
            }
            for (long r = 0; r < queries; r++) {
                long t = (first + r) / group, h = n * group + (first + r) % group;
                float sum = a->sums[(start + t) * a->H + h];
                for (long m = 0; m < count; m += W)
                    store(p + r * B + m, vexp(load(p + r * B + m) - splat(sum)));
                for (long m = 0; m < count; m++) {
                    int seen = block + m <= t && (a->window <= 0 || block + m > t - a->window);
                    if (chunk > 0) seen = seen && (block + m) / chunk == t / chunk;
                    float weight = seen ? p[r * B + m] : 0.0f;
                    p[r * B + m] = weight;
                    ds[r * B + m] = seen ? weight * (ds[r * B + m] - dot[first + r]) * a->scale : 0.0f;
                }
            }
            for (long r = 0; r < queries; r += 4)
                weigh_all(queries - r < 4 ? queries - r : 4, ds + r * B, B, 1, k, 0, count, dq + r, C);
            for (long m = 0; m < count; m += 4) {
                long R = count - m < 4 ? count - m : 4;
                weigh_all(R, ds + m, 1, B, q, 0, queries, dk + m, C);
                weigh_all(R, p + m, 1, B, d_out, 0, queries, dv + m, X);
            }
        }
    }
}

/* dq must be zero; dq, dk, dv and d_out lie token by token without gaps. */
void attend_back(const float *q, const float *k, const float *v, const float *out, const float *sums,
                 const float *d_out, float *dq, float *dk, float *dv, const int64_t *spans, long S, long q_stride,
                 long k_stride, long v_stride, long H, long N, long C, long X, long window, float scale, int threads) {
    Back a = {q, k, v, out, sums, d_out, dq, dk, dv, q_stride, k_stride, v_stride, H, N, C, X, window, scale};
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (long item = 0; item < S * N; item++)
        back_head(&a, spans[4 * (item / N)], spans[4 * (item / N) + 1], item % N);
}
