/* A block of documents for sampling topics: its words and where documents end. Draws are hashes of a token's position. Sums
   and products of floats are written so that no compiler can fuse them: the bits are those of the NumPy form. */
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

static inline float share(uint64_t bits) { return (float)(bits >> 40) * 0x1p-24f; }

typedef struct {
    uint32_t *word, *last; /* of a token; where each document ends */
    long kept;
} Words;

static inline void close_words(Words *block) { free(block->word), free(block->last); }

static inline int read_words(Words *block, const void *tokens, int wide, const int32_t *term_of, const int64_t *ends,
                             long documents) {
    long size = documents ? ends[documents - 1] : 0, kept = 0;
    uint32_t *word = malloc((size + 1) * sizeof *word), *last = malloc((documents + 1) * sizeof *last);
    *block = (Words){word, last, 0};
    if (!word || !last) return 0;
    for (long d = 0, t = 0; d < documents; d++) {
        for (; t < ends[d]; t++) {
            int32_t term = term_of[wide ? ((const uint32_t *)tokens)[t] : ((const uint16_t *)tokens)[t]];
            word[kept] = (uint32_t)term;
            kept += term >= 0;
        }
        last[d] = (uint32_t)kept;
    }
    block->kept = kept;
    return 1;
}
