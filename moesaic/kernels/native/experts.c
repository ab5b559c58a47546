/* The weighted sum of each token's routed experts (SwiGLU). Each expert that is wanted is read once, whatever the
   number of its tokens; the shares of a token are added in the order of the experts. */
#include "matmul.h"
#include "stages.h"

#define WIDE 64 /* outputs of the second product that are taken together: a stretch of every expert's matrix */

/* The beginning of a stretch of weights, while another is worked on: the rest of it the processor sees coming. */
INLINE void ask_for(const float *weights) {
    for (long i = 0; i < 512; i += 16) __builtin_prefetch(weights + i, 0, 2);
}

/* Assignments, a token and one of its experts each, sorted by expert. Every thread sorts for itself. */
typedef struct {
    long actives, *first, *active; /* an expert's assignments begin at first[e]; the experts that have any */
    long *token, *source, *place;  /* of each assignment its token and where it came from; a token's, by expert */
    long *next;
} Sorted;

static Sorted sorted(const int64_t *routes, long tokens, long E, long K) {
    long A = tokens * K, *room = calloc(3 * E + 1 + 3 * A, sizeof *room);
    Sorted s = {0, room, room + E + 1, room + 3 * E + 1, room + 3 * E + 1 + A, room + 3 * E + 1 + 2 * A, room + 2 * E + 1};
    for (long a = 0; a < A; a++) s.first[routes[a] + 1]++;
    for (long e = 0; e < E; e++) {
        if (s.first[e + 1]) s.active[s.actives++] = e;
        s.first[e + 1] += s.first[e];
        s.next[e] = s.first[e];
    }
    for (long a = 0; a < A; a++) {
        long at = s.next[routes[a]]++;
        s.token[at] = a / K, s.source[at] = a;
        long *mine = s.place + a / K * K, i = a % K; /* a smaller place is an earlier expert: kept in that order */
        for (; i && mine[i - 1] > at; i--) mine[i] = mine[i - 1];
        mine[i] = at;
    }
    return s;
}

void experts_stage(Member *m, const float *x, const int64_t *routes, const float *weights, const float *gate_up,
                   const float *down, const float *bias, const float *shared, const float *plus, float *y,
                   float *hidden, long tokens, long D, long F, long E, long K, int clamped) {
    long A = tokens * K, up_blocks = (F + BLOCK - 1) / BLOCK, down_blocks = (D + WIDE - 1) / WIDE, from, to;
    Sorted s = sorted(routes, tokens, E, K);
    const float **xs = malloc(A * sizeof *xs);
    float **one = malloc(A * sizeof *one), **two = malloc(A * sizeof *two), *part = malloc(WIDE * A * sizeof *part);
    _Static_assert(WIDE >= 2 * BLOCK, "part serves both products");

    for (long a = 0; a < A; a++) xs[a] = x + s.token[a] * D, one[a] = part + a * 2 * BLOCK, two[a] = one[a] + BLOCK;
    while (take(m, s.actives * up_blocks, &from, &to))
        for (long item = from; item < to; item++) {
            long e = s.active[item / up_blocks], at = item % up_blocks * BLOCK, first = s.first[e];
            long count = F - at < BLOCK ? F - at : BLOCK, rows = s.first[e + 1] - first;
            const float *w = gate_up + e * 2 * F * D;
            ask_for(w + (F + at) * D);
            matmul(w, D, 2 * F - 1, at, count, xs + first, one, rows);
            matmul(w, D, 2 * F - 1, F + at, count, xs + first, two, rows);
            const float *own = bias ? bias + e * 2 * F : NULL;
            for (long a = 0; a < rows; a++) {
                for (long i = 0; own && i < count; i++) one[a][i] += own[at + i], two[a][i] += own[F + at + i];
                float *to = hidden + (first + a) * F + at, weight = weights[s.source[first + a]];
                if (clamped) clamped_swiglu_row(one[a], two[a], to, count, weight);
                else swiglu_row(one[a], two[a], to, count, weight);
            }
        }
    meet(m);

    for (long a = 0; a < A; a++) xs[a] = hidden + a * F, one[a] = part + a * WIDE;
    while (take(m, down_blocks, &from, &to))
        for (long block = from; block < to; block++) {
            long at = block * WIDE, count = D - at < WIDE ? D - at : WIDE;
            for (long i = 0; i < s.actives; i++) {
                long e = s.active[i], first = s.first[e];
                if (i + 1 < s.actives) ask_for(down + (s.active[i + 1] * D + at) * F);
                matmul(down + e * D * F, F, D - 1, at, count, xs + first, one + first, s.first[e + 1] - first);
            }
            for (long t = 0; t < tokens; t++)
                for (long o = 0; o < count; o++) {
                    float sum = 0.0f;
                    for (long c = 0; c < K; c++) sum += part[s.place[t * K + c] * WIDE + o];
                    if (shared) sum += shared[t * D + at + o];
                    y[t * D + at + o] = plus ? plus[t * D + at + o] + sum : sum;
                }
        }
    free(s.first), free(xs), free(one), free(two), free(part);
}

void experts(const float *x, const int64_t *routes, const float *weights, const float *gate_up, const float *down,
             const float *bias, float *y, long tokens, long D, long F, long E, long K, int clamped, int threads) {
    Team team = {0};
    float *hidden = malloc(tokens * K * F * sizeof *hidden);
#pragma omp parallel num_threads(threads)
    {
        Member m = join(&team);
        experts_stage(&m, x, routes, weights, gate_up, down, bias, NULL, NULL, y, hidden, tokens, D, F, E, K, clamped);
    }
    free(hidden);
}
