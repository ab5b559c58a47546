/* Many rows times a panel of quantized outputs on x86: codes are unpacked once, a stretch of inputs at a time, and meet
   four rows after the other. A lane of a vector is an output, so nothing has to be added across lanes. */
#pragma once

#include "quantized_x86.h"

#define PANELS 1
#define VECTORS (PANEL / (4 * LANES))       /* of a panel's outputs */
_Static_assert(VECTORS * 4 * LANES == PANEL, "a panel is whole vectors");
#define PLANES (LANES == 4 ? 6 : 8)         /* of rows that meet a panel together: their sums fill the registers */
#define STRETCH 256                         /* inputs whose codes, of one panel, stay in the nearest cache */

typedef struct {
    vector codes[STRETCH / 4 * VECTORS] __attribute__((aligned(64))); /* by quad of inputs */
    float scales[STRETCH / BLOCK_INPUTS * PANEL], zeros[STRETCH / BLOCK_INPUTS * PANEL];
} Unpacked;

/* LANES vectors of LANES lanes: lane i of vector j becomes lane j of vector i. */
INLINE void turn_lanes(vector *v) {
#ifdef __AVX512BW__
    vector ab = _mm512_shuffle_i64x2(v[0], v[1], 0x44), AB = _mm512_shuffle_i64x2(v[0], v[1], 0xee);
    vector cd = _mm512_shuffle_i64x2(v[2], v[3], 0x44), CD = _mm512_shuffle_i64x2(v[2], v[3], 0xee);
    v[0] = _mm512_shuffle_i64x2(ab, cd, 0x88), v[1] = _mm512_shuffle_i64x2(ab, cd, 0xdd);
    v[2] = _mm512_shuffle_i64x2(AB, CD, 0x88), v[3] = _mm512_shuffle_i64x2(AB, CD, 0xdd);
#else
    vector first = _mm256_permute2x128_si256(v[0], v[1], 0x20);
    v[1] = _mm256_permute2x128_si256(v[0], v[1], 0x31), v[0] = first;
#endif
}

/* Inputs from..to (whole blocks) of the panel that begins with `tile`; tiles that are not there repeat the last one. */
INLINE void unpack_codes(int bits, const Matrix *m, long tile, long from, long to, Unpacked *out) {
    const uint8_t *at[TOGETHER];
    UNROLL for (int i = 0; i < TOGETHER; i++) {
        long there = tile + i < tiles_of(m) ? tile + i : tiles_of(m) - 1;
        at[i] = m->codes + (there * m->padded + from) * bits;
    }
    vector *codes = out->codes;
    for (long block = from; block < to; block += BLOCK_INPUTS, codes += 8 * VECTORS) {
        UNROLL for (int n = 0; n < VECTORS; n++) UNROLL for (int part = 0; part < PARTS; part++) {
            vector v[LANES];
            UNROLL for (int h = 0; h < LANES; h++)
                v[h] = codes_of(bits, at[(n * LANES + h) / 2] + h % 2 * 16 * bits, part);
            turn_lanes(v);
            UNROLL for (int lane = 0; lane < LANES; lane++) codes[quad_of(bits, part, lane) * VECTORS + n] = v[lane];
        }
        UNROLL for (int i = 0; i < TOGETHER; i++) {
            UNROLL for (int line = 0; line < BLOCK_INPUTS * bits; line += 64)
                __builtin_prefetch(at[i] + AHEAD + line, 0, 3);
            at[i] += BLOCK_INPUTS * bits;
        }
    }
}

static void unpack_scales(const Matrix *m, long tile, long first, long last, Unpacked *out) {
    float middle = m->bits == 8 ? 0.0f : (float)(1 << (m->bits - 1)), less = m->bits == 8 ? 128.0f : 0.0f;
    for (long g = first; g < last; g++)
        for (long i = 0; i < TOGETHER; i++) {
            long there = tile + i < tiles_of(m) ? tile + i : tiles_of(m) - 1, at = (there * m->groups + g) * TILE;
            float *scales = out->scales + (g - first) * PANEL + i * TILE;
            float *zeros = out->zeros + (g - first) * PANEL + i * TILE;
            for (int o = 0; o < TILE; o++) {
                scales[o] = m->scales[at + o];
                zeros[o] = m->zeros ? m->zeros[at + o] - less : middle;
            }
        }
}

/* R rows, inputs from..to, which are whole groups or a part of one; `kept` holds the sums of a group in parts. */
INLINE void panel_rows(int bits, int R, int planes, const Matrix *m, const Rounded *x, const Unpacked *w, long from,
                       long to, const long *which, int32_t *kept, float *y) {
    const int8_t *rows[PLANES];
    UNROLL for (int k = 0; k < R * planes; k++)
        rows[k] = x->values + (which[k / planes] * planes + k % planes) * m->padded;
    const vector *codes = w->codes;
    const float *scales = w->scales, *zeros = w->zeros;
    for (long at = from, g = from / m->group; at < to; g++, scales += PANEL, zeros += PANEL) {
        long end = (g + 1) * m->group < m->padded ? (g + 1) * m->group : m->padded, stop = end < to ? end : to;
        vector sum[PLANES * VECTORS];
        UNROLL for (int k = 0; k < R * planes; k++) UNROLL for (int n = 0; n < VECTORS; n++) {
            if (at > g * m->group) sum[k * VECTORS + n] = load_lanes(kept + k * PANEL + n * 4 * LANES);
            else if (bits < 8) sum[k * VECTORS + n] = (vector){0};
            else sum[k * VECTORS + n] =
                     SIMD(set1_epi32)(-128 * x->wholes[(which[k / planes] * planes + k % planes) * m->groups + g]);
        }
        for (; at < stop; at += 16, codes += 4 * VECTORS)
            UNROLL for (int q = 0; q < 4; q++) UNROLL for (int k = 0; k < R * planes; k++) {
                int32_t four_inputs;
                memcpy(&four_inputs, rows[k] + at + 4 * q, 4);
                vector quad = SIMD(set1_epi32)(four_inputs);
                UNROLL for (int n = 0; n < VECTORS; n++)
                    sum[k * VECTORS + n] =
                        dot(bits, k % planes, sum[k * VECTORS + n], codes[q * VECTORS + n], quad);
            }
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < VECTORS; n++) {
            const vector *of = sum + r * planes * VECTORS + n;
            if (stop < end) {
                UNROLL for (int p = 0; p < planes; p++)
                    memcpy(kept + (r * planes + p) * PANEL + n * 4 * LANES, of + p * VECTORS, sizeof *of);
                continue;
            }
            float *total = y + r * PANEL + n * 4 * LANES;
            vector_float product = SIMD(cvtepi32_ps)(*of), scale = SIMD(loadu_ps)(scales + n * 4 * LANES);
            if (planes == 2) product = SIMD(fmadd_ps)(product, SIMD(set1_ps)(128.0f), SIMD(cvtepi32_ps)(of[VECTORS]));
            product = SIMD(fnmadd_ps)(SIMD(loadu_ps)(zeros + n * 4 * LANES),
                                      SIMD(set1_ps)(x->sums[which[r] * m->groups + g]), product);
            scale = SIMD(mul_ps)(scale, SIMD(set1_ps)(x->scales[which[r] * m->groups + g]));
            SIMD(storeu_ps)(total, SIMD(fmadd_ps)(product, scale, SIMD(loadu_ps)(total)));
        }
    }
}

/* A stretch of inputs for `rows` rows: as many at a time as fit into the registers. */
#define PANEL_ROWS(NAME, BITS, COUNT)                                                                                  \
    static __attribute__((noinline)) void NAME(const Matrix *m, const Rounded *x, const Unpacked *w, long from,        \
                                               long to, const long *which, long rows, int32_t *kept, float *y) {       \
        const long most = PLANES / COUNT;                                                                              \
        for (long t = 0, taken; t < rows; t += taken) {                                                                \
            long plain[8] = {t, t + 1, t + 2, t + 3, t + 4, t + 5, t + 6, t + 7}, left = rows - t;                     \
            const long *some = which ? which + t : plain;                                                              \
            int32_t *sums = kept ? kept + t * COUNT * PANEL : NULL;                                                    \
            float *to_y = y + t * PANEL;                                                                               \
            if (left >= most && !(most == 6 && left == 8)) /* two fours take less time than six and two */             \
                panel_rows(BITS, most, COUNT, m, x, w, from, to, some, sums, to_y), taken = most;                      \
            else if (most > 3 && left >= 4) panel_rows(BITS, 4, COUNT, m, x, w, from, to, some, sums, to_y), taken = 4; \
            else if (left >= 2) panel_rows(BITS, 2, COUNT, m, x, w, from, to, some, sums, to_y), taken = 2;            \
            else panel_rows(BITS, 1, COUNT, m, x, w, from, to, some, sums, to_y), taken = 1;                           \
        }                                                                                                              \
    }
/* Once they are unpacked, codes of fewer bits than 8 are all alike. */
PANEL_ROWS(panel_few_bits, 6, 1)
PANEL_ROWS(panel_few_bits_finely, 6, 2)
PANEL_ROWS(panel_eight_bits, 8, 1)
PANEL_ROWS(panel_eight_bits_finely, 8, 2)

/* The panel that begins with `tile` for `rows` rows, of which `which` are the numbers: y has PANEL numbers for each. */
INLINE void panel_any(int bits, const Matrix *m, const Rounded *x, long tile, const long *which, long rows, float *y) {
    Unpacked w;
    int32_t *kept = m->group > STRETCH ? malloc(rows * m->planes * PANEL * sizeof *kept) : NULL;
    memset(y, 0, rows * PANEL * sizeof *y);
    for (long from = 0, to; from < m->padded; from = to) {
        /* Whole groups, or as much of the one that has begun as there is room for. */
        long end = (from / m->group + 1) * m->group, room = from + STRETCH;
        to = end > room ? room : end + (room - end) / m->group * m->group;
        if (to > m->padded) to = m->padded;
        unpack_codes(bits, m, tile, from, to, &w);
        unpack_scales(m, tile, from / m->group, (to + m->group - 1) / m->group, &w);
        if (bits == 8)
            (m->planes == 1 ? panel_eight_bits : panel_eight_bits_finely)(m, x, &w, from, to, which, rows, kept, y);
        else (m->planes == 1 ? panel_few_bits : panel_few_bits_finely)(m, x, &w, from, to, which, rows, kept, y);
    }
    free(kept);
}
