/* Products of rows with matrices of small integers; quantized.h says how these lie in memory.

   Rows are rounded to integers too: to 8 bits with one scale a row (planes = 1), or to 15 bits with one scale a group,
   held as two planes of 8 bits (planes = 2), which is as good as float. Products of integers are exact, and what is
   added in float is added group by group: a row has the same bits alone and in any batch. */
#include "quantized.h"

#ifdef __ARM_FEATURE_DOTPROD
#include <arm_neon.h>
#endif

#define AHEAD 2048    /* bytes: memory answers after about as long as it takes to go through them */
#define ALONE 65536   /* products; fewer are not worth waking the other threads */
#define SHARED 4      /* rows; fewer are rounded by one thread */
#define FINE 16256.0f /* 127 * 128: the largest value of two planes */
/* 3, 5 and 6 bits are as many low bits, and then the high ones. */
#define LOW(bits) ((bits) == 3 ? 2 : (bits) == 5 || (bits) == 6 ? 4 : (bits))

typedef float four __attribute__((vector_size(16)));
typedef int32_t four_whole __attribute__((vector_size(16)));
typedef float loose_four __attribute__((vector_size(16), aligned(4), may_alias));

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
        int32_t sum = 0;
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
                sum += q;
            }
        to->scales[row * m->groups + g] = scale;
        to->sums[row * m->groups + g] = (float)sum;
    }
    long rest = m->padded - m->inputs;
    memset(high + m->inputs, 0, rest);
    if (m->planes == 2) memset(low + m->inputs, 0, rest);
}

#ifdef __ARM_FEATURE_DOTPROD
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
#else
INLINE int bits_of(int bits, const uint8_t *half, int o, int i) {
    int each = 8 / bits, q = i / 4;
    return half[q / each * 16 + 4 * o + i % 4] >> q % each * bits & ((1 << bits) - 1);
}

INLINE int one_code(int bits, const uint8_t *half, int o, int i) {
    int low = LOW(bits), high = bits > low ? bits_of(bits - low, half + 16 * low, o, i) << low : 0;
    return (bits_of(low, half, o, i) | high) - (bits == 8 ? 128 : 0);
}

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
#endif

INLINE four spread(float value) { return (four){value, value, value, value}; }

/* a * b + c in one rounding, said so: left to choose, the compiler fuses in one tile and not in another. */
INLINE four add_product(four a, four b, four c) {
#ifdef __ARM_FEATURE_DOTPROD
    return (four)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < 4; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

INLINE four as_float(four_whole whole) { return __builtin_convertvector(whole, four); }

/* `fixed` is the number of blocks in a group where it is known when this is compiled, else 0. */
INLINE void tile_rows(int bits, int R, int planes, long fixed, const Matrix *m, const Rounded *x, long tile,
                      const long *which, float *y) {
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
    UNROLL for (int i = 0; i < 2 * R; i++) *(loose_four *)(y + 4 * i) = (loose_four)total[i];
}

INLINE void tile_any(int bits, int planes, long fixed, const Matrix *m, const Rounded *x, long tile, const long *which,
                     long rows, float *y) {
    for (long t = 0; t < rows;) {
        long plain[4] = {t, t + 1, t + 2, t + 3}, left = rows - t;
        const long *some = which ? which + t : plain;
        if (left >= 4) tile_rows(bits, 4, planes, fixed, m, x, tile, some, y + t * TILE), t += 4;
        else if (left >= 2) tile_rows(bits, 2, planes, fixed, m, x, tile, some, y + t * TILE), t += 2;
        else tile_rows(bits, 1, planes, fixed, m, x, tile, some, y + t * TILE), t += 1;
    }
}

void tile_product(const Matrix *m, const Rounded *x, long tile, const long *which, long rows, float *y) {
#define CASE(B)                                                                                                        \
    case B:                                                                                                            \
        if (m->planes == 1) tile_any(B, 1, 0, m, x, tile, which, rows, y);                                             \
        else if (m->group == 64 && m->padded % 64 == 0) tile_any(B, 2, 2, m, x, tile, which, rows, y);                 \
        else tile_any(B, 2, 0, m, x, tile, which, rows, y);                                                            \
        break;
    switch (m->bits) {
        CASE(1)
        CASE(2)
        CASE(3)
        CASE(4)
        CASE(5)
        CASE(6)
        CASE(8)
    }
#undef CASE
}

void quantized_stage(Member *team, const Matrix *m, const Rounded *x, const float *bias, const float *plus, float *y,
                     long rows) {
    float few[4 * TILE], *found = rows > 4 ? malloc(rows * TILE * sizeof *found) : few;
    long from, to;
    while (take(team, tiles_of(m), &from, &to))
        for (long tile = from; tile < to; tile++) {
            long at = tile * TILE, count = m->outputs - at < TILE ? m->outputs - at : TILE;
            tile_product(m, x, tile, NULL, rows, found);
            for (long t = 0; t < rows; t++)
                for (long o = 0; o < count; o++) {
                    float sum = found[t * TILE + o];
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
