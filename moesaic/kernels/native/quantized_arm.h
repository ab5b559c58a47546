/* Sums of products of codes and rounded rows by ARM's dot products of bytes. */
#pragma once

#include <arm_neon.h>

#include "quantized.h"

INLINE uint8x16_t bits_of(int bits, const uint8_t *half, int q) {
    int each = 8 / bits, shift = q % each * bits;
    uint8x16_t codes = vld1q_u8(half + q / each * 16);
    if (shift) codes = vshlq_u8(codes, vdupq_n_s8((int8_t)-shift));
    if (shift + bits < 8) codes = vandq_u8(codes, vdupq_n_u8((uint8_t)((1 << bits) - 1)));
    return codes;
}

/* Four inputs of four outputs; 8 bits come out less 128, so that they are signed. */
INLINE int8x16_t quad(int bits, const uint8_t *half, int q) {
    int low = LOW(bits);
    uint8x16_t codes = bits_of(low, half, q);
    if (bits == 8) codes = veorq_u8(codes, vdupq_n_u8(128));
    if (bits > low) {
        uint8x16_t high = bits_of(bits - low, half + 16 * low, q);
        codes = vorrq_u8(codes, low == 2 ? vshlq_n_u8(high, 2) : vshlq_n_u8(high, 4));
    }
    return vreinterpretq_s8_u8(codes);
}

/* Which of the four inputs of x they meet must be said in so many words. */
INLINE int32x4_t dots(int32x4_t sum, int8x16_t w, int8x16_t x, int lane) {
    return lane == 0   ? vdotq_laneq_s32(sum, w, x, 0)
           : lane == 1 ? vdotq_laneq_s32(sum, w, x, 1)
           : lane == 2 ? vdotq_laneq_s32(sum, w, x, 2)
                       : vdotq_laneq_s32(sum, w, x, 3);
}

/* A tile's sums over blocks of a group for R rows, by row, plane and half. */
INLINE void group_sums(int bits, int R, int planes, const uint8_t *codes, const int8_t *const *x, long padded,
                       long blocks, four_whole *sums) {
    int32x4_t sum[16];
    UNROLL for (int i = 0; i < R * planes * 2; i++) sum[i] = vdupq_n_s32(0);
    for (long b = 0; b < blocks; b++, codes += BLOCK_INPUTS * bits) {
        UNROLL for (int line = 0; line < BLOCK_INPUTS * bits; line += 64) __builtin_prefetch(codes + AHEAD + line, 0, 3);
        UNROLL for (int part = 0; part < 2; part++) {
            int8x16_t values[8];
            UNROLL for (int k = 0; k < R * planes; k++)
                values[k] = vld1q_s8(x[k / planes] + k % planes * padded + b * BLOCK_INPUTS + part * 16);
            UNROLL for (int half = 0; half < 2; half++) UNROLL for (int q = 0; q < 4; q++) {
                int8x16_t w = quad(bits, codes + half * 16 * bits, 4 * part + q);
                UNROLL for (int k = 0; k < R * planes; k++) sum[2 * k + half] = dots(sum[2 * k + half], w, values[k], q);
            }
        }
    }
    UNROLL for (int i = 0; i < R * planes * 2; i++) sums[i] = (four_whole)sum[i];
}

INLINE four add_product(four a, four b, four c) {
    return (four)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
