/* The nearest of every vector within groups of vectors, by blocks: scalar products of all pairs of a group. Groups that
   overlap make lists that are nearly those of all vectors. */
#include "nearest.h"

#define ROWS 32    /* of a block: their codes stay in the nearest cache */
#define WAITING 64 /* pairs that wait to be sorted into a list */

typedef struct {
    Found list[WAITING];
    long count;
    float limit; /* what is not nearer than the last of the list cannot enter it */
} Waiting;

typedef uint64_t Key;

INLINE Key key(const Found *one) {
    uint32_t far;
    memcpy(&far, &one->far, 4);
    return (Key)far << 32 | one->id;
}

void sort_found(Found *found, long count) {
    while (count > 24) { /* quicksort about the middle of three, the smaller part by another call */
        Key low = key(found), middle = key(found + count / 2), high = key(found + count - 1);
        Key pivot = low < middle ? (middle < high ? middle : low < high ? high : low)
                                 : (low < high ? low : middle < high ? high : middle);
        long i = 0, j = count - 1;
        while (i <= j) {
            while (key(found + i) < pivot) i++;
            while (key(found + j) > pivot) j--;
            if (i <= j) {
                Found moved = found[i];
                found[i++] = found[j], found[j--] = moved;
            }
        }
        if (j + 1 < count - i) sort_found(found, j + 1), found += i, count -= i;
        else sort_found(found + i, count - i), count = j + 1;
    }
    for (long i = 1; i < count; i++) {
        Found one = found[i];
        Key mine = key(&one);
        long at = i;
        for (; at && key(found + at - 1) > mine; at--) found[at] = found[at - 1];
        found[at] = one;
    }
}

static void settle(Waiting *waiting, Found *list, long length) {
    Found merged[length];
    sort_found(waiting->list, waiting->count);
    long old = 0, new = 0, count = 0;
    while (count < length && (old < length || new < waiting->count)) {
        Found next = new == waiting->count || (old < length && !nearer(waiting->list[new], list[old])) ? list[old++]
                                                                                                      : waiting->list[new++];
        if (count && next.id == merged[count - 1].id && next.id != NOBODY) continue; /* met in an earlier group too */
        merged[count++] = next;
    }
    memcpy(list, merged, count * sizeof(Found));
    waiting->count = 0, waiting->limit = list[length - 1].far;
}

/* Scalar products of four rows with four. */
INLINE void four_by_four(const int8_t *a, const int8_t *b, long size, int32_t to[4][4]) {
#if defined(__ARM_FEATURE_DOTPROD)
    int32x4_t sum[4][4];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) sum[i][j] = vdupq_n_s32(0);
    for (long k = 0; k < size; k += 16) {
        int8x16_t x[4], y[4];
        for (int i = 0; i < 4; i++) x[i] = vld1q_s8(a + i * size + k);
        for (int j = 0; j < 4; j++) y[j] = vld1q_s8(b + j * size + k);
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) sum[i][j] = vdotq_s32(sum[i][j], x[i], y[j]);
    }
    for (int i = 0; i < 4; i++)
        vst1q_s32(to[i], vpaddq_s32(vpaddq_s32(sum[i][0], sum[i][1]), vpaddq_s32(sum[i][2], sum[i][3])));
#elif defined(__AVX2__)
    __m256i sum[4][4];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) sum[i][j] = _mm256_setzero_si256();
    for (long k = 0; k < size; k += 32)
        for (int i = 0; i < 4; i++) {
            __m256i x = load_bytes(a + i * size + k), positive = _mm256_abs_epi8(x);
            for (int j = 0; j < 4; j++)
                sum[i][j] = add_bytes(sum[i][j], positive, _mm256_sign_epi8(load_bytes(b + j * size + k), x));
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) to[i][j] = add_lanes(sum[i][j]);
#else
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) to[i][j] = dot8(a + i * size, b + j * size, size);
#endif
}

typedef struct {
    int8_t *codes;
    float *unit, *length;
    const uint32_t *id;
    long count, size;
} Group;

static void block_lists(const Group *g, long first, Found *lists, long length) {
    Waiting *waiting = malloc(ROWS * sizeof(Waiting));
    long rows = g->count - first < ROWS ? g->count - first : ROWS;
    for (long r = 0; r < rows; r++)
        waiting[r].count = 0, waiting[r].limit = lists[g->id[first + r] * length + length - 1].far;
    for (long other = 0; other < g->count; other += 4)
        for (long r = 0; r < rows; r += 4) {
            int32_t products[4][4];
            four_by_four(g->codes + (first + r) * g->size, g->codes + other * g->size, g->size, products);
            for (long i = r; i < r + 4 && i < rows; i++) {
                long me = first + i;
                float far[4];
                int near = 0;
                for (long j = 0; j < 4; j++) {
                    float units = g->unit[me] * g->unit[other + j], lengths = g->length[me] + g->length[other + j];
                    far[j] = no_less_than_zero(lengths - 2.0f * (units * (float)products[i - r][j]));
                    near |= far[j] <= waiting[i].limit;
                }
                if (!near) continue;
                for (long j = 0; j < 4; j++) {
                    if (far[j] > waiting[i].limit || other + j >= g->count || other + j == me) continue;
                    waiting[i].list[waiting[i].count++] = (Found){g->id[other + j], far[j]};
                    if (waiting[i].count == WAITING) settle(&waiting[i], lists + g->id[me] * length, length);
                }
            }
        }
    for (long r = 0; r < rows; r++) settle(&waiting[r], lists + g->id[first + r] * length, length);
    free(waiting);
}

/* `lists`: for each vector `length` of its nearest so far, nearest first, NOBODY infinitely far where there are none yet.
   `groups` are rows of `members` from starts[g] to starts[g + 1]; nobody is in a group twice. */
void nearest_lists(const uint8_t *at, long stride, long size, const uint32_t *members, const int64_t *starts, long groups,
                   Found *lists, long length, int threads) {
    Records records = {at, stride, size, 8};
    for (long group = 0; group < groups; group++) {
        long count = starts[group + 1] - starts[group], whole = (count + 3) / 4 * 4;
        if (count < 2) continue;
        Group g = {calloc(whole, size), calloc(whole, 4), calloc(whole, 4), members + starts[group], count, size};
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(static)
            for (long i = 0; i < count; i++) {
                memcpy(g.codes + i * size, record(&records, g.id[i]), size);
                g.unit[i] = unit_of(&records, g.id[i]), g.length[i] = length_of(&records, g.id[i]);
            }
#pragma omp for schedule(dynamic)
            for (long first = 0; first < count; first += ROWS) block_lists(&g, first, lists, length);
        }
        free(g.codes), free(g.unit), free(g.length);
    }
}
