/* Vectors as small whole numbers, for searching among them: a record is a vector's codes, then the float that turns them
   back into numbers, then the vector's squared length. Scalar products of codes are sums of whole numbers, so that they
   are the same on every machine, in any order.

   Codes have 8 bits, -127..127, or 4 bits, 0..15 for -7.5..7.5: of each 32 numbers the low halves of 16 bytes hold the
   first 16, the high halves the others. A query always has 8 bits. */
#pragma once

#include "vector.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

#ifdef _OPENMP
#include <omp.h>
#endif

#define NOBODY UINT32_MAX

typedef struct {
    const uint8_t *at;
    long stride, size; /* bytes of a record; numbers of a vector, a multiple of 32 */
    int bits;
} Records;

typedef struct {
    uint32_t id;
    float far; /* the lower the nearer */
} Found;

INLINE long code_bytes(const Records *records) { return records->size * records->bits / 8; }
INLINE const uint8_t *record(const Records *records, uint32_t id) { return records->at + id * records->stride; }
INLINE float record_float(const Records *records, uint32_t id, int which) {
    float value;
    memcpy(&value, record(records, id) + code_bytes(records) + 4 * which, 4);
    return value;
}
INLINE float unit_of(const Records *records, uint32_t id) { return record_float(records, id, 0); }
INLINE float length_of(const Records *records, uint32_t id) { return record_float(records, id, 1); }

INLINE int nearer(Found a, Found b) { return a.far < b.far || (a.far == b.far && a.id < b.id); }
INLINE float no_less_than_zero(float far) { return far > 0.0f ? far : 0.0f; }

/* Nearest first. Floats that are not negative are in the order of their bits, so that a pair is one whole number. */
void sort_found(Found *found, long count);

#if defined(__ARM_FEATURE_DOTPROD)

INLINE int32_t dot8(const int8_t *a, const int8_t *b, long size) {
    int32x4_t s = vdupq_n_s32(0), t = s, u = s, v = s;
    long i = 0;
    for (; i + 64 <= size; i += 64) {
        s = vdotq_s32(s, vld1q_s8(a + i), vld1q_s8(b + i));
        t = vdotq_s32(t, vld1q_s8(a + i + 16), vld1q_s8(b + i + 16));
        u = vdotq_s32(u, vld1q_s8(a + i + 32), vld1q_s8(b + i + 32));
        v = vdotq_s32(v, vld1q_s8(a + i + 48), vld1q_s8(b + i + 48));
    }
    for (; i < size; i += 16) s = vdotq_s32(s, vld1q_s8(a + i), vld1q_s8(b + i));
    return vaddvq_s32(vaddq_s32(vaddq_s32(s, t), vaddq_s32(u, v)));
}

INLINE int32_t dot4(const uint8_t *a, const int8_t *b, long size) {
    int32x4_t s = vdupq_n_s32(0), t = s;
    const uint8x16_t low = vdupq_n_u8(15);
    for (long i = 0; i < size; i += 32, a += 16) {
        uint8x16_t both = vld1q_u8(a);
        s = vdotq_s32(s, vreinterpretq_s8_u8(vandq_u8(both, low)), vld1q_s8(b + i));
        t = vdotq_s32(t, vreinterpretq_s8_u8(vshrq_n_u8(both, 4)), vld1q_s8(b + i + 16));
    }
    return vaddvq_s32(vaddq_s32(s, t));
}

#elif defined(__AVX2__)

/* Four products of bytes are added to each of the sums; the first factors are not negative. */
INLINE __m256i add_bytes(__m256i sum, __m256i a, __m256i b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpbusd_epi32(sum, a, b);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
#endif
}

INLINE int32_t add_lanes(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

INLINE __m256i load_bytes(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }

INLINE int32_t dot8(const int8_t *a, const int8_t *b, long size) {
    __m256i s = _mm256_setzero_si256(), t = s;
    long i = 0;
    for (; i + 64 <= size; i += 64) {
        __m256i x = load_bytes(a + i), y = load_bytes(a + i + 32);
        s = add_bytes(s, _mm256_abs_epi8(x), _mm256_sign_epi8(load_bytes(b + i), x));
        t = add_bytes(t, _mm256_abs_epi8(y), _mm256_sign_epi8(load_bytes(b + i + 32), y));
    }
    for (; i < size; i += 32) {
        __m256i x = load_bytes(a + i);
        s = add_bytes(s, _mm256_abs_epi8(x), _mm256_sign_epi8(load_bytes(b + i), x));
    }
    return add_lanes(_mm256_add_epi32(s, t));
}

INLINE int32_t dot4(const uint8_t *a, const int8_t *b, long size) {
    __m256i s = _mm256_setzero_si256();
    const __m128i low = _mm_set1_epi8(15);
    for (long i = 0; i < size; i += 32, a += 16) {
        __m128i both = _mm_loadu_si128((const __m128i *)a);
        __m128i high = _mm_and_si128(_mm_srli_epi16(both, 4), low);
        s = add_bytes(s, _mm256_set_m128i(high, _mm_and_si128(both, low)), load_bytes(b + i));
    }
    return add_lanes(s);
}

#else

INLINE int32_t dot8(const int8_t *a, const int8_t *b, long size) {
    int32_t sum = 0;
    for (long i = 0; i < size; i++) sum += (int16_t)a[i] * (int16_t)b[i];
    return sum;
}

INLINE int32_t dot4(const uint8_t *a, const int8_t *b, long size) {
    int32_t sum = 0;
    for (long i = 0; i < size; i += 32, a += 16)
        for (long j = 0; j < 16; j++) sum += (a[j] & 15) * b[i + j] + (a[j] >> 4) * b[i + j + 16];
    return sum;
}

#endif

/* The squared distance of two vectors with 8 bits. The order of the two makes no difference to a bit of it. */
INLINE float apart(const Records *records, uint32_t a, uint32_t b) {
    const int8_t *x = (const int8_t *)record(records, a), *y = (const int8_t *)record(records, b);
    float units = unit_of(records, a) * unit_of(records, b), lengths = length_of(records, a) + length_of(records, b);
    return no_less_than_zero(lengths - 2.0f * (units * (float)dot8(x, y, records->size)));
}

typedef struct {
    Records records;
    const uint32_t *links; /* `degree` a vector, NOBODY behind the last */
    long degree, count;
    const uint32_t *entries; /* where a walk may begin; the first is the navigating node */
    long entry_count;
} Graph;

/* What a walk looks for: the least of base + lengths * |x|^2 - 2 unit * <codes, x>. */
typedef struct {
    const int8_t *codes;
    float unit, base, lengths;
    int32_t sum; /* of the codes */
} Query;

typedef struct {
    uint64_t *seen; /* a bit per vector */
    uint32_t *fresh; /* room for a vector's links or all entries */
    Found *met;      /* where not NULL, everything that was looked at */
    long met_count, met_room;
} Walk;

Walk begin_walk(const Graph *graph, long met_room);
void end_walk(Walk *walk);
long walk(const Graph *graph, const Query *query, Found *pool, long size, Walk *state);
long choose(const Records *records, const Found *candidates, long count, uint32_t *links, long degree);

INLINE float far_from(const Records *records, const Query *query, uint32_t id) {
    const uint8_t *at = record(records, id);
    float product = records->bits == 8 ? (float)dot8((const int8_t *)at, query->codes, records->size)
                                       : (float)dot4(at, query->codes, records->size) - 7.5f * (float)query->sum;
    float units = query->unit * unit_of(records, id);
    return query->base + query->lengths * length_of(records, id) - 2.0f * (units * product);
}

/* Puts one at its place in the pool, where it is near enough; its place, or the pool's size. */
INLINE long put(Found *pool, long *count, long size, Found one) {
    if (*count == size && !(one.far < pool[size - 1].far)) return size;
    long low = 0, high = *count;
    while (low < high) {
        long middle = (low + high) / 2;
        if (pool[middle].far <= one.far) low = middle + 1;
        else high = middle;
    }
    if (low == size) return size;
    long moved = (*count < size ? *count : size - 1) - low;
    memmove(pool + low + 1, pool + low, moved * sizeof(Found));
    pool[low] = one;
    if (*count < size) ++*count;
    return low;
}

typedef struct {
    const float *rows; /* in memory, or NULL, and then in a file */
    int file;
    long offset, size; /* bytes before the first row; numbers of a row */
} Full;

float nearest_query(const float *query, long given, const float *middle, const float *signs, long size, long block,
                    int8_t *codes);

typedef struct {
    Graph graph;
    Full full;
    const float *middle, *signs;
    long block;
    int distance;
    const uint8_t *alive; /* NULL where all are */
} Index;

void rank_again(const Full *full, const float *query, int distance, Found *pool, long count);

/* A query as a walk or scan takes it; its codes go to `codes`. */
INLINE Query as_query(const Index *index, const float *given, int8_t *codes) {
    const Records *records = &index->graph.records;
    Query query = {codes, 0, 0, index->distance ? 1.0f : 0.0f, 0};
    query.unit = nearest_query(given, index->full.size, index->distance ? index->middle : NULL, index->signs,
                               records->size, index->block, codes);
    for (long i = 0; i < records->size; i++) query.sum += codes[i];
    return query;
}

INLINE void answer(const Found *pool, long count, long k, int64_t *ids, float *scores) {
    for (long i = 0; i < k; i++) {
        ids[i] = i < count ? (int64_t)pool[i].id : -1;
        scores[i] = i < count ? -pool[i].far : -INFINITY;
    }
}

INLINE void fetch_record(const Records *records, uint32_t id) {
    const uint8_t *at = record(records, id);
    for (long byte = 0; byte < records->stride; byte += 64) __builtin_prefetch(at + byte, 0, 3);
}
