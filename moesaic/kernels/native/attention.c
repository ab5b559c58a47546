/* Attention of a whole flat batch, straight from the pages of the cache.

   Keys are taken in blocks of B that begin at multiples of B of the sequence, with a running maximum and sum per query
   (online softmax). What one query does is thus the same, operation for operation, whichever queries it shares a tile
   with, and however its sequence was split into steps. Rows of the cache that no query of a tile may see are not
   touched: they may hold anything. */
#include "attention.h"
#include "stages.h"

#define ROWS 16  /* about how many queries share a block of keys while it is in the nearest cache */
#define ALONE 262144 /* products; fewer are not worth waking the other threads */

typedef struct {
    long low, high; /* the keys this query may see */
    const uint8_t *mask;
    float most, total;
} Query;

/* Has a short row fetched while other work is done. */
INLINE void ask_for(const float *row, long size) {
    for (long i = 0; i < size; i += 16) __builtin_prefetch(row + i, 0, 2);
}

/* Turns one query's scores of a block into weights; what it has gathered so far is scaled to the new maximum. */
static void weights(Query *query, float *s, long block, long count, float *o, long X) {
    long padded = (count + W - 1) / W * W;
    int all = !query->mask && block >= query->low && block + count <= query->high;
    for (long m = all ? count : 0; m < padded; m++) {
        long place = block + m;
        int seen = m < count && place >= query->low && place < query->high && (!query->mask || query->mask[place]);
        if (!seen) s[m] = -INFINITY;
    }
    vec most = load(s);
    for (long m = W; m < padded; m += W) {
        vec more = load(s + m);
        most = pick(more > most, more, most);
    }
    float block_most = lane_max(most), new_most = block_most > query->most ? block_most : query->most;
    if (new_most == -INFINITY) { /* nothing seen yet */
        memset(s, 0, padded * sizeof *s);
        return;
    }
    float shrink = exp1(query->most - new_most);
    vec sum = splat(0.0f);
    for (long m = 0; m < padded; m += W) {
        vec p = vexp(load(s + m) - splat(new_most));
        store(s + m, p);
        sum += p;
    }
    query->total = query->total * shrink + lane_sum(sum);
    query->most = new_most;
    if (shrink != 1.0f)
        for (long i = 0; i < X; i++) o[i] *= shrink;
}

/* The queries of tokens first..last of sequence s that share key head n. */
static void attend_tile(const Attention *a, long s, long n, long first, long last, float *scratch) {
    const int64_t *span = a->spans + 4 * s;
    long group = a->H / a->N, rows = (last - first) * group, C = a->C, X = a->X;
    long before = span[2] - span[0], total = span[1] + before;
    const uint8_t *mask = a->masks ? (const uint8_t *)(intptr_t)a->masks[s] : NULL;
    const float *q[rows], *k[B], *v[B];
    float *o[rows];
    Query query[rows];
    long low = total, high = 0;
    for (long r = 0; r < rows; r++) {
        long t = first + r / group, h = n * group + r % group, place = t + before;
        q[r] = a->q + t * a->q_stride + h * C;
        o[r] = a->out + (t * a->H + h) * X;
        query[r] = (Query){0, a->both_ways ? total : place + 1, NULL, a->sinks ? a->sinks[h] : -INFINITY, a->sinks ? 1.0f : 0.0f};
        if (a->both_ways && a->window > 0 && place + a->window < total) query[r].high = place + a->window;
        if (mask) query[r].mask = mask + (t - span[0]) * total, query[r].high = total;
        else if (a->window > 0 && place + 1 > a->window) query[r].low = place + 1 - a->window;
        else if (a->window < 0) query[r].low = place / -a->window * -a->window; /* chunks of so many */
        low = query[r].low < low ? query[r].low : low;
        high = query[r].high > high ? query[r].high : high;
        memset(o[r], 0, X * sizeof(float));
    }
    long row = 0, at = -2, page_end = 0;
    for (long block = low / B * B; block < high; block += B) {
        long begin = low > block ? low - block : 0, count = high - block < B ? high - block : B;
        for (long m = 0; m < B; m++) { /* places that may not be touched stand for their nearest neighbour */
            long place = block + (m < begin ? begin : m < count ? m : count - 1);
            if (!a->keys) row = span[3] + place;
            else if (place == at + 1 && place < page_end) row++; /* spares the divisions */
            else if (place != at) row = page_row(a, s, place), page_end = place - place % a->page_size + a->page_size;
            at = place;
            k[m] = a->keys ? a->keys + (row * a->N + n) * C : a->k + row * a->k_stride + n * C;
            v[m] = a->keys ? a->values + (row * a->N + n) * X : a->v + row * a->v_stride + n * X;
            /* A head's row is short and the next lies apart: the processor does not guess them by itself. */
            if (m < count) ask_for(k[m], C), ask_for(v[m], X);
        }
        for (long r = 0; r < rows; r += 4) {
            long R = rows - r < 4 ? rows - r : 4;
            scores(R, q + r, k, C, begin, count, scratch, a->scale);
            for (long i = 0; i < R; i++) weights(query + r + i, scratch + i * B, block, count, o[r + i], X);
            weigh_all(R, scratch, B, 1, v, begin, count, o + r, X);
        }
    }
    for (long r = 0; r < rows; r++) {
        for (long i = 0; i < X; i++) o[r][i] /= query[r].total;
        if (a->sums) a->sums[(o[r] - a->out) / X] = query[r].most + logf(query[r].total);
    }
}

void attend_stage(Member *m, const Attention *a) {
    if (a->retained) {
        retained_stage(m, a);
        return;
    }
    long tokens_a_tile = ROWS / (a->H / a->N) > 1 ? ROWS / (a->H / a->N) : 1, S = a->S, N = a->N, item;
    const int64_t *spans = a->spans;
    long *first_item = malloc((S + 1) * sizeof *first_item);
    first_item[0] = 0;
    for (long s = 0; s < S; s++) {
        long new = spans[4 * s + 1] - spans[4 * s];
        first_item[s + 1] = first_item[s] + (new + tokens_a_tile - 1) / tokens_a_tile * N;
    }
    float scratch[4 * B];
    while (take_one(m, first_item[S], &item)) {
        long low = 0, high = S; /* the sequence this item belongs to */
        while (high - low > 1) {
            long middle = (low + high) / 2;
            if (first_item[middle] <= item) low = middle;
            else high = middle;
        }
        long within = item - first_item[low], start = spans[4 * low] + within / N * tokens_a_tile;
        long stop = start + tokens_a_tile < spans[4 * low + 1] ? start + tokens_a_tile : spans[4 * low + 1];
        attend_tile(a, low, within % N, start, stop, scratch);
    }
    free(first_item);
}

/* New keys and values go to the cache, if there is one; then every token attends to its own sequence so far;
   `both_ways`, which takes no cache, to all of it. */
void attend(const float *q, const float *k, const float *v, float *keys, float *values, float *out,
            float *sums, const float *sinks, const int64_t *spans, const int64_t *table, const int64_t *masks, long S, long columns, long page_size,
            long q_stride, long k_stride, long v_stride, long H, long N, long C, long X, long window, float scale,
            int both_ways, int threads) {
    Attention a = {q,       k,         v,        keys,     values,   out, sums, spans, table, masks, S,
                   columns, page_size, q_stride, k_stride, v_stride, H,   N,    C,     X,     window, scale, both_ways,
                   sinks};
    Team team = {0};
    long work = 0;
    for (long s = 0; s < S; s++) {
        long new = spans[4 * s + 1] - spans[4 * s];
        work += new * (new + spans[4 * s + 2]) * H * C;
    }
#pragma omp parallel num_threads(threads) if (work > ALONE)
    {
        Member m = join(&team);
        if (keys) {
            long from, to;
            while (take(&m, S, &from, &to))
                for (long s = from; s < to; s++)
                    for (long t = spans[4 * s]; t < spans[4 * s + 1]; t++) {
                        long row = page_row(&a, s, t - spans[4 * s] + spans[4 * s + 2]);
                        memcpy(keys + row * N * C, k + t * k_stride, N * C * sizeof(float));
                        memcpy(values + row * N * X, v + t * v_stride, N * X * sizeof(float));
                    }
            meet(&m);
        }
        attend_stage(&m, &a);
    }
}

/* Queries of one key head that attend to chosen keys: `chosen` has a row of `topk` places for each token, in order, and
   -1 behind the last. Blocks are of B chosen keys, so that whoever chose all that it may see has the bits of attention to
   all, and nobody's depend on what others chose. */
static void attend_chosen(const Attention *a, const int32_t *chosen, long topk, long t, long n, float *scratch) {
    long group = a->H / a->N, C = a->C, X = a->X;
    const float *q = a->q + t * a->q_stride + n * group * C, *k[B], *v[B], *q_rows[group];
    float *out = a->out + (t * a->H + n * group) * X, *o[group];
    Query query[group];
    for (long r = 0; r < group; r++)
        q_rows[r] = q + r * C, o[r] = out + r * X, query[r] = (Query){0, LONG_MAX, NULL, -INFINITY, 0.0f};
    memset(out, 0, group * X * sizeof(float));
    chosen += t * topk;
    for (long block = 0; block < topk && chosen[block] >= 0; block += B) {
        long count = 0;
        for (; count < B && block + count < topk && chosen[block + count] >= 0; count++) {
            long place = chosen[block + count];
            k[count] = a->k + place * a->k_stride + n * C, v[count] = a->v + place * a->v_stride + n * X;
            ask_for(k[count], C), ask_for(v[count], X);
        }
        for (long m = count; m < B; m++) k[m] = k[count - 1], v[m] = v[count - 1];
        for (long r = 0; r < group; r += 4) {
            long R = group - r < 4 ? group - r : 4;
            scores(R, q_rows + r, k, C, 0, count, scratch, a->scale);
            for (long i = 0; i < R; i++) weights(query + r + i, scratch + i * B, block, count, o[r + i], X);
            weigh_all(R, scratch, B, 1, v, 0, count, o + r, X);
        }
    }
    for (long r = 0; r < group; r++)
        for (long i = 0; i < X; i++) o[r][i] /= query[r].total;
}

/* One sequence: T tokens, and all of its keys and values. */
void attend_to_chosen(const float *q, const float *k, const float *v, const int32_t *chosen, float *out, long T, long topk,
                      long q_stride, long k_stride, long v_stride, long H, long N, long C, long X, float scale,
                      int threads) {
    Attention a = {.q = q, .k = k, .v = v, .out = out, .q_stride = q_stride, .k_stride = k_stride,
                   .v_stride = v_stride, .H = H, .N = N, .C = C, .X = X, .scale = scale};
    long tiles = (T + ROWS - 1) / ROWS;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (T > 1)
    for (long item = 0; item < N * tiles; item++) { /* a head's keys after another's: neighbours look at much the same */
        float scratch[4 * B];
        long first = item % tiles * ROWS, last = first + ROWS < T ? first + ROWS : T;
        for (long t = first; t < last; t++) attend_chosen(&a, chosen, topk, t, item / tiles, scratch);
    }
}
