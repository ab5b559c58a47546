/* A sweep over one block of documents that draws each token's topic from its conditional (SaberLDA's sparsity-aware
   sampling): a document has few topics, so the part of the conditional that goes with their counts is a short sum; what the
   prior adds is drawn from the word's own sums. By word, so that its row stays in the first cache; counts are those of
   before the sweep, without the token itself. Weights are whole numbers: their sums are the same in any order. */
#include "topics.h"

typedef struct {
    uint32_t topic;
    int32_t count;
} Own;

static inline int64_t weight(int32_t count, double beta, double scale) { return (int64_t)(((double)count + beta) * scale) + 1; }

/* The topics of every document with their counts, as they come; and whose each token is. */
static void list_topics(const Block *block, const uint16_t *before, long documents, int32_t *own, Own *list,
                        uint32_t *begins, uint32_t *document) {
    uint32_t size = 0;
    for (long d = 0, i = 0; d < documents; d++) {
        begins[d] = size;
        for (; i < block->last[d]; i++) {
            if (!own[before[i]]++) list[size++].topic = before[i];
            document[i] = (uint32_t)d;
        }
        for (uint32_t at = begins[d]; at < size; at++) list[at].count = own[list[at].topic], own[list[at].topic] = 0;
    }
    begins[documents] = size;
}

/* Of `sums`, the running sums of a row, the first above `target`. */
static inline uint16_t above(const int64_t *sums, long topics, int64_t target) {
    long low = 0;
    for (long left = topics; left > 1;) {
        long half = left / 2;
        low += sums[low + half - 1] <= target ? half : 0;
        left -= half;
    }
    return (uint16_t)low;
}

/* As `topics_sweep`; `scale` is 2^40 over the smoothed number of words of each topic. */
long topics_draw(const void *tokens, int wide, const int32_t *term_of, const int64_t *ends, long documents,
                 const uint16_t *before, uint16_t *after, uint64_t position, const int32_t *counts, const double *scale,
                 int32_t *changed, long words, long topics, double alpha, double beta, uint64_t key) {
    Block block;
    int opened = open_block(&block, tokens, wide, term_of, ends, documents, words);
    long kept = block.kept;
    Own *list = malloc((kept + 1) * sizeof *list);
    uint32_t *begins = malloc((documents + 1) * sizeof *begins), *document = malloc((kept + 1) * sizeof *document);
    int32_t *own = calloc(topics, sizeof *own);
    int64_t *row = malloc(topics * sizeof *row), *sums = malloc(topics * sizeof *sums);
    if (!opened || !list || !begins || !document || !own || !row || !sums) kept = -1;
    else list_topics(&block, before, documents, own, list, begins, document);
    for (long w = 0, j = 0; kept >= 0 && w < words; w++) {
        if (j == block.first[w]) continue;
        const int32_t *count = counts + w * topics;
        for (long k = 0; k < topics; k++) row[k] = weight(count[k], beta, scale[k]);
        int64_t total = 0;
        for (long k = 0; k < topics; k++) sums[k] = total += row[k];
        for (; j < block.first[w]; j++) {
            long i = block.order[j];
            const Own *from = list + begins[document[i]], *to = list + begins[document[i] + 1];
            uint16_t old = before[i], topic = old;
            int64_t mine = weight(count[old] - 1, beta, scale[old]), rest = total - row[old] + mine, sum = 0, had = 0;
            for (const Own *o = from; o < to; o++) {
                sum += o->count * row[o->topic];
                had = o->topic == old ? o->count : had;
            }
            sum += (had - 1) * mine - had * row[old];
            uint64_t bits = mix(key + (position + i + 1) * GOLDEN);
            int64_t prior = (int64_t)(alpha * (double)rest);
            int64_t target = (int64_t)((double)(bits >> 32) * 0x1p-32 * (double)(sum + prior));
            if (target < sum) {
                for (const Own *o = from; o < to; o++) {
                    target -= o->topic == old ? (o->count - 1) * mine : o->count * row[o->topic];
                    if (target < 0) {
                        topic = (uint16_t)o->topic;
                        break;
                    }
                }
            } else {
                target = (int64_t)((double)(bits & 0xffffffffu) * 0x1p-32 * (double)rest);
                if (target >= sums[old] - row[old] + mine) target += row[old] - mine; /* behind what is left of the old one */
                topic = above(sums, topics, target);
            }
            after[i] = topic;
            if (topic != old) move(changed + w * topics, old, topic);
        }
    }
    close_block(&block);
    free(list), free(begins), free(document), free(own), free(row), free(sums);
    return kept;
}
