#include "product.h"

/* The weighted sum of each token's routed experts (SwiGLU). Each expert that is wanted is read once, whatever the
   number of its tokens; the shares of a token are added in the order of the experts. */
void experts(const float *x, const int64_t *routes, const float *weights, const float *gate_up, const float *down,
            float *y, long tokens, long D, long F, long E, long K, int threads) {
    long A = tokens * K; /* assignments: a token and one of its experts */
    long *first = calloc(E + 1, sizeof *first), *next = malloc(E * sizeof *next), *active = malloc(E * sizeof *active);
    const float **xs = malloc(A * sizeof *xs), **hs = malloc(A * sizeof *hs);
    float *hidden = malloc(A * F * sizeof *hidden), *part = malloc(A * D * sizeof *part), *weight = malloc(A * sizeof *weight);
    long *place = malloc(A * sizeof *place); /* the assignments of each token, by expert */
    long actives = 0;
    for (long a = 0; a < A; a++) first[routes[a] + 1]++;
    for (long e = 0; e < E; e++) {
        if (first[e + 1]) active[actives++] = e;
        first[e + 1] += first[e];
        next[e] = first[e];
    }
    for (long a = 0; a < A; a++) {
        long at = next[routes[a]]++;
        xs[at] = x + a / K * D;
        hs[at] = hidden + at * F;
        weight[at] = weights[a];
        place[a] = at; /* sorted assignments run by expert, so a smaller place is an earlier expert */
    }
    for (long t = 0; t < tokens; t++)
        for (long i = 1; i < K; i++)
            for (long j = i; j && place[t * K + j - 1] > place[t * K + j]; j--) {
                long swap = place[t * K + j];
                place[t * K + j] = place[t * K + j - 1];
                place[t * K + j - 1] = swap;
            }
    long up_blocks = (F + BLOCK - 1) / BLOCK, down_blocks = (D + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads)
    {
        float *both = malloc(2 * BLOCK * A * sizeof *both);
        float **gates = malloc(A * sizeof *gates), **ups = malloc(A * sizeof *ups), **ys = malloc(A * sizeof *ys);
        for (long a = 0; a < A; a++) gates[a] = both + a * 2 * BLOCK, ups[a] = gates[a] + BLOCK;
#pragma omp for schedule(dynamic, 4)
        for (long item = 0; item < actives * up_blocks; item++) {
            long e = active[item / up_blocks], at = item % up_blocks * BLOCK, rows = first[e + 1] - first[e];
            long count = F - at < BLOCK ? F - at : BLOCK;
            const float *w = gate_up + e * 2 * F * D;
            product(w, D, 2 * F - 1, at, count, xs + first[e], gates, rows);
            product(w, D, 2 * F - 1, F + at, count, xs + first[e], ups, rows);
            for (long a = 0; a < rows; a++)
                swiglu_row(gates[a], ups[a], hidden + (first[e] + a) * F + at, count, weight[first[e] + a]);
        }
#pragma omp for schedule(dynamic, 4)
        for (long block = 0; block < down_blocks; block++) {
            long at = block * BLOCK, count = D - at < BLOCK ? D - at : BLOCK;
            for (long i = 0; i < actives; i++) {
                long e = active[i], rows = first[e + 1] - first[e];
                for (long a = 0; a < rows; a++) ys[a] = part + (first[e] + a) * D + at;
                product(down + e * D * F, F, D - 1, at, count, hs + first[e], ys, rows);
            }
            for (long t = 0; t < tokens; t++)
                for (long o = at; o < at + count; o++) {
                    float sum = 0.0f;
                    for (long c = 0; c < K; c++) sum += part[place[t * K + c] * D + o];
                    y[t * D + o] = sum;
                }
        }
        free(both), free(gates), free(ups), free(ys);
    }
    free(first), free(next), free(active), free(xs), free(hs), free(hidden), free(part), free(weight), free(place);
}
