/* The best by codes among all vectors, then by the full vectors. Threads take parts of the rows; which, makes no
   difference: among equals the lower number is the better, in a part as in the whole. */
#include "nearest.h"

#define PART 4096 /* rows that are taken at a time */

/* Those that are alive of a part, into a pool of its own. */
static long scan_part(const Index *index, const Query *query, long first, long last, Found *pool, long size) {
    long count = 0;
    for (long n = first; n < last; n++) {
        if (index->alive && !index->alive[n]) continue;
        put(pool, &count, size, (Found){(uint32_t)n, far_from(&index->graph.records, query, (uint32_t)n)});
    }
    return count;
}

void nearest_scan(const Index *index, const float *queries, long count, long k, long size, int64_t *ids, float *scores,
                  int threads) {
    long rows = index->graph.count, parts = (rows + PART - 1) / PART;
    int8_t *codes = malloc(index->graph.records.size);
    Found *pools = malloc(parts * size * sizeof(Found) + 1), *pool = malloc(size * sizeof(Found));
    long *found = malloc(parts * sizeof(long) + 1);
    for (long q = 0; q < count; q++) {
        const float *given = queries + q * index->full.size;
        Query query = as_query(index, given, codes);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
        for (long part = 0; part < parts; part++) {
            long first = part * PART, last = first + PART < rows ? first + PART : rows;
            found[part] = scan_part(index, &query, first, last, pools + part * size, size);
        }
        long best = 0;
        for (long part = 0; part < parts; part++)
            for (long i = 0; i < found[part] && put(pool, &best, size, pools[part * size + i]) < size; i++) continue;
        rank_again(&index->full, given, index->distance, pool, best);
        answer(pool, best, k, ids + q * k, scores + q * k);
    }
    free(codes), free(pools), free(pool), free(found);
}
