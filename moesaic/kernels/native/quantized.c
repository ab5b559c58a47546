/* Products of rows with matrices of small integers; quantized.h says how these lie in memory.

   Rows are rounded to integers too: to 8 bits with one scale a row (planes = 1), or to 15 bits with one scale a group,
   held as two planes of 8 bits (planes = 2), which is as good as float. Products of integers are exact, and what is
   added in float is added group by group: a row has the same bits alone and in any batch. */
#include "quantized.h"

#ifdef __ARM_FEATURE_DOTPROD
#include "quantized_arm.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "quantized_many.h"
#else
#include "quantized_plain.h"
#endif

#ifndef PANELS
#define PANELS 0
#define panel_any(...) (void)0
#endif
#define ALONE 65536   /* products; fewer are not worth waking the other threads */
#define SHARED 4      /* rows; fewer are rounded by one thread */
#define FINE 16256.0f /* 127 * 128: the largest value of two planes */

static float largest(const float *x, long size) {
    vec most = splat(0.0f);
    long i = 0;
    for (; i + W <= size; i += W) {
        vec v = (vec)((ivec)load(x + i) & 0x7fffffff);
        most = pick(v > most, v, most);
    }
    float found = lane_max(most);
    for (; i < size; i++) found = fabsf(x[i]) > found ? fabsf(x[i]) : found;
    return found;
}

void round_row(const float *x, const Matrix *m, const Rounded *to, long row) {
    int8_t *high = to->values + row * m->planes * m->padded, *low = high + m->padded;
    float most = m->planes == 1 ? largest(x, m->inputs) : 0.0f;
    for (long g = 0; g < m->groups; g++) {
        long start = g * m->group, stop = start + m->group < m->inputs ? start + m->group : m->inputs;
        if (m->planes == 2) most = largest(x + start, stop - start);
        /* 8 bits with one scale a row are as the world's W8A8 formats have them: 255 steps over twice the largest. */
        float scale = m->planes == 1 ? most / 127.5f : most / FINE, back = most > 0.0f ? 1.0f / scale : 0.0f;
        int32_t sum = 0, high_sum = 0;
        if (m->planes == 1)
            for (long i = start; i < stop; i++) {
                int32_t q = (int32_t)__builtin_rintf(x[i] * back);
                q = q > 127 ? 127 : q;
                high[i] = (int8_t)q;
                sum += q;
            }
        else
            for (long i = start; i < stop; i++) {
                int32_t q = (int32_t)__builtin_rintf(x[i] * back), h = (q + 64) >> 7;
                high[i] = (int8_t)h;
                low[i] = (int8_t)(q - h * 128);
                sum += q, high_sum += h;
            }
        to->scales[row * m->groups + g] = scale;
        to->sums[row * m->groups + g] = (float)sum;
        int32_t *wholes = to->wholes + row * m->planes * m->groups + g;
        if (m->planes == 1) wholes[0] = sum;
        else wholes[0] = high_sum, wholes[m->groups] = sum - 128 * high_sum;
    }
    long rest = m->padded - m->inputs;
    memset(high + m->inputs, 0, rest);
    if (m->planes == 2) memset(low + m->inputs, 0, rest);
}

INLINE four spread(float value) { return (four){value, value, value, value}; }

INLINE four as_float(four_whole whole) { return __builtin_convertvector(whole, four); }

/* `fixed` is the number of blocks in a group where it is known when this is compiled, else 0. */
INLINE void tile_rows(int bits, int R, int planes, long fixed, const Matrix *m, const Rounded *x, long tile,
                      const long *which, float *y, long stride) {
    four total[8];
    const int8_t *rows[4];
    const float *x_scales[4], *x_sums[4];
    UNROLL for (int i = 0; i < 2 * R; i++) total[i] = spread(0.0f);
    for (int r = 0; r < R; r++) {
        rows[r] = x->values + which[r] * planes * m->padded;
        x_scales[r] = x->scales + which[r] * m->groups, x_sums[r] = x->sums + which[r] * m->groups;
    }
    const uint8_t *codes = m->codes + tile * m->padded * bits;
    const float *scales = m->scales + tile * m->groups * TILE, *zeros = m->zeros + tile * m->groups * TILE;
    float middle = bits == 8 ? 0.0f : (float)(1 << (bits - 1));
    long left = m->padded / BLOCK_INPUTS, usual = fixed ? fixed : m->group / BLOCK_INPUTS;
    for (long g = 0; g < m->groups; g++) {
        long blocks = fixed || left > usual ? usual : left;
        four_whole sums[16];
        group_sums(bits, R, planes, codes, rows, m->padded, blocks, sums);
#ifdef __AVX2__ /* its codes of 8 bits are 128 more than elsewhere */
        if (bits == 8) UNROLL for (int k = 0; k < 2 * R * planes; k++)
            sums[k] -= 128 * x->wholes[(which[k / 2 / planes] * planes + k / 2 % planes) * m->groups + g];
#endif
        codes += blocks * BLOCK_INPUTS * bits, left -= blocks;
        UNROLL for (int r = 0; r < R; r++) rows[r] += blocks * BLOCK_INPUTS;
        UNROLL for (int half = 0; half < 2; half++) {
            four zero = spread(middle), scale = (four)(*(const loose_four *)(scales + g * TILE + 4 * half));
            if (m->zeros) zero = (four)(*(const loose_four *)(zeros + g * TILE + 4 * half)) - (bits == 8 ? 128.0f : 0.0f);
            UNROLL for (int r = 0; r < R; r++) {
                four product = as_float(sums[r * planes * 2 + half]);
                if (planes == 2) product = add_product(product, spread(128.0f), as_float(sums[r * 4 + 2 + half]));
                product = add_product(-zero, spread(x_sums[r][g]), product);
                total[2 * r + half] = add_product(product, scale * x_scales[r][g], total[2 * r + half]);
            }
        }
    }
    UNROLL for (int i = 0; i < 2 * R; i++) *(loose_four *)(y + i / 2 * stride + i % 2 * 4) = (loose_four)total[i];
}

INLINE void tile_any(int bits, int planes, long fixed, const Matrix *m, const Rounded *x, long tile, const long *which,
                     long rows, float *y, long stride) {
    for (long t = 0; t < rows;) {
        long plain[4] = {t, t + 1, t + 2, t + 3}, left = rows - t;
        const long *some = which ? which + t : plain;
        if (left >= 4 && !PANELS) tile_rows(bits, 4, planes, fixed, m, x, tile, some, y + t * stride, stride), t += 4;
        else if (left >= 2) tile_rows(bits, 2, planes, fixed, m, x, tile, some, y + t * stride, stride), t += 2;
        else tile_rows(bits, 1, planes, fixed, m, x, tile, some, y + t * stride, stride), t += 1;
    }
}

/* The product of one number of bits. */
#define PRODUCT(B)                                                                                                     \
    static void product_##B(const Matrix *m, const Rounded *x, long tile, long tiles, const long *which, long rows,    \
                            float *y) {                                                                                \
        if (PANELS && rows >= MANY && tiles == TOGETHER) {                                                             \
            panel_any(B, m, x, tile, which, rows, y);                                                                  \
            return;                                                                                                    \
        }                                                                                                              \
        for (long i = 0; i < tiles && tile + i < tiles_of(m); i++) {                                                   \
            float *to = y + i * TILE;                                                                                  \
            if (m->planes == 1) tile_any(B, 1, 0, m, x, tile + i, which, rows, to, tiles * TILE);                      \
            else if (m->group == 64 && m->padded % 64 == 0)                                                            \
                tile_any(B, 2, 2, m, x, tile + i, which, rows, to, tiles * TILE);                                      \
            else tile_any(B, 2, 0, m, x, tile + i, which, rows, to, tiles * TILE);                                     \
        }                                                                                                              \
    }
PRODUCT(1)
PRODUCT(2)
PRODUCT(3)
PRODUCT(4)
PRODUCT(5)
PRODUCT(6)
PRODUCT(8)

void tile_product(const Matrix *m, const Rounded *x, long tile, long tiles, const long *which, long rows, float *y) {
    void (*const product[])(const Matrix *, const Rounded *, long, long, const long *, long, float *) = {
        NULL, product_1, product_2, product_3, product_4, product_5, product_6, NULL, product_8};
    product[m->bits](m, x, tile, tiles, which, rows, y);
}

void quantized_stage(Member *team, const Matrix *m, const Rounded *x, const float *bias, const float *plus, float *y,
                     long rows) {
    long tiles = tiles_together(rows), wide = tiles * TILE, from, to;
    float few[4 * PANEL] __attribute__((aligned(64))), *found = rows > 4 ? numbers(rows * wide) : few;
    while (take(team, (tiles_of(m) + tiles - 1) / tiles, &from, &to))
        for (long item = from; item < to; item++) {
            long at = item * wide, count = m->outputs - at < wide ? m->outputs - at : wide;
            tile_product(m, x, item * tiles, tiles, NULL, rows, found);
            for (long t = 0; t < rows; t++)
                for (long o = 0; o < count; o++) {
                    float sum = found[t * wide + o];
                    if (bias) sum += bias[at + o];
                    y[t * m->outputs + at + o] = plus ? plus[t * m->outputs + at + o] + sum : sum;
                }
        }
    if (rows > 4) free(found);
}

void quantized_linear(const float *x, const uint8_t *codes, const float *scales, const float *zeros, const float *bias,
                      float *y, long rows, long inputs, long outputs, long x_stride, long bits, long group, long planes,
                      int threads) {
    long padded = (inputs + BLOCK_INPUTS - 1) / BLOCK_INPUTS * BLOCK_INPUTS, groups = (inputs + group - 1) / group;
    Matrix m = {codes, scales, zeros, inputs, outputs, bits, group, planes, padded, groups};
    void *room = malloc(rows * rounded_bytes(&m));
    Rounded rounded = rounded_at(&m, room, rows);
    Team team = {0};
    if (rows < SHARED)
        for (long t = 0; t < rows; t++) round_row(x + t * x_stride, &m, &rounded, t);
#pragma omp parallel num_threads(threads) if (rows * inputs * outputs > ALONE)
    {
        Member member = join(&team);
        if (rows >= SHARED) {
            for (long from, to; take(&member, rows, &from, &to);)
                for (long t = from; t < to; t++) round_row(x + t * x_stride, &m, &rounded, t);
            meet(&member);
        }
        quantized_stage(&member, &m, &rounded, bias, NULL, y, rows);
    }
    free(room);
}
