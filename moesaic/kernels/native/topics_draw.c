/* A sweep over one block of documents that draws each token's topic from its conditional, in vectors of sixteen topics.

   Document by document, so that a token sees what its document's other tokens have just been given; counts of words are
   those of before the sweep, without the token itself. Running sums go down sixteen lanes at once and then across them
   (SaberLDA draws so with the lanes of a GPU's warp): the lane a draw falls into is found first, then the place in it. */
#pragma GCC optimize("fp-contract=off") /* the bits are those of the NumPy form */
#pragma STDC FP_CONTRACT OFF
#include "topics.h"
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16
#define AHEAD 4 /* tokens whose words' counts are fetched meanwhile */

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t ilanes __attribute__((vector_size(4 * LANES)));
typedef int32_t loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define SHIFTED(x, ...) __builtin_shufflevector(x, (lanes){0}, __VA_ARGS__)

/* Of each lane the sum of it and those before. */
static inline lanes across(lanes x) {
    x += SHIFTED(x, 16, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14);
    x += SHIFTED(x, 16, 16, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13);
    x += SHIFTED(x, 16, 16, 16, 16, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11);
    x += SHIFTED(x, 16, 16, 16, 16, 16, 16, 16, 16, 0, 1, 2, 3, 4, 5, 6, 7);
    return x;
}

/* How many lanes but the last end at or before a target. */
static inline long passed(lanes ends, float target) {
#ifdef __AVX512F__
    return __builtin_popcount(_mm512_cmp_ps_mask((__m512)ends, _mm512_set1_ps(target), _CMP_LE_OQ) & 0x7fff);
#else
    ilanes those = ends <= target;
    long found = 0;
    for (int l = 0; l < LANES - 1; l++) found -= those[l];
    return found;
#endif
}

/* `inverse`: one over the smoothed words of each topic. `counts` may be read sixteen numbers beyond its end. Returns how many
   tokens have a topic, or -1 where there is no memory. */
long topics_draw(const void *tokens, int wide, const int32_t *term_of, const int64_t *ends, long documents,
                 const uint16_t *before, uint16_t *after, uint64_t position, const int32_t *counts, const float *inverse,
                 long topics, float alpha, float beta, uint64_t key) {
    Words block;
    long rows = (topics + LANES - 1) / LANES;
    int opened = read_words(&block, tokens, wide, term_of, ends, documents);
    int32_t *own = calloc(topics, sizeof *own);
    lanes *part = aligned_alloc(sizeof(lanes), rows * sizeof *part), *sums = aligned_alloc(sizeof(lanes), rows * sizeof *sums);
    long kept = opened && own && part && sums ? block.kept : -1;
    if (kept >= 0) memset(part, 0, rows * sizeof *part);
    float *of = (float *)part, *sum_of = (float *)sums;
    for (long d = 0, from = 0; kept >= 0 && d < documents; d++) {
        long to = block.last[d];
        for (long i = from; i < to; i++) own[before[i]]++;
        for (long k = 0; k < topics; k++) of[k] = ((float)own[k] + alpha) * inverse[k];
        for (long i = from; i < to; i++) {
            const int32_t *count = counts + (long)block.word[i] * topics;
            if (i + AHEAD < kept)
                for (long k = 0; k < topics; k += LANES) __builtin_prefetch(counts + (long)block.word[i + AHEAD] * topics + k);
            uint16_t old = before[i];
            own[old]--;
            float others = (float)count[old] + beta;
            of[old] = ((float)own[old] + alpha) * inverse[old] * ((others - 1.0f) / others);
            lanes sum = {0};
            for (long r = 0; r < rows; r++) {
                ilanes row = (ilanes)(*(const loose *)(count + r * LANES));
                sums[r] = sum += part[r] * (__builtin_convertvector(row, lanes) + beta);
            }
            lanes ends_at = across(sum);
            uint64_t bits = mix(key + (position + i + 1) * GOLDEN);
            float target = share(bits) * ends_at[LANES - 1];
            long lane, low = 0;
            lane = passed(ends_at, target);
            target -= lane ? ends_at[lane - 1] : 0.0f;
            for (long left = rows; left > 1;) {
                long half = left / 2;
                low += sum_of[(low + half - 1) * LANES + lane] <= target ? half : 0;
                left -= half;
            }
            long topic = low * LANES + lane;
            topic = topic < topics ? topic : old;
            own[topic]++;
            of[old] = ((float)own[old] + alpha) * inverse[old];
            of[topic] = ((float)own[topic] + alpha) * inverse[topic];
            after[i] = (uint16_t)topic;
        }
        for (long i = from; i < to; i++) own[after[i]] = 0;
        from = to;
    }
    close_words(&block);
    free(own), free(part), free(sums);
    return kept;
}
