/* DSA's indexer (DeepSeek-V3.2, GLM-5): light heads score all earlier tokens, and each query keeps the best.

   A score is summed over a key's dimensions and then over heads, one by one, and ties go to the earliest token: what a
   query keeps depends on nothing but itself and the keys before it. */
#if defined(__AVX512F__)
#define W 16 /* nothing here is laid across */
#endif
#include "vector.h"

#define KEYS 64    /* of a block, whose dimensions are brought side by side once for a tile of queries */
#define QUERIES 16 /* of a tile */
#define R 4        /* heads at a time */
#define V (W == 8 ? 2 : 4)
#define BINS 2048

/* Adds R heads' part of a query's scores of V vectors of keys. */
INLINE void add_heads(int heads, const float *q, const float *packed, const float *w, long C, float scale, float *to) {
    vec sum[R * V];
    UNROLL for (int i = 0; i < heads * V; i++) sum[i] = splat(0.0f);
    for (long c = 0; c < C; c++) {
        vec keys[V];
        UNROLL for (int i = 0; i < V; i++) keys[i] = load(packed + c * KEYS + i * W);
        UNROLL for (int h = 0; h < heads; h++) {
            vec qs = splat(q[h * C + c]);
            UNROLL for (int i = 0; i < V; i++) sum[h * V + i] = fused(sum[h * V + i], qs, keys[i]);
        }
    }
    UNROLL for (int i = 0; i < V; i++) {
        vec total = load(to + i * W);
        UNROLL for (int h = 0; h < heads; h++) {
            vec s = sum[h * V + i] * splat(scale);
            total = fused(total, splat(w[h]), pick(s > splat(0.0f), s, splat(0.0f)));
        }
        store(to + i * W, total);
    }
}

/* Scores of a tile's queries against keys 0..total, in rows of `width`. */
static void score_tile(const float *q, const float *k, const float *w, float *scores, float *packed, long queries,
                       long total, long width, long k_stride, long H, long C, float scale) {
    memset(scores, 0, queries * width * sizeof *scores);
    for (long block = 0; block < total; block += KEYS) {
        for (long m = 0; m < KEYS; m++)
            for (long c = 0; c < C; c++) packed[c * KEYS + m] = block + m < total ? k[(block + m) * k_stride + c] : 0.0f;
        for (long t = 0; t < queries; t++)
            for (long m = 0; m < KEYS; m += V * W) {
                float *to = scores + t * width + block + m;
                long h = 0;
                for (; h + R <= H; h += R) add_heads(R, q + (t * H + h) * C, packed + m, w + t * H + h, C, scale, to);
                for (; h < H; h++) add_heads(1, q + (t * H + h) * C, packed + m, w + t * H + h, C, scale, to);
            }
    }
}

/* The bin, of `bits` bits at `shift`, that holds the wanted-th largest of n numbers; `wanted` becomes its place there. */
static uint32_t bin_of(const uint32_t *numbers, long n, int shift, int bits, long *wanted) {
    uint32_t counts[2 * BINS]; /* two, so that equal neighbours need not wait for one another */
    uint32_t last = (1u << bits) - 1;
    memset(counts, 0, sizeof counts);
    long m = 0;
    for (; m + 2 <= n; m += 2) counts[numbers[m] >> shift & last]++, counts[BINS + (numbers[m + 1] >> shift & last)]++;
    if (m < n) counts[numbers[m] >> shift & last]++;
    uint32_t bin = last;
    for (;; bin--) {
        long here = counts[bin] + counts[BINS + bin];
        if (*wanted <= here || bin == 0) return bin;
        *wanted -= here;
    }
}

/* The topk largest of n > topk scores, in order of place. What is left in `scores` is of no use; `spare` has room for n. */
static void keep_best(float *scores, uint32_t *spare, int32_t *chosen, long n, long topk) {
    uint32_t *numbers = (uint32_t *)scores;
    for (long m = 0; m < n; m++) { /* in the order of the floats; both zeros are one */
        float score = scores[m] + 0.0f;
        uint32_t bits;
        memcpy(&bits, &score, sizeof bits);
        numbers[m] = bits ^ (bits & 0x80000000u ? 0xffffffffu : 0x80000000u);
    }
    long wanted = topk, left = 0;
    uint32_t least = bin_of(numbers, n, 21, 11, &wanted) << 21;
    for (long m = 0; m < n; m++) spare[left] = numbers[m], left += (numbers[m] ^ least) >> 21 == 0;
    least |= bin_of(spare, left, 10, 11, &wanted) << 10;
    long fewer = 0;
    for (long m = 0; m < left; m++) {
        uint32_t number = spare[m];
        spare[fewer] = number, fewer += (number ^ least) >> 10 == 0;
    }
    least |= bin_of(spare, fewer, 0, 10, &wanted); /* now the smallest that is kept, of which the first `wanted` are */
    long kept = 0;
    for (long m = 0; m < n && kept < topk; m++) {
        int tied = numbers[m] == least;
        chosen[kept] = m;
        kept += (numbers[m] > least) | (tied & (wanted > 0));
        wanted -= tied;
    }
}

/* The queries (T, H, C) are those of a sequence's last tokens, the keys (M, C) those of all; `chosen` is (T, topk), filled
   up with -1. */
void select_tokens(const float *q, const float *k, const float *w, int32_t *chosen, long T, long M, long k_stride, long H,
                   long C, long topk, float scale, int threads) {
    long width = (M + KEYS - 1) / KEYS * KEYS, tiles = (T + QUERIES - 1) / QUERIES, before = M - T;
#pragma omp parallel num_threads(threads) if (T > 1)
    {
        float *packed = aligned_alloc(64, KEYS * C * sizeof *packed);
        float *scores = aligned_alloc(64, QUERIES * width * sizeof *scores);
        uint32_t *spare = malloc((width + 1) * sizeof *spare);
#pragma omp for schedule(dynamic, 1)
        for (long tile = 0; tile < tiles; tile++) {
            long first = tile * QUERIES, last = first + QUERIES < T ? first + QUERIES : T;
            int all = before + last <= topk; /* nothing to score */
            if (!all)
                score_tile(q + first * H * C, k, w + first * H, scores, packed, last - first, before + last, width,
                           k_stride, H, C, scale);
            for (long t = first; t < last; t++) {
                long seen = before + t + 1;
                int32_t *to = chosen + t * topk;
                if (seen > topk) keep_best(scores + (t - first) * width, spare, to, seen, topk);
                else
                    for (long m = 0; m < topk; m++) to[m] = m < seen ? m : -1;
            }
        }
        free(packed), free(scores), free(spare);
    }
}
