/* A block of documents for sampling topics: its words, where documents end, and the order of tokens by word. Draws are
   hashes of a token's position. Sums and products of floats are written so that no compiler can fuse them: the bits are
   those of the NumPy form. */
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define GOLDEN 0x9E3779B97F4A7C15u

static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

typedef struct {
    uint32_t *word, *order, *first, *last; /* of a token; tokens by word; where each word ends there; each document */
    long kept, words;
} Block;

static inline void close_block(Block *block) {
    free(block->word), free(block->order), free(block->first), free(block->last);
}

static inline int open_block(Block *block, const void *tokens, int wide, const int32_t *term_of, const int64_t *ends,
                             long documents, long words) {
    long size = documents ? ends[documents - 1] : 0, kept = 0;
    uint32_t *word = malloc((size + 1) * sizeof *word), *order = malloc((size + 1) * sizeof *order);
    uint32_t *first = calloc(words + 1, sizeof *first), *last = malloc((documents + 1) * sizeof *last);
    *block = (Block){word, order, first, last, 0, words};
    if (!word || !order || !first || !last) return 0;
    for (long d = 0, t = 0; d < documents; d++) {
        for (; t < ends[d]; t++) {
            int32_t term = term_of[wide ? ((const uint32_t *)tokens)[t] : ((const uint16_t *)tokens)[t]];
            word[kept] = (uint32_t)term;
            kept += term >= 0;
        }
        last[d] = (uint32_t)kept;
    }
    for (long i = 0; i < kept; i++) first[word[i]]++;
    for (long w = 0, sum = 0; w <= words; w++) {
        long mine = first[w];
        first[w] = (uint32_t)sum, sum += mine;
    }
    for (long i = 0; i < kept; i++) order[first[word[i]]++] = (uint32_t)i; /* `first` is now the end of each word */
    block->kept = kept;
    return 1;
}

/* Threads share the counts of changes. */
static inline void move(int32_t *changed, uint16_t from, uint16_t to) {
    __atomic_fetch_sub(changed + from, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(changed + to, 1, __ATOMIC_RELAXED);
}
