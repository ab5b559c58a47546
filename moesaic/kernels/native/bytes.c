#include "bytes.h"

#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include <immintrin.h>

#define WIDE 64           /* outputs of a panel */
#define VECTORS 4         /* of them */
#define GROUP 6           /* rows that meet a panel together: their sums and four vectors of codes fill the registers */
#define QUAD (4 * WIDE)   /* bytes of a panel's four inputs */

long bytes_room(const Matrix *m) { return (m->outputs + WIDE - 1) / WIDE * WIDE * m->padded; }

void pack_bytes(const Matrix *m, uint8_t *to) {
    long halves = 2 * tiles_of(m), quads = m->padded / 4;
    for (long o = 0; o < m->outputs; o += WIDE)
        for (long q = 0; q < quads; q++)
            for (long h = o / 4; h < (o + WIDE) / 4; h++, to += 16) {
                const uint8_t *tile = m->codes + h / 2 * TILE * m->padded + q / 8 * TILE * BLOCK_INPUTS;
                if (h < halves) memcpy(to, tile + h % 2 * 4 * BLOCK_INPUTS + q % 8 * 16, 16);
                else memset(to, 0, 16);
            }
}

INLINE __m512 sixteen(const float *x, long left) {
    return left >= 16 ? _mm512_loadu_ps(x) : _mm512_maskz_loadu_ps((1u << left) - 1, x);
}

void round_bytes(const float *x, const Matrix *m, const Rounded *to, long row) {
    __m512 most = _mm512_setzero_ps();
    __m512i sum = _mm512_setzero_si512();
    int8_t *values = to->values + row * m->padded;
    for (long i = 0; i < m->inputs; i += 16) most = _mm512_max_ps(most, _mm512_abs_ps(sixteen(x + i, m->inputs - i)));
    float largest = _mm512_reduce_max_ps(most), scale = largest / 127.5f, back = largest > 0.0f ? 1.0f / scale : 0.0f;
    for (long i = 0; i < m->padded; i += 16) { /* what is padded is rounded to zeros */
        __m512 v = i < m->inputs ? sixteen(x + i, m->inputs - i) : _mm512_setzero_ps();
        __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(back)));
        q = _mm512_min_epi32(q, _mm512_set1_epi32(127));
        sum = _mm512_add_epi32(sum, q);
        _mm_storeu_si128((void *)(values + i), _mm512_cvtepi32_epi8(q));
    }
    int32_t whole = _mm512_reduce_add_epi32(sum);
    to->scales[row] = scale, to->sums[row] = (float)whole, to->wholes[row] = whole;
}

/* sum + codes * x by fours. The compiler's own form of it copies sums from register to register. */
INLINE __m512i dot_quad(__m512i sum, __m512i codes, __m512i x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
    return sum;
}

/* Rounded apart from what is added to it. */
INLINE __m512 product_of(__m512 a, __m512 b) {
    __m512 product = _mm512_mul_ps(a, b);
    __asm__("" : "+v"(product));
    return product;
}

/* R rows, from number `first` on, and `count` outputs of the panel of output o. Meanwhile `next` is fetched. */
INLINE void some_rows(int R, const Matrix *m, const Rounded *x, long first, long o, long count, const uint8_t *panel,
                      const uint8_t *next, const float *bias, float *y) {
    long quads = m->padded / 4;
    const int8_t *row = x->values + first * m->padded;
    __m512i sum[GROUP][VECTORS];
    UNROLL for (int r = 0; r < R; r++) {
        __m512i start = _mm512_set1_epi32(-128 * x->wholes[first + r]);
        UNROLL for (int n = 0; n < VECTORS; n++) sum[r][n] = start;
    }
    for (long q = 0; q < quads; q++, panel += QUAD, row += 4, next += 64) {
        __m512i codes[VECTORS];
        __builtin_prefetch(next, 0, 2);
        UNROLL for (int n = 0; n < VECTORS; n++) codes[n] = _mm512_loadu_si512(panel + 64 * n);
        UNROLL for (int r = 0; r < R; r++) {
            int32_t four_inputs;
            memcpy(&four_inputs, row + r * m->padded, 4);
            __m512i quad = _mm512_set1_epi32(four_inputs);
            UNROLL for (int n = 0; n < VECTORS; n++) sum[r][n] = dot_quad(sum[r][n], codes[n], quad);
        }
    }
    UNROLL for (int n = 0; n < VECTORS; n++) {
        long left = count - 16 * n, at = o + 16 * n;
        if (left <= 0) break;
        __mmask16 there = left < 16 ? (1u << left) - 1 : 0xffff;
        __m512 scale = _mm512_maskz_loadu_ps(there, m->scales + at), more = _mm512_setzero_ps(), zero = more;
        if (bias) more = _mm512_maskz_loadu_ps(there, bias + at);
        if (m->zeros) zero = _mm512_sub_ps(_mm512_maskz_loadu_ps(there, m->zeros + at), _mm512_set1_ps(128.0f));
        UNROLL for (int r = 0; r < R; r++) {
            __m512 product = _mm512_cvtepi32_ps(sum[r][n]);
            if (m->zeros) product = _mm512_fnmadd_ps(zero, _mm512_set1_ps(x->sums[first + r]), product);
            product = product_of(product, _mm512_mul_ps(scale, _mm512_set1_ps(x->scales[first + r])));
            _mm512_mask_storeu_ps(y + (first + r) * m->outputs + at, there, _mm512_add_ps(product, more));
        }
    }
}

void bytes_matmul(const Matrix *m, const Rounded *x, const float *bias, float *y, long rows) {
    const uint8_t *panel = m->codes;
    for (long o = 0; o < m->outputs; o += WIDE, panel += WIDE * m->padded) {
        long count = m->outputs - o < WIDE ? m->outputs - o : WIDE, t = 0;
        const uint8_t *next = panel + WIDE * m->padded;
        for (; t + GROUP <= rows; t += GROUP, next += 16 * m->padded)
            some_rows(GROUP, m, x, t, o, count, panel, next, bias, y);
        if (rows - t >= 4) some_rows(4, m, x, t, o, count, panel, next, bias, y), t += 4;
        if (rows - t >= 2) some_rows(2, m, x, t, o, count, panel, next, bias, y), t += 2;
        if (rows - t >= 1) some_rows(1, m, x, t, o, count, panel, next, bias, y);
    }
}
#else
long bytes_room(const Matrix *m) {
    (void)m;
    return 0;
}
void pack_bytes(const Matrix *m, uint8_t *to) { (void)m, (void)to; }
void round_bytes(const float *x, const Matrix *m, const Rounded *to, long row) { (void)x, (void)m, (void)to, (void)row; }
void bytes_matmul(const Matrix *m, const Rounded *x, const float *bias, float *y, long rows) {
    (void)m, (void)x, (void)bias, (void)y, (void)rows;
}
#endif
