/* Matrices of small integers: weight = scale * (code - zero), within groups of inputs.

   Eight outputs lie together as a tile, so that a product reads memory from front to back. A tile is, for every 32 of
   its inputs, two halves of four outputs; a half is vectors of 16 bytes, byte 4 o + j of which belongs to output o and
   to inputs 4 q + j of as many quads q as it has room for, the first lowest. 3 bits are the vectors of the two low bits,
   then those of the high one; 5 and 6 those of the four low bits, then of the rest. Scales and zeros are (tiles, groups, 8). */
#pragma once

#include "team.h"
#include "vector.h"

#define TILE 8
#define BLOCK_INPUTS 32
#define AHEAD 2048 /* bytes: memory answers after about as long as it takes to go through them */
/* 3, 5 and 6 bits are as many low bits, and then the high ones. */
#define LOW(bits) ((bits) == 3 ? 2 : (bits) == 5 || (bits) == 6 ? 4 : (bits))

/* Tiles whose codes are unpacked together once there are MANY rows to meet them. */
#if defined(__AVX512BW__) && defined(__FMA__)
#define TOGETHER 8
#else
#define TOGETHER 1
#endif
#define MANY 4
#define PANEL (TOGETHER * TILE)

typedef int32_t four_whole __attribute__((vector_size(16)));

typedef struct {
    const uint8_t *codes;
    const float *scales, *zeros; /* zeros may be NULL: the middle of the codes */
    long inputs, outputs, bits, group, planes;
    long padded, groups; /* inputs in whole blocks */
} Matrix;

/* Rows as integers, to be multiplied with a certain matrix, or others with its inputs, group and planes. */
typedef struct {
    int8_t *values;       /* (rows, planes, padded) */
    float *scales, *sums; /* (rows, groups): of the integers, and the sums of these */
    int32_t *wholes;      /* (rows, planes, groups): the sums of each plane */
} Rounded;

INLINE long rounded_bytes(const Matrix *m) {
    return m->planes * m->padded + (2 + m->planes) * m->groups * (long)sizeof(float);
}
INLINE Rounded rounded_at(const Matrix *m, void *room, long rows) {
    float *scales = room, *sums = scales + rows * m->groups;
    int32_t *wholes = (int32_t *)(sums + rows * m->groups);
    return (Rounded){(int8_t *)(wholes + rows * m->planes * m->groups), scales, sums, wholes};
}
INLINE long tiles_of(const Matrix *m) { return (m->outputs + TILE - 1) / TILE; }

void round_row(const float *x, const Matrix *m, const Rounded *to, long row);

/* Room for floats where a cache line begins: a vector that lies across two is written at half the speed. */
INLINE float *numbers(long count) { return aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64); }

/* How many tiles at a time a product with so many rows is best shared out by. */
INLINE long tiles_together(long rows) { return rows >= MANY ? TOGETHER : 1; }

/* `tiles` (1 or TOGETHER) of them for `rows` rows, of which `which` are the numbers (NULL: 0, 1, ...): y has
   tiles * TILE numbers for each, those past the matrix's last tile in vain. */
void tile_product(const Matrix *m, const Rounded *x, long tile, long tiles, const long *which, long rows, float *y);

/* Every tile of the product, shared out to a team: y = x w' + bias (+ plus). */
void quantized_stage(Member *team, const Matrix *m, const Rounded *x, const float *bias, const float *plus, float *y,
                     long rows);
