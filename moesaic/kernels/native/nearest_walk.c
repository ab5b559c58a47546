/* Best-first search in a graph: a pool of the nearest so far, from which the nearest that was not yet expanded is
   expanded, until all are. */
#define _GNU_SOURCE
#include "nearest.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXPANDED 0x80000000u /* in a pool, of those whose links were followed */

Walk begin_walk(const Graph *graph, long met_room) {
    long links = graph->degree > graph->entry_count ? graph->degree : graph->entry_count;
    return (Walk){malloc((graph->count + 63) / 64 * 8), malloc(4 * links),
                  met_room ? malloc(met_room * sizeof(Found)) : NULL, 0, met_room};
}

void end_walk(Walk *walk) { free(walk->seen), free(walk->fresh), free(walk->met); }

INLINE long look(const Graph *graph, const Query *query, const uint32_t *links, long degree, Found *pool, long *count,
                 long size, Walk *state) {
    long fresh = 0, first = size;
    for (long i = 0; i < degree && links[i] != NOBODY; i++) {
        uint64_t bit = 1ull << (links[i] & 63), *word = state->seen + (links[i] >> 6);
        if (*word & bit) continue;
        *word |= bit;
        fetch_record(&graph->records, links[i]);
        state->fresh[fresh++] = links[i];
    }
    for (long i = 0; i < fresh; i++) {
        Found one = {state->fresh[i], far_from(&graph->records, query, state->fresh[i])};
        if (state->met && state->met_count < state->met_room) state->met[state->met_count++] = one;
        long at = put(pool, count, size, one);
        first = at < first ? at : first;
    }
    return first;
}

/* The nearest that were found, nearest first, and how many. */
long walk(const Graph *graph, const Query *query, Found *pool, long size, Walk *state) {
    memset(state->seen, 0, (graph->count + 63) / 64 * 8);
    long count = 0;
    state->met_count = 0;
    look(graph, query, graph->entries, graph->entry_count, pool, &count, size, state);
    for (long next = 0; next < count;) {
        if (pool[next].id & EXPANDED) {
            next++;
            continue;
        }
        uint32_t id = pool[next].id;
        pool[next].id |= EXPANDED;
        long first = look(graph, query, graph->links + id * graph->degree, graph->degree, pool, &count, size, state);
        next = first <= next ? first : next + 1;
        if (next < count) __builtin_prefetch(graph->links + (pool[next].id & ~EXPANDED) * graph->degree, 0, 3);
    }
    for (long i = 0; i < count; i++) pool[i].id &= ~EXPANDED;
    return count;
}

/* The inner product, or the squared distance. */
static float exactly(const float *x, const float *query, long size, int distance) {
    vec sum[4] = {{0}, {0}, {0}, {0}};
    long i = 0;
    for (; i + 4 * W <= size; i += 4 * W)
        for (int j = 0; j < 4; j++) {
            vec a = load(x + i + j * W), b = load(query + i + j * W);
            sum[j] = distance ? fused(sum[j], a - b, a - b) : fused(sum[j], a, b);
        }
    float total = lane_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; i < size; i++) total += distance ? (x[i] - query[i]) * (x[i] - query[i]) : x[i] * query[i];
    return total;
}

/* Scores by the full vectors. Of a file, what lies in the system's cache is read at once, and the rest in one batch: all
   reads are asked for before the first is waited for. */
void rank_again(const Full *full, const float *query, int distance, Found *pool, long count) {
    long bytes = 4 * full->size;
    float *read = full->rows ? NULL : malloc(count * bytes + 1);
    uint8_t missing[count + 1];
    for (long i = 0; i < count; i++) {
        if (full->rows)
            for (long byte = 0; byte < bytes; byte += 64)
                __builtin_prefetch((const char *)full->rows + pool[i].id * bytes + byte, 0, 2);
        else {
            long place = full->offset + pool[i].id * bytes;
            missing[i] = 1;
            (void)place; /* elsewhere than on Linux, one read after the other */
#ifdef __linux__
            struct iovec to = {read + i * full->size, bytes};
            if ((missing[i] = preadv2(full->file, &to, 1, place, RWF_NOWAIT) != bytes))
                posix_fadvise(full->file, place, bytes, POSIX_FADV_WILLNEED);
#endif
        }
    }
    for (long i = 0; i < count; i++) {
        const float *x = full->rows ? full->rows + pool[i].id * full->size : read + i * full->size;
        if (!full->rows && missing[i] &&
            pread(full->file, read + i * full->size, bytes, full->offset + pool[i].id * bytes) != bytes) {
            pool[i].far = INFINITY;
            continue;
        }
        float score = exactly(x, query, full->size, distance);
        pool[i].far = distance ? score : -score;
    }
    free(read);
    for (long i = 1; i < count; i++) { /* few, and nearly in order */
        Found one = pool[i];
        long at = i;
        for (; at && nearer(one, pool[at - 1]); at--) pool[at] = pool[at - 1];
        pool[at] = one;
    }
}

/* For each query the k best that are alive, best first, with scores; -1 behind the last. `ranked` of a pool of `size`
   are ranked again by full vectors. */
void nearest_search(const Index *index, const float *queries, long count, long k, long size, long ranked, int64_t *ids,
                    float *scores, int threads) {
    const Graph *graph = &index->graph;
    const Full *full = &index->full;
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1)
    {
        Walk state = begin_walk(graph, 0);
        Found *pool = malloc((size + 1) * sizeof(Found));
        int8_t *codes = malloc(graph->records.size);
#pragma omp for schedule(dynamic, 4)
        for (long q = 0; q < count; q++) {
            const float *given = queries + q * full->size;
            Query query = as_query(index, given, codes);
            long found = walk(graph, &query, pool, size, &state), living = 0;
            for (long i = 0; i < found; i++)
                if (!index->alive || index->alive[pool[i].id]) pool[living++] = pool[i];
            living = living < ranked ? living : ranked;
            rank_again(full, given, index->distance, pool, living);
            answer(pool, living, k, ids + q * k, scores + q * k);
        }
        end_walk(&state), free(pool), free(codes);
    }
}
