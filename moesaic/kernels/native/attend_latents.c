/* Latent attention over chosen tokens: all heads of a query look at the same few latents, so that each is fetched once.

   The latents a query chose are taken in blocks of B, in order, with a running maximum and sum (online softmax): its
   result depends on nothing but its own. */
#if defined(__AVX512F__)
#define W 16
#endif
#include "attention.h"

#define HEADS 4 /* that meet 4 keys at a time */

#if W == 16
#define LANES(f, s)                                                                                                    \
    f(0, s), f(1, s), f(2, s), f(3, s), f(4, s), f(5, s), f(6, s), f(7, s), f(8, s), f(9, s), f(10, s), f(11, s),       \
        f(12, s), f(13, s), f(14, s), f(15, s)
#elif W == 8
#define LANES(f, s) f(0, s), f(1, s), f(2, s), f(3, s), f(4, s), f(5, s), f(6, s), f(7, s)
#else
#define LANES(f, s) f(0, s), f(1, s), f(2, s), f(3, s)
#endif
#define NEAR(l, s) ((l) & (s) ? W + (l) : (l))
#define FAR(l, s) ((l) & (s) ? W + ((l) ^ (s)) : ((l) ^ (s)))
/* Half of the way to the lane sums of two vectors: lanes with bit s are the second's. */
#define MERGE(a, b, s) (__builtin_shufflevector(a, b, LANES(NEAR, s)) + __builtin_shufflevector(a, b, LANES(FAR, s)))

/* W vectors become one of their lane sums. */
INLINE vec lane_sums(vec *v) {
#if W == 16
    UNROLL for (int i = 0; i < 8; i++) v[i] = MERGE(v[i], v[i + 8], 8);
#endif
#if W >= 8
    UNROLL for (int i = 0; i < 4; i++) v[i] = MERGE(v[i], v[i + 4], 4);
#endif
    UNROLL for (int i = 0; i < 2; i++) v[i] = MERGE(v[i], v[i + 2], 2);
    return MERGE(v[0], v[1], 1);
}

/* Scores of R heads against four keys; heads are C apart, and their scores B. */
INLINE void score_four(int R, const float *q, const float *const *k, long C, float *to, float scale) {
    vec sum[16];
    float sums[16];
    UNROLL for (int i = 0; i < 16; i++) sum[i] = splat(0.0f);
    long c = 0;
    for (; c + W <= C; c += W) {
        vec ks[4];
        UNROLL for (int j = 0; j < 4; j++) ks[j] = load(k[j] + c);
        UNROLL for (int r = 0; r < R; r++) {
            vec qs = load(q + r * C + c);
            UNROLL for (int j = 0; j < 4; j++) sum[r * 4 + j] = fused(sum[r * 4 + j], qs, ks[j]);
        }
    }
    UNROLL for (int i = 0; i < 16; i += W) store(sums + i, lane_sums(sum + i));
    for (; c < C; c++)
        for (int r = 0; r < R; r++)
            for (int j = 0; j < 4; j++) sums[r * 4 + j] += q[r * C + c] * k[j][c];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int j = 0; j < 4; j++) to[r * B + j] = sums[r * 4 + j] * scale;
}

typedef struct {
    float most, total;
} Head;

/* One head's scores of a block become weights; what it has gathered so far is scaled to the new maximum. */
static void weights_of(Head *head, float *s, long count, float *o, long X) {
    for (long m = count; m < B; m++) s[m] = -INFINITY;
    vec most = load(s), sum = splat(0.0f);
    for (long m = W; m < B; m += W) {
        vec more = load(s + m);
        most = pick(more > most, more, most);
    }
    float new_most = lane_max(most);
    if (head->most > new_most) new_most = head->most;
    float shrink = exp1(head->most - new_most);
    for (long m = 0; m < B; m += W) {
        vec p = vexp(load(s + m) - splat(new_most));
        store(s + m, p);
        sum += p;
    }
    head->total = head->total * shrink + lane_sum(sum);
    head->most = new_most;
    if (shrink != 1.0f)
        for (long i = 0; i < X; i++) o[i] *= shrink;
}

static void attend_one(const float *q, const float *latents, const int32_t *chosen, float *out, long topk, long stride,
                       long H, long C, long X, float scale) {
    const float *k[B];
    float *o[H], s[HEADS * B];
    Head head[H];
    for (long h = 0; h < H; h++) o[h] = out + h * X, head[h] = (Head){-INFINITY, 0.0f};
    memset(out, 0, H * X * sizeof *out);
    for (long block = 0; block < topk && chosen[block] >= 0; block += B) {
        long count = 0;
        for (; count < B && block + count < topk && chosen[block + count] >= 0; count++) {
            k[count] = latents + chosen[block + count] * stride;
            if (block + B + count < topk && chosen[block + B + count] >= 0) { /* the next block, while this is worked on */
                const float *next = latents + chosen[block + B + count] * stride;
                for (long c = 0; c < C; c += 16) __builtin_prefetch(next + c, 0, 2);
            }
        }
        for (long m = count; m < B; m++) k[m] = k[count - 1];
        for (long h = 0; h < H; h += HEADS) {
            int R = H - h < HEADS ? H - h : HEADS;
            for (long m = 0; m < count; m += 4) {
                if (R == 4) score_four(4, q + h * C, k + m, C, s + m, scale);
                else
                    for (int r = 0; r < R; r++) score_four(1, q + (h + r) * C, k + m, C, s + r * B + m, scale);
            }
            for (int r = 0; r < R; r++) weights_of(head + h + r, s + r * B, count, o[h + r], X);
            weigh_all(R, s, B, 1, k, 0, count, o + h, X);
        }
    }
    for (long h = 0; h < H; h++)
        for (long i = 0; i < X; i++) o[h][i] /= head[h].total;
}

/* Queries (T, H, C) and latents of one sequence, of which the first X numbers are values too; `chosen` is (T, topk), in
   order and -1 behind the last. */
void attend_latents(const float *q, const float *latents, const int32_t *chosen, float *out, long T, long topk,
                    long stride, long H, long C, long X, float scale, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 8) if (T > 1)
    for (long t = 0; t < T; t++)
        attend_one(q + t * H * C, latents, chosen + t * topk, out + t * H * X, topk, stride, H, C, X, scale);
}
