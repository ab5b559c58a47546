/* Sums of products of codes and rounded rows in plain C: what the other processors' ways must equal to the bit. */
#pragma once

#include "quantized.h"

INLINE int bits_of(int bits, const uint8_t *half, int o, int i) {
    int each = 8 / bits, q = i / 4;
    return half[q / each * 16 + 4 * o + i % 4] >> q % each * bits & ((1 << bits) - 1);
}

INLINE int one_code(int bits, const uint8_t *half, int o, int i) {
    int low = LOW(bits), high = bits > low ? bits_of(bits - low, half + 16 * low, o, i) << low : 0;
    return (bits_of(low, half, o, i) | high) - (bits == 8 ? 128 : 0);
}

/* A tile's sums over blocks of a group for R rows, by row, plane and half. */
INLINE void group_sums(int bits, int R, int planes, const uint8_t *codes, const int8_t *const *x, long padded,
                       long blocks, four_whole *sums) {
    memset(sums, 0, R * planes * 2 * sizeof *sums);
    for (long b = 0; b < blocks; b++, codes += BLOCK_INPUTS * bits)
        for (int o = 0; o < TILE; o++) {
            int8_t w[BLOCK_INPUTS];
            for (int i = 0; i < BLOCK_INPUTS; i++) w[i] = (int8_t)one_code(bits, codes + o / 4 * 16 * bits, o % 4, i);
            for (int k = 0; k < R * planes; k++) {
                const int8_t *from = x[k / planes] + k % planes * padded + b * BLOCK_INPUTS;
                int32_t sum = 0;
                for (int i = 0; i < BLOCK_INPUTS; i++) sum += (int32_t)w[i] * from[i];
                sums[2 * k + o / 4][o % 4] += sum;
            }
        }
}

INLINE four add_product(four a, four b, four c) {
    for (int i = 0; i < 4; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}
