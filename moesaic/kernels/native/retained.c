/* Attention of one new token to the rows that a compact request has kept, head by head, straight from the cache.

   Rows lie anywhere. The oldest tokens may be kept as blocks of small integers (`serve/core/kv/encoding.py`), which are made
   numbers again here, a block at a time: keys for the scores, then values for the sum. */
#include "attention.h"
#include "stages.h"

typedef struct {
    const int32_t *rows; /* (N, blocks * rows_each) */
    long blocks, rows_each, row_bytes, tokens, bits;
    long key_width, value_width; /* numbers of a token that share a scale; 0: each channel has its own */
} Coded;

INLINE float from_half(uint16_t half) {
    union { uint32_t bits; float number; } as;
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, rest = half & 1023;
    if (!exponent) return (sign ? -1.0f : 1.0f) * (float)rest * 0x1p-24f;
    as.bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | rest << 13;
    return as.number;
}

/* One block of a head to `to` (tokens, C); `bytes` and `codes` have room for all of it. */
static void decode(const Coded *coded, const uint8_t *memory, const int32_t *rows, long width, long C, uint8_t *bytes,
                   uint8_t *codes, float *scale, float *least, float *to) {
    for (long r = 0; r < coded->rows_each; r++)
        memcpy(bytes + r * coded->row_bytes, memory + (long)rows[r] * coded->row_bytes, coded->row_bytes);
    long numbers = coded->tokens * C, packed = numbers * coded->bits / 8, count = width ? numbers / width : C;
    if (coded->bits == 8) memcpy(codes, bytes, numbers);
    else if (coded->bits == 4)
        for (long i = 0; i < packed; i++) codes[2 * i] = bytes[i] & 15, codes[2 * i + 1] = bytes[i] >> 4;
    else
        for (long i = 0; i < packed; i++)
            for (long part = 0; part < 4; part++) codes[4 * i + part] = bytes[i] >> (2 * part) & 3;
    for (long i = 0; i < count; i++) {
        uint16_t halves[2];
        memcpy(halves, bytes + packed + 2 * i, 2);
        memcpy(halves + 1, bytes + packed + 2 * (count + i), 2);
        scale[i] = from_half(halves[0]), least[i] = from_half(halves[1]);
    }
    if (!width)
        for (long t = 0; t < coded->tokens; t++)
            for (long c = 0; c < C; c++) to[t * C + c] = least[c] + (float)codes[t * C + c] * scale[c];
    else
        for (long i = 0; i < count; i++)
            for (long c = i * width; c < (i + 1) * width; c++) to[c] = least[i] + (float)codes[c] * scale[i];
}

/* `rows` (N, stride) are right-aligned: head n has the last counts[n] of `plain` columns. Weights (N, all columns), if
   they are wanted, get the sum over the queries that share a key head. */
void attend_retained(const float *q, const float *keys, const float *values, const int32_t *rows, const int64_t *counts,
                 const int32_t *coded_rows, float *out, float *weights, long H, long N, long C, long stride, long plain,
                 long blocks, long rows_each, long tokens, long bits, long key_width, long value_width, float scale,
                 int threads) {
    Coded coded = {coded_rows, blocks, rows_each, C * sizeof(float), tokens, bits, key_width, value_width};
    long group = H / N, old = blocks * tokens, all = old + plain;
    long room = rows_each * coded.row_bytes + tokens * C, scales = tokens * C;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (H * all * C > 65536)
    for (long n = 0; n < N; n++) {
        long missing = plain - counts[n], padded = (all + B - 1) / B * B;
        float *s = malloc(group * padded * sizeof *s), *block = malloc((tokens * C + 2 * scales + 1) * sizeof *block);
        uint8_t *bytes = malloc(room + 1);
        const float *queries[group], *k[B];
        float *o[group], part[4 * B];
        for (long g = 0; g < group; g++) {
            queries[g] = q + (n * group + g) * C, o[g] = out + (n * group + g) * C;
            memset(o[g], 0, C * sizeof(float));
        }
        for (long at = 0, many; at < all; at += many) { /* scores of a block of keys */
            if (at < old) {
                many = tokens;
                decode(&coded, (const uint8_t *)keys, coded_rows + (n * blocks + at / tokens) * rows_each, key_width, C,
                       bytes, bytes + rows_each * coded.row_bytes, block + tokens * C, block + tokens * C + scales, block);
            } else many = all - at < B ? all - at : B;
            for (long m = 0; m < B; m++) {
                long place = m < many ? m : many - 1, column = at - old + place;
                if (at >= old && column < missing) column = missing; /* no row of this head: another stands for it */
                k[m] = at < old ? block + place * C : keys + (long)rows[n * stride + column] * C;
            }
            for (long g = 0; g < group; g += 4) {
                long R = group - g < 4 ? group - g : 4;
                scores(R, queries + g, k, C, 0, many, part, scale);
                for (long i = 0; i < R; i++) memcpy(s + (g + i) * padded + at, part + i * B, many * sizeof *s);
            }
        }
        for (long g = 0; g < group; g++) {
            float *own = s + g * padded, most = -INFINITY, total = 0.0f;
            for (long m = 0; m < missing; m++) own[old + m] = -INFINITY;
            for (long m = all; m < padded; m++) own[m] = -INFINITY;
            for (long m = 0; m < all; m++) most = own[m] > most ? own[m] : most;
            vec sum = splat(0.0f);
            for (long m = 0; m < padded; m += W) {
                vec p = vexp(load(own + m) - splat(most));
                store(own + m, p);
                sum += p;
            }
            total = lane_sum(sum);
            for (long m = 0; m < padded; m++) own[m] /= total;
            if (weights)
                for (long m = 0; m < all; m++) weights[n * all + m] += own[m];
        }
        for (long at = 0, many; at < all; at += many) { /* the values, weighed */
            if (at < old) {
                many = tokens;
                decode(&coded, (const uint8_t *)values, coded_rows + (n * blocks + at / tokens) * rows_each, value_width,
                       C, bytes, bytes + rows_each * coded.row_bytes, block + tokens * C, block + tokens * C + scales,
                       block);
            } else many = all - at < B ? all - at : B;
            for (long m = 0; m < many; m++) {
                long column = at - old + m;
                if (at >= old && column < missing) column = missing;
                k[m] = at < old ? block + m * C : values + (long)rows[n * stride + column] * C;
            }
            for (long g = 0; g < group; g += 4)
                weigh_all(group - g < 4 ? group - g : 4, s + g * padded + at, padded, 1, k, 0, many, o + g, C);
        }
        free(s), free(block), free(bytes);
    }
}
