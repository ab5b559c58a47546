/* Products of rows with matrices of small integers: weight = scale * (code - zero), within groups of inputs.

   Rows are rounded to integers too: to 8 bits with one scale a row (planes = 1), or to 15 bits with one scale a group,
   held as two planes of 8 bits (planes = 2), which is as good as float. Products of integers are exact, and what is
   added in float is added group by group: a row has the same bits alone and in any batch.

   32 inputs of an output are a block of 4 * bits bytes. With 4 bits, byte j holds inputs j and j + 16; with 2 bits j,
   j + 8, j + 16, j + 24; with 1 bit j, j + 4, ...; 3 bits are the two low ones as 2 and the high one as 1. */
#include "vector.h"

#ifdef __ARM_FEATURE_DOTPROD
#include <arm_neon.h>
#endif

#define BLOCK_INPUTS 32
#define TILE 4           /* outputs at a time */
#define CHUNK 16         /* outputs that a thread takes */
#define AHEAD 6144       /* bytes */
#define ALONE 262144     /* products; fewer are not worth waking the other threads */
#define FINE 16256.0f    /* 127 * 128: the largest value of two planes */

typedef float four __attribute__((vector_size(4 * TILE)));
typedef float loose_four __attribute__((vector_size(4 * TILE), aligned(4), may_alias));

typedef struct {
    const uint8_t *codes;
    const float *scales, *zeros; /* (groups, outputs); zeros may be NULL: the middle of the codes */
    long inputs, outputs, bits, group, planes;
    long padded, groups, row_bytes; /* inputs in whole blocks; bytes of an output's codes */
} Matrix;

typedef struct {
    int8_t *values;       /* (rows, planes, padded) */
    float *scales, *sums; /* (rows, groups): of the integers, and of what they stand for */
} Rounded;

static void round_row(const float *x, const Matrix *m, int8_t *high, int8_t *low, float *scales, float *sums) {
    float most = 0.0f;
    if (m->planes == 1)
        for (long i = 0; i < m->inputs; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    for (long g = 0; g < m->groups; g++) {
        long start = g * m->group, stop = start + m->group < m->inputs ? start + m->group : m->inputs;
        if (m->planes == 2) {
            most = 0.0f;
            for (long i = start; i < stop; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
        }
        /* 8 bits with one scale a row are as the world's W8A8 formats have them: 255 steps over twice the largest. */
        float scale = m->planes == 1 ? most / 127.5f : most / FINE, back = most > 0.0f ? 1.0f / scale : 0.0f;
        int32_t sum = 0;
        if (m->planes == 1)
            for (long i = start; i < stop; i++) {
                float q = __builtin_rintf(x[i] * back);
                q = q > 127.0f ? 127.0f : q;
                high[i] = (int8_t)(int32_t)q;
                sum += (int32_t)q;
            }
        else
            for (long i = start; i < stop; i++) {
                int32_t q = (int32_t)__builtin_rintf(x[i] * back), h = (q + 64) >> 7;
                high[i] = (int8_t)h;
                low[i] = (int8_t)(q - h * 128);
                sum += q;
            }
        scales[g] = scale;
        sums[g] = (float)sum;
    }
    for (long i = m->inputs; i < m->padded; i++) {
        high[i] = 0;
        if (m->planes == 2) low[i] = 0;
    }
}

#ifdef __ARM_FEATURE_DOTPROD
/* A block's codes as two vectors of 16; 8 bits come out less 128, so that they are signed. */
INLINE void unpack(int bits, const uint8_t *from, int8x16_t *out) {
    static const int8_t two[2][16] = {{0, 0, 0, 0, 0, 0, 0, 0, -2, -2, -2, -2, -2, -2, -2, -2},
                                      {-4, -4, -4, -4, -4, -4, -4, -4, -6, -6, -6, -6, -6, -6, -6, -6}};
    static const int8_t one[2][16] = {{0, 0, 0, 0, -1, -1, -1, -1, -2, -2, -2, -2, -3, -3, -3, -3},
                                      {-4, -4, -4, -4, -5, -5, -5, -5, -6, -6, -6, -6, -7, -7, -7, -7}};
    if (bits == 8) {
        out[0] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(from), vdupq_n_u8(128)));
        out[1] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(from + 16), vdupq_n_u8(128)));
    } else if (bits == 4) {
        uint8x16_t both = vld1q_u8(from);
        out[0] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
        out[1] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
    } else
        for (int half = 0; half < 2; half++) {
            uint8x16_t value = vdupq_n_u8(0);
            if (bits >= 2) {
                uint8x8_t some = vld1_u8(from);
                value = vandq_u8(vshlq_u8(vcombine_u8(some, some), vld1q_s8(two[half])), vdupq_n_u8(3));
            }
            if (bits != 2) {
                uint32_t some;
                memcpy(&some, from + (bits == 3 ? 8 : 0), 4);
                uint8x16_t bit = vshlq_u8(vreinterpretq_u8_u32(vdupq_n_u32(some)), vld1q_s8(one[half]));
                bit = vandq_u8(bit, vdupq_n_u8(1));
                value = bits == 3 ? vorrq_u8(value, vshlq_n_u8(bit, 2)) : bit;
            }
            out[half] = vreinterpretq_s8_u8(value);
        }
}

/* V * TILE outputs of a group times R rows (V * R is at most 2): exact sums of products, the planes put together. */
INLINE void group_sums(int bits, int R, int V, int planes, const Matrix *m, const uint8_t *const *codes,
                       const int8_t *const *x, long start, long stop, four *products) {
    /* The same place of a later tile: memory answers after about as long as it takes to go through this many bytes. */
    long O = V * TILE, ahead = (AHEAD / (O * m->row_bytes) + 1) * O * m->row_bytes;
    int32x4_t sum[4 * TILE]; /* by row, plane and output */
    UNROLL for (int i = 0; i < R * planes * O; i++) sum[i] = vdupq_n_s32(0);
    for (long i = start; i < stop; i += BLOCK_INPUTS) {
        int8x16_t low[4], high[4]; /* the block's first and second half, by row and plane */
        UNROLL for (int k = 0; k < R * planes; k++) {
            const int8_t *from = x[k / planes] + k % planes * m->padded + i;
            low[k] = vld1q_s8(from), high[k] = vld1q_s8(from + 16);
        }
        UNROLL for (int o = 0; o < O; o++) {
            int8x16_t w[2];
            const uint8_t *block = codes[o] + (unsigned long)i / BLOCK_INPUTS * 4 * bits;
            __builtin_prefetch(block + ahead, 0, 3);
            unpack(bits, block, w);
            UNROLL for (int k = 0; k < R * planes; k++) {
                sum[k * O + o] = vdotq_s32(sum[k * O + o], w[0], low[k]);
                sum[k * O + o] = vdotq_s32(sum[k * O + o], w[1], high[k]);
            }
        }
    }
    float32x4_t total[4];
    UNROLL for (int k = 0; k < R * planes * V; k++) {
        int32x4_t *s = sum + k * TILE;
        total[k] = vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(s[0], s[1]), vpaddq_s32(s[2], s[3])));
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++) {
        int at = r * planes * V + v;
        products[r * V + v] = planes == 1 ? (four)total[at] : (four)vfmaq_n_f32(total[at + V], total[at], 128.0f);
    }
}
#else
INLINE void unpack(int bits, const uint8_t *from, int8_t *out) {
    for (int i = 0; i < BLOCK_INPUTS; i++) {
        if (bits == 8) out[i] = (int8_t)(from[i] ^ 128);
        else if (bits == 4) out[i] = from[i % 16] >> (i / 16 * 4) & 15;
        else {
            int value = bits >= 2 ? from[i % 8] >> (i / 8 * 2) & 3 : 0;
            if (bits == 1) value = from[i % 4] >> (i / 4) & 1;
            if (bits == 3) value |= (from[8 + i % 4] >> (i / 4) & 1) << 2;
            out[i] = (int8_t)value;
        }
    }
}

INLINE void group_sums(int bits, int R, int V, int planes, const Matrix *m, const uint8_t *const *codes,
                       const int8_t *const *x, long start, long stop, four *products) {
    int32_t sums[4][2 * TILE] = {{0}};
    for (long i = start; i < stop; i += BLOCK_INPUTS)
        for (int o = 0; o < V * TILE; o++) {
            int8_t w[BLOCK_INPUTS];
            unpack(bits, codes[o] + (unsigned long)i / BLOCK_INPUTS * 4 * bits, w);
            for (int k = 0; k < R * planes; k++) {
                const int8_t *from = x[k / planes] + k % planes * m->padded + i;
                int32_t sum = 0;
                for (int j = 0; j < BLOCK_INPUTS; j++) sum += (int32_t)w[j] * from[j];
                sums[k][o] += sum;
            }
        }
    for (int r = 0; r < R; r++)
        for (int o = 0; o < V * TILE; o++)
            products[r * V + o / TILE][o % TILE] =
                planes == 1 ? (float)sums[r][o]
                            : __builtin_fmaf((float)sums[2 * r][o], 128.0f, (float)sums[2 * r + 1][o]);
}
#endif

INLINE four spread(float value) { return (four){value, value, value, value}; }

/* a * b + c in one rounding, said so: left to choose, the compiler fuses in one tile and not in another. */
INLINE four add_product(four a, four b, four c) {
#ifdef __ARM_FEATURE_DOTPROD
    return (four)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < TILE; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/* Four numbers of (groups, outputs), of which only `count` may be there. */
INLINE four some(const float *from, long count) {
    if (count >= TILE) return (four)(*(const loose_four *)from);
    four found = {0};
    for (long o = 0; o < count; o++) found[o] = from[o];
    return found;
}

/* `fixed` is the group's size where it is known when this is compiled, else 0. */
INLINE void quantised_tile(int bits, int R, int V, int planes, long fixed, const Matrix *m, const Rounded *x, long at,
                           long t, float *y, const float *bias) {
    four total[2] = {{0}};
    const uint8_t *codes[2 * TILE];
    const int8_t *rows[2];
    long left = m->outputs - at;
    for (int o = 0; o < V * TILE; o++) codes[o] = m->codes + (at + (o < left ? o : left - 1)) * m->row_bytes;
    for (int r = 0; r < R; r++) rows[r] = x->values + (t + r) * planes * m->padded;
    float middle = bits == 8 ? 0.0f : (float)(1 << (bits - 1));
    for (long g = 0; g < m->groups; g++) {
        long start = g * m->group, stop = start + m->group < m->padded ? start + m->group : m->padded;
        if (fixed) start = g * fixed, stop = start + fixed;
        four products[2];
        group_sums(bits, R, V, planes, m, codes, rows, start, stop, products);
        UNROLL for (int v = 0; v < V; v++) {
            long from = g * m->outputs + at + v * TILE;
            four zero = spread(middle), scale = some(m->scales + from, left - v * TILE);
            if (m->zeros) zero = some(m->zeros + from, left - v * TILE) - (bits == 8 ? 128.0f : 0.0f);
            UNROLL for (int r = 0; r < R; r++) {
                float x_scale = x->scales[(t + r) * m->groups + g], x_sum = x->sums[(t + r) * m->groups + g];
                four product = add_product(-zero, spread(x_sum), products[r * V + v]);
                total[r * V + v] = add_product(product, scale * x_scale, total[r * V + v]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (long o = 0; o < V * TILE && o < left; o++)
            y[(t + r) * m->outputs + at + o] = total[r * V + o / TILE][o % TILE] + (bias ? bias[at + o] : 0.0f);
}

INLINE void quantised_chunk(int bits, int planes, long fixed, const Matrix *m, const Rounded *x, long chunk, long rows,
                            float *y, const float *bias) {
    long stop = (chunk + 1) * CHUNK < m->outputs ? (chunk + 1) * CHUNK : m->outputs;
    for (long t = 0; t < rows; t += 2)
        if (t + 1 < rows)
            for (long at = chunk * CHUNK; at < stop; at += TILE)
                quantised_tile(bits, 2, 1, planes, fixed, m, x, at, t, y, bias);
        else
            for (long at = chunk * CHUNK; at < stop; at += 2 * TILE)
                quantised_tile(bits, 1, 2, planes, fixed, m, x, at, t, y, bias);
}

static void any_chunk(const Matrix *m, const Rounded *x, long chunk, long rows, float *y, const float *bias) {
#define CASE(B)                                                                                                        \
    case B:                                                                                                            \
        if (m->planes == 1) quantised_chunk(B, 1, 0, m, x, chunk, rows, y, bias);                                      \
        else if (m->group == 64 && m->padded % 64 == 0) quantised_chunk(B, 2, 64, m, x, chunk, rows, y, bias);         \
        else quantised_chunk(B, 2, 0, m, x, chunk, rows, y, bias);                                                     \
        break;
    switch (m->bits) {
        CASE(1)
        CASE(2)
        CASE(3)
        CASE(4)
        CASE(8)
    }
#undef CASE
}

static void multiply(const float *x, const Matrix *m, const float *bias, float *y, long rows, long x_stride,
                     int threads) {
    long planes = m->planes, padded = m->padded, groups = m->groups, chunks = (m->outputs + CHUNK - 1) / CHUNK;
    Rounded rounded = {malloc(rows * planes * padded), malloc(rows * groups * sizeof(float)),
                       malloc(rows * groups * sizeof(float))};
    int alone = rows * m->inputs * m->outputs <= ALONE, few = rows <= 4;
    if (few)
        for (long t = 0; t < rows; t++) {
            int8_t *to = rounded.values + t * planes * padded;
            round_row(x + t * x_stride, m, to, to + padded, rounded.scales + t * groups, rounded.sums + t * groups);
        }
    else {
#pragma omp parallel for num_threads(threads) if (!alone)
        for (long t = 0; t < rows; t++) {
            int8_t *to = rounded.values + t * planes * padded;
            round_row(x + t * x_stride, m, to, to + padded, rounded.scales + t * groups, rounded.sums + t * groups);
        }
    }
#pragma omp parallel for num_threads(threads) if (!alone) schedule(static)
    for (long chunk = 0; chunk < chunks; chunk++) any_chunk(m, &rounded, chunk, rows, y, bias);
    free(rounded.values), free(rounded.scales), free(rounded.sums);
}

void quantised_linear(const float *x, const uint8_t *codes, const float *scales, const float *zeros, const float *bias,
                      float *y, long rows, long inputs, long outputs, long x_stride, long bits, long group, long planes,
                      int threads) {
    long padded = (inputs + BLOCK_INPUTS - 1) / BLOCK_INPUTS * BLOCK_INPUTS, groups = (inputs + group - 1) / group;
    Matrix m = {codes, scales, zeros, inputs, outputs, bits, group, planes, padded, groups, padded / 8 * bits};
    multiply(x, &m, bias, y, rows, x_stride, threads);
}

/* A whole layer of such matrices in one call: the same operations in the same order as one by one, so the same bits. */
void linear(const float *, const float *, const float *, float *, long, long, long, long, int);
void rms_norm(const float *, const float *, float *, long, long, float, int);
void heads(const float *, const float *, const float *, const float *, const float *, float *, float *, long, long,
           long, long, long, long, float, int, int);
void swiglu(const float *, float *, long, long, int);
void route(const float *, const float *, int64_t *, float *, long, long, long, long, long, int, int, float, int);
void attend(const float *, const float *, const float *, float *, float *, float *, float *, const int64_t *,
            const int64_t *, const int64_t *, long, long, long, long, long, long, long, long, long, long, long, float,
            int);

typedef struct {
    const float *attention_norm, *q_norm, *k_norm, *ffn_norm, *qkv_bias, *out_bias, *gate_up_bias, *down_bias;
    const float *router, *correction;
    const Matrix *qkv, *out, *gate_up, *down, *experts_gate_up, *experts_down; /* experts: one behind the other */
    long D, H, N, C, F, E, K, G, groups, top_groups, window; /* F: dense or shared, 0 for neither; G: of an expert */
    long interleaved, softmax, normalize;
    float eps, attention_scale, route_scale;
} QuantisedBlock;

static void add(const float *a, const float *b, float *sum, long size) {
    for (long i = 0; i < size; i++) sum[i] = a[i] + b[i];
}

/* Experts in order; a share is weighed and kept before it is added, or the two would be rounded as one. */
static void weigh_experts(const QuantisedBlock *b, const float *x, const int64_t *routes, const float *weights, float *y,
                          float *scratch, long T, int threads) {
    long D = b->D, G = b->G;
    float *rows = scratch, *both = rows + T * D, *inner = both + 2 * T * G, *part = inner + T * G;
    memset(y, 0, T * D * sizeof *y);
    for (long e = 0; e < b->E; e++) {
        long tokens[T], count = 0;
        float share[T];
        for (long a = 0; a < T * b->K; a++)
            if (routes[a] == e) tokens[count] = a / b->K, share[count++] = weights[a];
        if (!count) continue;
        for (long a = 0; a < count; a++) memcpy(rows + a * D, x + tokens[a] * D, D * sizeof *x);
        multiply(rows, b->experts_gate_up + e, NULL, both, count, D, threads);
        swiglu(both, inner, count, G, threads);
        multiply(inner, b->experts_down + e, NULL, part, count, G, threads);
        for (long a = 0; a < count; a++)
            for (long i = 0; i < D; i++) part[a * D + i] *= share[a];
        for (long a = 0; a < count; a++) add(y + tokens[a] * D, part + a * D, y + tokens[a] * D, D);
    }
}

void quantised_block(const QuantisedBlock *b, const float *x, float *y, int64_t *routes, const float *cosine,
                     const float *sine, long R, float *keys, float *values, const int64_t *spans, const int64_t *table,
                     long T, long S, long columns, long page_size, int threads) {
    long D = b->D, size = (b->H + 2 * b->N) * b->C, hidden = b->H * b->C;
    long each = 3 * D + size + 2 * hidden + b->N * b->C + 3 * b->F + b->E + b->K;
    float *normed = malloc(T * each * sizeof *normed), *part = normed + T * D, *more = part + T * D;
    float *qkv = more + T * D, *q = qkv + T * size, *k = q + T * hidden, *seen = k + T * b->N * b->C;
    float *both = seen + T * hidden, *inner = both + 2 * T * b->F, *logits = inner + T * b->F;
    float *weights = logits + T * b->E;

    rms_norm(x, b->attention_norm, normed, T, D, b->eps, threads);
    multiply(normed, b->qkv, b->qkv_bias, qkv, T, D, threads);
    heads(qkv, b->q_norm, b->k_norm, cosine, sine, q, k, T, b->H, b->N, b->C, R, size, b->eps, b->interleaved, threads);
    attend(q, k, qkv + (b->H + b->N) * b->C, keys, values, seen, NULL, spans, table, NULL, S, columns, page_size,
           hidden, b->N * b->C, size, b->H, b->N, b->C, b->C, b->window, b->attention_scale, threads);
    multiply(seen, b->out, b->out_bias, part, T, hidden, threads);
    add(x, part, y, T * D);

    rms_norm(y, b->ffn_norm, normed, T, D, b->eps, threads);
    if (b->E) {
        float *room = malloc(T * (2 * D + 3 * b->G) * sizeof *room);
        linear(normed, b->router, NULL, logits, T, D, b->E, D, threads);
        route(logits, b->correction, routes, weights, T, b->E, b->K, b->groups, b->top_groups, b->softmax, b->normalize,
              b->route_scale, 0);
        weigh_experts(b, normed, routes, weights, part, room, T, threads);
        free(room);
    }
    if (b->F) {
        float *to = b->E ? more : part;
        multiply(normed, b->gate_up, b->gate_up_bias, both, T, D, threads);
        swiglu(both, inner, T, b->F, threads);
        multiply(inner, b->down, b->down_bias, to, T, b->F, threads);
        if (b->E) add(part, more, part, T * D);
    }
    add(y, part, y, T * D);
    free(normed);
}
