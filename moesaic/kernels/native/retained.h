/* Compact requests: what one of them retains of one layer lies anywhere in the cache (`serve/core/kv/compact.py`). */
#pragma once

#include "stages.h"

/* All fields have 8 bytes: Python fills arrays of them (`native/retained_rows.py`), one for each layer and request. */
struct Retained {
    const int32_t *rows;   /* (N, stride): where each plain row lies, oldest first, those of the new tokens last */
    const int64_t *counts; /* (N): how many of the `plain` columns, the last ones, a head has */
    const int32_t *coded;  /* (N, blocks * rows_each): where the blocks of codes lie, which come before all plain rows */
    float *scores;         /* (N, stride): the attention that every row has got, or NULL where nobody asks */
    uint16_t *queries;     /* (last, H, C): the last queries in bfloat16, those of position p at p % last, or NULL */
    long stride, plain, blocks;
    long rows_each, tokens, bits; /* of a block: rows of the cache, tokens, bits of a code */
    long key_width, value_width;  /* numbers of a token that share a scale; 0: each channel of a block has its own */
    long position, last;          /* of the first new token; how many queries are kept */
    long scored;                  /* new tokens before this one add nothing to the scores */
    double decay;                 /* of a score, with every scored token after it */
};

/* Where the key and the value of head n of the batch's token t, of sequence s, go: in rows of one head. */
INLINE long cache_row(const Attention *a, long s, long t, long n) {
    const int64_t *span = a->spans + 4 * s;
    if (!a->retained) return page_row(a, s, t - span[0] + span[2]) * a->N + n;
    const Retained *kept = a->retained + s;
    return kept->rows[n * kept->stride + kept->plain - (span[1] - t)];
}
