/* A sweep of WarpLDA over one block of documents, and the alias tables it draws from.

   Within a block the tokens are gone through by word, by document, and by word again, so that what is looked up at random
   is one row of counts, a document's or a word's, which stays in the first cache. Counts are those of before the sweep
   (delayed), so a token's new topic depends on nothing that another thread does. */
#include "topics.h"

#define UNIT (1u << 20) /* a count of one, as a weight of an alias table */
#define TRIES 4

/* The tokens of a block by their words, and where each word begins there and ends. */
static int sort_by_word(const Words *block, long words, uint32_t **order, uint32_t **ends) {
    uint32_t *next = calloc(words + 1, sizeof *next);
    *order = malloc((block->kept + 1) * sizeof **order), *ends = next;
    if (!next || !*order) return 0;
    for (long i = 0; i < block->kept; i++) next[block->word[i]]++;
    for (long w = 0, sum = 0; w <= words; w++) {
        long mine = next[w];
        next[w] = (uint32_t)sum, sum += mine;
    }
    for (long i = 0; i < block->kept; i++) (*order)[next[block->word[i]]++] = (uint32_t)i;
    return 1;
}

/* Of each word: K cells of equal probability, each of two topics: its own below the upper 16 bits, else the lower 16. In
   whole numbers, so that nothing is left over at the end. */
void topics_alias(const int32_t *counts, uint32_t *alias, long words, long topics, long smoothing, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long w = 0; w < words; w++) {
        const int32_t *row = counts + w * topics;
        uint32_t *cells = alias + w * topics;
        int64_t total = 0, rest;
        for (long k = 0; k < topics; k++) total += (int64_t)row[k] * UNIT + smoothing;
#define WEIGHT(k) (((int64_t)row[k] * UNIT + smoothing) * topics)
        long light = 0, heavy = 0;
        while (light < topics && WEIGHT(light) > total) light++;
        while (heavy < topics && WEIGHT(heavy) <= total) heavy++;
        for (long k = 0; k < topics; k++) cells[k] = 0xffff0000u | (uint32_t)k;
        rest = heavy < topics ? WEIGHT(heavy) : 0;
        while (heavy < topics) {
            if (rest > total) { /* the light one's cell is filled up from the heavy one */
                int64_t mine = WEIGHT(light);
                cells[light] = (uint32_t)((double)mine / (double)total * 65536.0) << 16 | (uint32_t)heavy;
                if (mine == total) cells[light] = 0xffff0000u | (uint32_t)light;
                rest -= total - mine;
                for (light++; light < topics && WEIGHT(light) > total;) light++;
            } else { /* what is left of the heavy one is filled up from the next */
                long next = heavy + 1;
                while (next < topics && WEIGHT(next) <= total) next++;
                if (next < topics && rest < total) {
                    cells[heavy] = (uint32_t)((double)rest / (double)total * 65536.0) << 16 | (uint32_t)next;
                    rest = WEIGHT(next) - (total - rest);
                } else if (next < topics) rest = WEIGHT(next);
                heavy = next;
            }
        }
    }
}

/* In how many of these documents each token is. */
void topics_frequencies(const void *tokens, int wide, const int64_t *ends, long documents, int64_t *frequencies,
                        int64_t *seen, int64_t number) {
    for (long d = 0, t = 0; d < documents; d++, number++)
        for (; t < ends[d]; t++) {
            uint32_t token = wide ? ((const uint32_t *)tokens)[t] : ((const uint16_t *)tokens)[t];
            frequencies[token] += seen[token] != number;
            seen[token] = number;
        }
}

/* What a sweep has changed is counted when all that look at the counts are done. */
long topics_count(const void *tokens, int wide, const int32_t *term_of, const int64_t *ends, long documents,
                  const uint16_t *before, const uint16_t *after, int32_t *counts, int64_t *totals, long topics) {
    long size = documents ? ends[documents - 1] : 0, i = 0;
    for (long t = 0; t < size; t++) {
        int32_t term = term_of[wide ? ((const uint32_t *)tokens)[t] : ((const uint16_t *)tokens)[t]];
        if (term < 0) continue;
        uint16_t from = before[i], to = after[i++];
        if (from == to) continue;
        counts[term * topics + from]--, totals[from]--;
        counts[term * topics + to]++, totals[to]++;
    }
    return i;
}

/* `keys`: four for each of `steps`. `position`: how many tokens with a topic come before the block. Returns how many there
   are in it, or -1 where there is no memory. */
long topics_sweep(const void *tokens, int wide, const int32_t *term_of, const int64_t *ends, long documents,
                  const uint16_t *before, uint16_t *after, uint64_t position, const int32_t *counts,
                  const uint32_t *alias, const float *inverse, long words, long topics, float alpha, double alphas,
                  float beta, int steps, const uint64_t *keys) {
    Words block;
    uint32_t *order = NULL, *first = NULL;
    int opened = read_words(&block, tokens, wide, term_of, ends, documents) && sort_by_word(&block, words, &order, &first);
    uint16_t *proposed = malloc((block.kept + 1) * steps * sizeof *proposed);
    int32_t *own = calloc(topics, sizeof *own);
    if (!opened || !proposed || !own) {
        close_words(&block), free(order), free(first), free(proposed), free(own);
        return -1;
    }
    const uint32_t *last = block.last;

    /* By word: topics proposed in proportion to how often the word has them, without the token itself. */
    for (long w = 0, j = 0; w < words; w++) {
        const uint32_t *cells = alias + w * topics;
        const int32_t *row = counts + w * topics;
        for (; j < first[w]; j++) {
            long i = order[j];
            uint16_t own_topic = before[i];
            for (int m = 0; m < steps; m++) {
                uint64_t bits = mix(keys[4 * m] + (position + i + 1) * GOLDEN);
                uint16_t topic = own_topic;
                for (int tries = 0; tries < TRIES; tries++) {
                    uint32_t at = (uint32_t)((bits & 0xffffffffu) * (uint64_t)topics >> 32), cell = cells[at];
                    topic = ((bits >> 32) & 0xffff) < cell >> 16 ? (uint16_t)at : (uint16_t)cell;
                    if (topic != own_topic) break;
                    if ((float)(bits >> 48) * 0x1p-16f * ((float)row[topic] + beta) >= 1.0f) break;
                    bits = mix(bits + GOLDEN);
                }
                proposed[i * steps + m] = topic;
            }
        }
    }

    /* By document: those are accepted or not; then topics proposed as the document has them, from its other tokens. */
    for (long d = 0, from = 0; d < documents; d++) {
        long to = last[d], others = to - from - 1;
        double range = (double)others + alphas;
        for (long i = from; i < to; i++) own[before[i]]++;
        for (long i = from; i < to; i++) {
            uint16_t topic = before[i], own_topic = topic;
            for (int m = 0; m < steps; m++) {
                uint16_t other = proposed[i * steps + m];
                float chance = share(mix(keys[4 * m + 1] + (position + i + 1) * GOLDEN));
                float here = ((float)(own[topic] - (topic == own_topic)) + alpha) * inverse[topic];
                float there = ((float)(own[other] - (other == own_topic)) + alpha) * inverse[other];
                topic = chance * here < there ? other : topic;
            }
            after[i] = topic;
        }
        for (long i = from; i < to; i++) own[before[i]] = 0;
        for (long i = from; i < to; i++)
            for (int m = 0; m < steps; m++) {
                uint64_t bits = mix(keys[4 * m + 2] + (position + i + 1) * GOLDEN);
                double place = (double)(bits >> 32) * 0x1p-32 * range;
                long other = (long)place;
                other += from + (other >= i - from);
                uint16_t any = (uint16_t)((bits & 0xffffffffu) * (uint64_t)topics >> 32);
                proposed[i * steps + m] = place < (double)others ? after[other] : any;
            }
        from = to;
    }

    /* By word: those are accepted or not. */
    for (long w = 0, j = 0; w < words; w++) {
        const int32_t *row = counts + w * topics;
        for (; j < first[w]; j++) {
            long i = order[j];
            uint16_t own_topic = before[i], topic = after[i];
            for (int m = 0; m < steps; m++) {
                uint16_t other = proposed[i * steps + m];
                float chance = share(mix(keys[4 * m + 3] + (position + i + 1) * GOLDEN));
                float here = ((float)(row[topic] - (topic == own_topic)) + beta) * inverse[topic];
                float there = ((float)(row[other] - (other == own_topic)) + beta) * inverse[other];
                topic = chance * here < there ? other : topic;
            }
            after[i] = topic;
        }
    }
    close_words(&block), free(order), free(first), free(proposed), free(own);
    return block.kept;
}
