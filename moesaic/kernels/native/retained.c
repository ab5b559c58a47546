/* Attention of a few new tokens to what compact requests retain, head by head, straight from the cache.

   Plain rows lie anywhere. The oldest tokens may be blocks of codes (`serve/core/kv/encoding.py`), and nobody makes
   numbers of these again: a query is multiplied by a block's scales and then by its codes, and a token's weight by its
   scales before its codes are added up. What a token gets is the same, operation for operation, alone or beside others. */
#include "retained.h"
#include "attention.h"

#define MOST_QUERIES 4 /* that are multiplied with a block at a time */

typedef float f8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));
typedef uint64_t w4 __attribute__((vector_size(32)));

INLINE f8 load8(const float *from) { f8 v; memcpy(&v, from, sizeof v); return v; }
INLINE void store8(float *to, f8 v) { memcpy(to, &v, sizeof v); }
INLINE f8 splat8(float value) { return value - (f8){0}; }
INLINE float sum8(f8 v) {
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
    return v[0] + v[1];
}

/* Codes number..number + 8 of a block; number is a multiple of 8. */
INLINE f8 codes8(int bits, const uint8_t *block, long number) {
    uint64_t together = 0;
    memcpy(&together, block + number * bits / 8, bits);
    u8 each = (uint32_t)together - (u8){0};
    if (bits == 2) each = each >> (u8){0, 2, 4, 6, 8, 10, 12, 14} & 3;
    if (bits == 4) each = each >> (u8){0, 4, 8, 12, 16, 20, 24, 28} & 15;
    if (bits == 8) {
        each = (u8)(together - (w4){0});
        each = __builtin_shufflevector(each, each, 0, 2, 4, 6, 1, 3, 5, 7) >> (u8){0, 8, 16, 24, 0, 8, 16, 24} & 255;
    }
    return __builtin_convertvector((i8)each, f8);
}

/* Eight numbers of 16 bits; the product puts the exponent right, also of those too small for one. */
INLINE f8 halves8(const uint8_t *from) {
    h8 half;
    memcpy(&half, from, sizeof half);
    u8 wide = __builtin_convertvector(half, u8);
    u8 number = (wide & 0x7fff) << 13;
    f8 v = (f8)number * splat8(0x1p112f);
    return (f8)((u8)v | (wide & 0x8000) << 16);
}

static void halves(const uint8_t *from, float *to, long count) {
    for (long i = 0; i < count; i += 8) store8(to + i, halves8(from + 2 * i));
}

/* A block as it is read: its codes, and then scales and least values as numbers. */
typedef struct {
    uint8_t *bytes;
    float *scale, *least;
} Codes;

static void read_block(const Retained *kept, const float *slab, const int32_t *rows, long width, long C, Codes *to) {
    long row_bytes = C * sizeof *slab, numbers = kept->tokens * C, packed = numbers * kept->bits / 8;
    long count = width ? numbers / width : C;
    for (long r = 0; r < kept->rows_each; r++) memcpy(to->bytes + r * row_bytes, slab + rows[r] * C, row_bytes);
    halves(to->bytes + packed, to->scale, count), halves(to->bytes + packed + 2 * count, to->least, count);
}

/* Up to four sums, one for each query, by name: in an array they would be kept in memory. */
#define EACH(R, act)                                                                                                   \
    do {                                                                                                               \
        act(0, a);                                                                                                     \
        if (R > 1) act(1, b);                                                                                          \
        if (R > 2) act(2, c);                                                                                          \
        if (R > 3) act(3, d);                                                                                          \
    } while (0)

/* Scores of R queries against a block whose channels have a scale each; those of one query are `row` apart. */
INLINE void channel_scores(int bits, int R, const Retained *kept, const Codes *codes, const float *const *q, long C,
                           float scale, float *to, long row) {
    float scaled[MOST_QUERIES][C], base[MOST_QUERIES];
    for (int r = 0; r < R; r++) {
        f8 sum = splat8(0.0f);
        for (long i = 0; i < C; i += 8) {
            f8 own = load8(q[r] + i) * splat8(scale);
            sum += own * load8(codes->least + i);
            store8(scaled[r] + i, own * load8(codes->scale + i));
        }
        base[r] = sum8(sum);
    }
    for (long t = 0; t < kept->tokens; t++) {
        f8 a = splat8(0.0f), b = a, c = a, d = a;
        for (long i = 0; i < C; i += 8) {
            f8 code = codes8(bits, codes->bytes, t * C + i);
#define ADD(r, sum) sum += code * load8(scaled[r] + i)
            EACH(R, ADD);
        }
#define PUT(r, sum) to[r * row + t] = base[r] + sum8(sum)
        EACH(R, PUT);
#undef ADD
#undef PUT
    }
}

/* The same where `width` numbers of a token share a scale. */
INLINE void token_scores(int bits, int R, const Retained *kept, const Codes *codes, const float *const *q, long C,
                         float scale, float *to, long row) {
    long width = kept->key_width, parts = C / width;
    float total[MOST_QUERIES][parts];
    for (int r = 0; r < R; r++)
        for (long p = 0; p < parts; p++) {
            f8 sum = splat8(0.0f);
            for (long i = p * width; i < (p + 1) * width; i += 8) sum += load8(q[r] + i);
            total[r][p] = sum8(sum);
        }
    for (long t = 0; t < kept->tokens; t++) {
        f8 a = splat8(0.0f), b = a, c = a, d = a;
        for (long i = 0; i < C; i += 8) {
            f8 code = codes8(bits, codes->bytes, t * C + i) * splat8(codes->scale[t * parts + i / width]);
#define ADD(r, sum) sum += code * load8(q[r] + i)
            EACH(R, ADD);
        }
        const float *least = codes->least + t * parts;
        for (int r = 0; r < R; r++) {
            float base = 0.0f;
            for (long p = 0; p < parts; p++) base += least[p] * total[r][p];
            to[r * row + t] = base;
        }
#define PUT(r, sum) to[r * row + t] = (to[r * row + t] + sum8(sum)) * scale
        EACH(R, PUT);
#undef ADD
#undef PUT
    }
}

/* Adds a block's values, weighed, to what R queries have so far. */
INLINE void weigh_codes(int bits, int R, const Retained *kept, const Codes *codes, const float *p, long row, long C,
                        float *const *o) {
    long width = kept->value_width, parts = C / width, T = kept->tokens;
    float weight[MOST_QUERIES][T], base[MOST_QUERIES];
    for (long part = 0; part < parts; part++) {
        for (int r = 0; r < R; r++) {
            base[r] = 0.0f;
            for (long t = 0; t < T; t++) {
                weight[r][t] = p[r * row + t] * codes->scale[t * parts + part];
                base[r] += p[r * row + t] * codes->least[t * parts + part];
            }
        }
        for (long i = part * width; i < (part + 1) * width; i += 8) {
            f8 a, b, c, d;
            (void)b, (void)c, (void)d;
#define GET(r, sum) sum = load8(o[r] + i) + splat8(base[r])
#define ADD(r, sum) sum += code * splat8(weight[r][t])
#define PUT(r, sum) store8(o[r] + i, sum)
            EACH(R, GET);
            for (long t = 0; t < T; t++) {
                f8 code = codes8(bits, codes->bytes, t * C + i);
                EACH(R, ADD);
            }
            EACH(R, PUT);
#undef GET
#undef ADD
#undef PUT
        }
    }
}

#define OF_BITS(call, R, ...)                                                                                          \
    (kept->bits == 2 ? call(2, R, __VA_ARGS__) : kept->bits == 4 ? call(4, R, __VA_ARGS__) : call(8, R, __VA_ARGS__))
#define OF_QUERIES(call, R, ...)                                                                                       \
    (R == 4   ? OF_BITS(call, 4, __VA_ARGS__)                                                                          \
     : R == 3 ? OF_BITS(call, 3, __VA_ARGS__)                                                                          \
     : R == 2 ? OF_BITS(call, 2, __VA_ARGS__)                                                                          \
              : OF_BITS(call, 1, __VA_ARGS__))

static void code_scores(long R, const Retained *kept, const Codes *codes, const float *const *q, long C, float scale,
                        float *to, long row) {
    if (kept->key_width) OF_QUERIES(token_scores, R, kept, codes, q, C, scale, to, row);
    else OF_QUERIES(channel_scores, R, kept, codes, q, C, scale, to, row);
}

static void code_values(long R, const Retained *kept, const Codes *codes, const float *p, long row, long C,
                        float *const *o) {
    OF_QUERIES(weigh_codes, R, kept, codes, p, row, C, o);
}

INLINE void ask_for_row(const float *row, long C) {
    for (long i = 0; i < C; i += 16) __builtin_prefetch(row + i, 0, 2);
}

/* Scores to weights; there is room for whole vectors. */
static void softmax(float *s, long count) {
    float most = -INFINITY;
    long padded = (count + W - 1) / W * W;
    for (long m = 0; m < count; m++) most = s[m] > most ? s[m] : most;
    for (long m = count; m < padded; m++) s[m] = -INFINITY;
    vec sum = splat(0.0f);
    for (long m = 0; m < padded; m += W) {
        vec p = vexp(load(s + m) - splat(most));
        store(s + m, p);
        sum += p;
    }
    vec whole = splat(1.0f / lane_sum(sum));
    for (long m = 0; m < padded; m += W) store(s + m, load(s + m) * whole);
}

typedef struct {
    const Attention *a;
    const Retained *kept;
    long n, group, room;
    float *s; /* (group, room) */
    Codes codes;
} Head;

/* New token t of a request, whose `count` plain rows it sees, with the queries of one key head. */
static void attend_token(const Head *head, long t, long count, float *const *o) {
    const Attention *a = head->a;
    const Retained *kept = head->kept;
    long C = a->C, group = head->group, room = head->room, old = kept->blocks * kept->tokens, n = head->n;
    const int32_t *rows = kept->rows + n * kept->stride + kept->plain - kept->counts[n];
    const int32_t *coded = kept->coded + n * kept->blocks * kept->rows_each;
    const float *q[group], *block[B];
    float part[4 * B];
    for (long g = 0; g < group; g++) {
        q[g] = a->q + t * a->q_stride + (n * group + g) * C;
        memset(o[g], 0, C * sizeof(float));
    }
    for (long b = 0; b < kept->blocks; b++) {
        for (long r = 0; b + 1 < kept->blocks && r < kept->rows_each; r++)
            ask_for_row(a->keys + coded[(b + 1) * kept->rows_each + r] * C, C);
        read_block(kept, a->keys, coded + b * kept->rows_each, kept->key_width, C, (Codes *)&head->codes);
        for (long g = 0; g < group; g += MOST_QUERIES)
            code_scores(group - g < MOST_QUERIES ? group - g : MOST_QUERIES, kept, &head->codes, q + g, C, a->scale,
                        head->s + g * room + b * kept->tokens, room);
    }
    for (long at = 0; at < count; at += B) {
        long many = count - at < B ? count - at : B;
        for (long m = at + B; m < count && m < at + 2 * B; m++) ask_for_row(a->keys + (long)rows[m] * C, C);
        for (long m = 0; m < B; m++) block[m] = a->keys + (long)rows[at + (m < many ? m : many - 1)] * C;
        for (long g = 0; g < group; g += 4) {
            long R = group - g < 4 ? group - g : 4;
            scores(R, q + g, block, C, 0, many, part, a->scale);
            for (long i = 0; i < R; i++)
                memcpy(head->s + (g + i) * room + old + at, part + i * B, many * sizeof *part);
        }
    }
    for (long g = 0; g < group; g++) softmax(head->s + g * room, old + count);
    for (long b = 0; b < kept->blocks; b++) {
        for (long r = 0; b + 1 < kept->blocks && r < kept->rows_each; r++)
            ask_for_row(a->values + coded[(b + 1) * kept->rows_each + r] * C, C);
        read_block(kept, a->values, coded + b * kept->rows_each, kept->value_width, C, (Codes *)&head->codes);
        for (long g = 0; g < group; g += MOST_QUERIES)
            code_values(group - g < MOST_QUERIES ? group - g : MOST_QUERIES, kept, &head->codes,
                        head->s + g * room + b * kept->tokens, room, C, o + g);
    }
    for (long at = 0; at < count; at += B) {
        long many = count - at < B ? count - at : B;
        for (long m = at + B; m < count && m < at + 2 * B; m++) ask_for_row(a->values + (long)rows[m] * C, C);
        for (long m = 0; m < many; m++) block[m] = a->values + (long)rows[at + m] * C;
        for (long g = 0; g < group; g += 4)
            weigh_all(group - g < 4 ? group - g : 4, head->s + g * room + old + at, room, 1, block, 0, many, o + g, C);
    }
}

/* Adds one token's attention, as far as it has faded since, to the scores of its rows. */
static void add_scores(const Head *head, long count, float faded) {
    const Retained *kept = head->kept;
    long old = kept->blocks * kept->tokens, missing = kept->plain - kept->counts[head->n];
    float *scores = kept->scores + head->n * kept->stride;
    for (long g = 0; g < head->group; g++) {
        const float *s = head->s + g * head->room;
        for (long m = 0; m < old; m++) scores[m] += faded * s[m];
        for (long m = 0; m < count; m++) scores[old + missing + m] += faded * s[old + m];
    }
}

/* To the nearest bfloat16, of two the even one. */
static void record(const Retained *kept, const float *q, long slot, long H, long C, long first, long many) {
    uint16_t *to = kept->queries + slot * H * C;
    for (long i = first; i < first + many; i++) {
        uint32_t bits;
        memcpy(&bits, q + i, 4);
        to[i] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
}

static void attend_head(const Attention *a, long s, long n) {
    const int64_t *span = a->spans + 4 * s;
    const Retained *kept = a->retained + s;
    long group = a->H / a->N, C = a->C, new = span[1] - span[0], most = kept->blocks * kept->tokens + kept->counts[n];
    long room = (most + B - 1) / B * B, scales = kept->tokens * C;
    Head head = {a, kept, n, group, room, malloc((group * room + 2 * scales) * sizeof(float)), {0}};
    head.codes = (Codes){malloc(kept->rows_each * C * sizeof(float) + 1), head.s + group * room,
                         head.s + group * room + scales};
    float *o[group];
    for (long t = 0; t < new; t++) {
        long after = new - 1 - t, row = span[0] + t;
        for (long g = 0; g < group; g++) o[g] = a->out + (row * a->H + n * group + g) * C;
        attend_token(&head, row, kept->counts[n] - after, o);
        if (kept->scores && t >= kept->scored)
            add_scores(&head, kept->counts[n] - after, (float)pow(kept->decay, (double)after));
        if (kept->queries && after < kept->last)
            record(kept, a->q + row * a->q_stride, (kept->position + t) % kept->last, a->H, C, n * group * C, group * C);
    }
    free(head.s), free(head.codes.bytes);
}

void retained_stage(Member *m, const Attention *a) {
    for (long item; take_one(m, a->S * a->N, &item);) attend_head(a, item / a->N, item % a->N);
}

/* One layer of some requests, whose new keys and values are written already. */
void attend_retained(const float *q, float *keys, float *values, float *out, const int64_t *spans,
                     const Retained *retained, long S, long H, long N, long C, float scale, int threads) {
    Attention a = {.q = q, .keys = keys, .values = values, .out = out, .spans = spans, .S = S, .q_stride = H * C, .H = H,
                   .N = N, .C = C, .X = C, .scale = scale, .retained = retained};
    Team team = {0};
    long work = 0;
    for (long s = 0; s < S; s++) work += (retained[s].plain + retained[s].blocks * retained[s].tokens) * H * C;
#pragma omp parallel num_threads(threads) if (work > 65536)
    {
        Member m = join(&team);
        retained_stage(&m, &a);
    }
}
