/* Sums of products of codes and rounded rows by AVX2 or AVX-512, with VNNI where the processor has it.

   These instructions multiply unsigned bytes (codes) by signed ones (rows). 8 bits therefore stay as they are stored,
   and 128 times the sum of the row's integers is taken off afterwards: all in whole numbers, so the result is that of
   quantized_plain.h.

   A vector is LANES lanes of 16 bytes, each four inputs (a quad) of four outputs. */
#pragma once

#include <immintrin.h>

#include "quantized.h"

#ifdef __AVX512BW__
#define LANES 4
#define SIMD(name) _mm512_##name
typedef __m512i vector;
typedef __m512 vector_float;
#else
#define LANES 2
#define SIMD(name) _mm256_##name
typedef __m256i vector;
typedef __m256 vector_float;
#endif
#define PARTS (8 / LANES) /* vectors of a half's 32 inputs */

typedef uint32_t words __attribute__((vector_size(16 * LANES)));

INLINE vector load_lanes(const void *from) {
#ifdef __AVX512BW__
    return _mm512_loadu_si512(from);
#else
    return _mm256_loadu_si256(from);
#endif
}
INLINE vector one_lane(const uint8_t *from) {
#ifdef __AVX512BW__
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)from));
#else
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)from));
#endif
}

/* Which quad a lane of a part holds: of fewer than 8 bits every other one, because neighbours share bytes. */
INLINE int quad_of(int bits, int part, int lane) {
    return bits == 8 ? part * LANES + lane : 2 * (part / 2 * LANES + lane) + part % 2;
}

/* A number for every quad of a part. */
#define BY_LANE(expression)                                                                                            \
    ({                                                                                                                 \
        words found;                                                                                                   \
        UNROLL for (int at = 0; at < 4 * LANES; at++) {                                                                \
            int q = quad_of(bits, part, at / 4);                                                                       \
            found[at] = (expression);                                                                                  \
        }                                                                                                              \
        found;                                                                                                         \
    })

/* `width` bits of each code of a part; bits of neighbours that a shift brings along are cut off. */
INLINE words field(int bits, int width, const uint8_t *from, int part) {
    if (width == 8) return (words)load_lanes(from + part * 16 * LANES);
    words codes;
    if (width == 4) codes = (words)load_lanes(from + part / 2 * 16 * LANES) >> 4 * (part % 2);
    else {
#ifdef __AVX512BW__
        __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)from));
        codes = (words)(width == 2 ? _mm512_shuffle_i64x2(both, both, 0x50) : one_lane(from));
#else
        codes = (words)one_lane(from + (width == 2 ? part / 2 * 16 : 0));
#endif
        codes >>= BY_LANE(q % (8 / width) * width);
    }
    return codes & 0x01010101u * ((1u << width) - 1);
}

INLINE vector codes_of(int bits, const uint8_t *half, int part) {
    int low = LOW(bits);
    words codes = field(bits, low, half, part);
    if (bits > low) codes |= field(bits, bits - low, half + 16 * low, part) << low;
    return (vector)codes;
}

/* The quads of x that meet those of a part. */
INLINE vector quads_of(int bits, const int8_t *x, int part) {
    __m256i all = _mm256_loadu_si256((const void *)x);
#ifdef __AVX512BW__
    return _mm512_permutexvar_epi32((vector)BY_LANE(q), _mm512_castsi256_si512(all));
#else
    return _mm256_permutevar8x32_epi32(all, (vector)BY_LANE(q));
#endif
}

/* sum + codes * x, by fours. Without VNNI products are added by twos in 16 bits first, which 8 bits may overflow: they
   are then taken in halves of 4, unless x is the lower of two planes, whose numbers are -64..63. */
INLINE vector dot(int bits, int fine, vector sum, vector codes, vector x) {
#if (LANES == 4 && defined(__AVX512VNNI__)) || (LANES == 2 && defined(__AVX512VNNI__) && defined(__AVX512VL__))
    (void)bits, (void)fine;
    /* The compiler's own form of it copies sums from register to register. */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
    return sum;
#elif defined(__AVXVNNI__)
    (void)bits, (void)fine;
    return _mm256_dpbusd_avx_epi32(sum, codes, x);
#else
    vector one = SIMD(set1_epi16)(1);
    if (bits == 8 && !fine) {
        vector nibble = SIMD(set1_epi8)(15);
        vector high = (vector)((words)codes >> 4 & (words)nibble), low = (vector)((words)codes & (words)nibble);
        sum = SIMD(add_epi32)(sum, SIMD(madd_epi16)(SIMD(maddubs_epi16)(high, x), SIMD(set1_epi16)(16)));
        codes = low;
    }
    return SIMD(add_epi32)(sum, SIMD(madd_epi16)(SIMD(maddubs_epi16)(codes, x), one));
#endif
}

/* The lanes of `count` (2 or a multiple of 4) sums added up. */
INLINE void add_lanes(const vector *sum, int count, four_whole *to) {
#ifdef __AVX512BW__
    UNROLL for (int i = 0; i < count; i += 4) {
        vector c = count > 2 ? sum[i + 2] : sum[i], d = count > 2 ? sum[i + 3] : sum[i + 1];
        vector ab = _mm512_add_epi32(_mm512_shuffle_i64x2(sum[i], sum[i + 1], 0x44),
                                     _mm512_shuffle_i64x2(sum[i], sum[i + 1], 0xee));
        vector cd = _mm512_add_epi32(_mm512_shuffle_i64x2(c, d, 0x44), _mm512_shuffle_i64x2(c, d, 0xee));
        vector all = _mm512_add_epi32(_mm512_shuffle_i64x2(ab, cd, 0x88), _mm512_shuffle_i64x2(ab, cd, 0xdd));
        if (count > 2) _mm512_storeu_si512(to + i, all);
        else _mm256_storeu_si256((void *)(to + i), _mm512_castsi512_si256(all));
    }
#else
    UNROLL for (int i = 0; i < count; i += 2)
        _mm256_storeu_si256((void *)(to + i), _mm256_add_epi32(_mm256_permute2x128_si256(sum[i], sum[i + 1], 0x20),
                                                               _mm256_permute2x128_si256(sum[i], sum[i + 1], 0x31)));
#endif
}

/* A tile's sums over blocks of a group for R rows, by row, plane and half. */
INLINE void group_sums(int bits, int R, int planes, const uint8_t *codes, const int8_t *const *x, long padded,
                       long blocks, four_whole *sums) {
    vector sum[16];
    UNROLL for (int i = 0; i < R * planes * 2; i++) sum[i] = (vector){0};
    for (long b = 0; b < blocks; b++, codes += BLOCK_INPUTS * bits) {
        UNROLL for (int line = 0; line < BLOCK_INPUTS * bits; line += 64) __builtin_prefetch(codes + AHEAD + line, 0, 3);
        UNROLL for (int part = 0; part < PARTS; part++) {
            vector w[2] = {codes_of(bits, codes, part), codes_of(bits, codes + 16 * bits, part)};
            UNROLL for (int k = 0; k < R * planes; k++) {
                vector quads = quads_of(bits, x[k / planes] + k % planes * padded + b * BLOCK_INPUTS, part);
                UNROLL for (int half = 0; half < 2; half++)
                    sum[2 * k + half] = dot(bits, k % planes, sum[2 * k + half], w[half], quads);
            }
        }
    }
    add_lanes(sum, R * planes * 2, sums);
}

INLINE four add_product(four a, four b, four c) { return (four)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c); }
