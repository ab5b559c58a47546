#include "packed.h"

void pack(const float *w, float *to, long outputs, long inputs) {
    for (long o = 0; o < outputs; o += NR)
        for (long i = 0; i < inputs; i++)
            for (long j = 0; j < NR; j++) *to++ = o + j < outputs ? w[(o + j) * inputs + i] : 0.0f;
}

long packed_numbers(long outputs, long inputs) { return packed_size(outputs, inputs); }

/* Rows in panels of MR, in which the MR numbers of one input lie side by side; rows that are not there are zeros. */
static void pack_rows(const float *x, long stride, long rows, long depth, float *to) {
    for (long t = 0; t < rows; t += MR)
        turn_rows(x + t * stride, stride, rows - t < MR ? rows - t : MR, depth, to + t * depth, MR);
}

#ifdef __aarch64__
INLINE void tile(int R, const float *a, long a_step, const float *b, long depth, const float *start, long start_stride,
                 float *to, long to_stride, const float *next) {
    float32x4_t c[MR][3];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int j = 0; j < 3; j++)
        c[r][j] = start ? vld1q_f32(start + r * start_stride + 4 * j) : vdupq_n_f32(0.0f);
    for (long k = 0; k < depth; k++, a += a_step, b += NR, next += 16) {
        __builtin_prefetch(next, 0, 2);
        float32x4_t b0 = vld1q_f32(b), b1 = vld1q_f32(b + 4), b2 = vld1q_f32(b + 8);
        float32x4_t a0 = vld1q_f32(a), a1 = a0;
        if (R > 4) a1 = vld1q_f32(a + 4);
#define ROW(r, from, lane)                                                                                             \
    c[r][0] = vfmaq_laneq_f32(c[r][0], b0, from, lane), c[r][1] = vfmaq_laneq_f32(c[r][1], b1, from, lane),            \
    c[r][2] = vfmaq_laneq_f32(c[r][2], b2, from, lane)
        ROW(0, a0, 0), ROW(1, a0, 1), ROW(2, a0, 2), ROW(3, a0, 3);
        if (R > 4) ROW(4, a1, 0), ROW(5, a1, 1), ROW(6, a1, 2), ROW(7, a1, 3);
#undef ROW
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int j = 0; j < 3; j++) vst1q_f32(to + r * to_stride + 4 * j, c[r][j]);
}
#else
typedef float wide __attribute__((vector_size(4 * LANES)));
typedef float loose_wide __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE void tile(int R, const float *a, long a_step, const float *b, long depth, const float *start, long start_stride,
                 float *to, long to_stride, const float *next) {
    wide c[MR][2];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int j = 0; j < 2; j++)
        c[r][j] = start ? (wide)(*(const loose_wide *)(start + r * start_stride + LANES * j)) : (wide){0};
    for (long k = 0; k < depth; k++, a += a_step, b += NR, next += 16) {
        __builtin_prefetch(next, 0, 2);
        wide b0 = (wide)(*(const loose_wide *)b), b1 = (wide)(*(const loose_wide *)(b + LANES));
        UNROLL for (int r = 0; r < R; r++) {
            wide each = a[r] - (wide){0};
            c[r][0] += b0 * each, c[r][1] += b1 * each;
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int j = 0; j < 2; j++)
        *(loose_wide *)(to + r * to_stride + LANES * j) = (loose_wide)c[r][j];
}
#endif

void micro(const float *a, long a_step, const float *b, long depth, const float *start, long start_stride, float *to,
           long to_stride, const float *next) {
    tile(MR, a, a_step, b, depth, start, start_stride, to, to_stride, next);
}
_Static_assert(NR % MR == 4 || NR % MR == 8, "rows that are left come in fours");
void micro_rest(const float *a, long a_step, const float *b, long depth, const float *start, long start_stride,
                float *to, long to_stride) {
    tile(NR % MR, a, a_step, b, depth, start, start_stride, to, to_stride, b);
}

void packed_matmul(const float *x, long x_stride, const float *w, const float *bias, float *y, long y_stride, long rows,
                   long inputs, long outputs, float *panel) {
    for (long from = 0; from < inputs; from += DEPTH) {
        long depth = inputs - from < DEPTH ? inputs - from : DEPTH;
        pack_rows(x + from, x_stride, rows, depth, panel);
        for (long o = 0; o < outputs; o += NR) {
            const float *weights = w + o * inputs + from * NR, *next = weights + inputs * NR;
            long count = outputs - o < NR ? outputs - o : NR;
            float first[NR] = {0};
            if (bias) memcpy(first, bias + o, count * sizeof *first);
            for (long t = 0; t < rows; t += MR, next += depth * 16) {
                float part[MR * NR], *to = y + t * y_stride + o;
                long here = rows - t < MR ? rows - t : MR;
                if (here == MR && count == NR) {
                    micro(panel + t * depth, MR, weights, depth, from ? to : first, from ? y_stride : 0, to, y_stride, next);
                    continue;
                }
                for (long r = 0; from && r < here; r++) memcpy(part + r * NR, to + r * y_stride, count * sizeof *part);
                micro(panel + t * depth, MR, weights, depth, from ? part : first, from ? NR : 0, part, NR, next);
                for (long r = 0; r < here; r++) memcpy(to + r * y_stride, part + r * NR, count * sizeof *part);
            }
        }
    }
}

/* For tests and benches: any number of rows, one thread. */
void packed_linear(const float *x, const float *w, const float *bias, float *y, long rows, long inputs, long outputs) {
    float *panel = malloc(TILE_ROWS * DEPTH * sizeof *panel);
    for (long t = 0; t < rows; t += TILE_ROWS) {
        long here = rows - t < TILE_ROWS ? rows - t : TILE_ROWS;
        packed_matmul(x + t * inputs, inputs, w, bias, y + t * outputs, outputs, here, inputs, outputs, panel);
    }
    free(panel);
}
