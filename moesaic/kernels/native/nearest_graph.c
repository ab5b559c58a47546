/* Making a navigating spreading-out graph: of each vector's candidates those edges that the monotonic relative
   neighbourhood rule leaves (an edge is occluded by a nearer neighbour that is nearer to its end), both ways, few per
   vector, and every vector reachable. Each pass reads one graph and writes another: threads make no difference. */
#include "nearest.h"

/* Candidates come nearest first; the last place stays free, for an edge that makes the graph connected. */
long choose(const Records *records, const Found *candidates, long count, uint32_t *links, long degree) {
    long kept = 0;
    for (long c = 0; c < count && kept < degree - 1; c++) {
        int occluded = 0;
        for (long i = 0; i < kept && !occluded; i++)
            occluded = apart(records, candidates[c].id, links[i]) < candidates[c].far;
        if (!occluded) links[kept++] = candidates[c].id;
    }
    for (long i = kept; i < degree; i++) links[i] = NOBODY;
    return kept;
}

void nearest_select(const uint8_t *at, long stride, long size, long count, const Found *lists, long length,
                    uint32_t *links, long degree, int threads) {
    Records records = {at, stride, size, 8};
#pragma omp parallel for schedule(dynamic, 64) num_threads(threads)
    for (long n = 0; n < count; n++) {
        long known = 0;
        for (; known < length && lists[n * length + known].id != NOBODY; known++)
            fetch_record(&records, lists[n * length + known].id);
        choose(&records, lists + n * length, known, links + n * degree, degree);
    }
}

/* Edges both ways, as far as the rule leaves them. */
void nearest_both_ways(const uint8_t *at, long stride, long size, long count, const uint32_t *from, uint32_t *links,
                       long degree, int threads) {
    Records records = {at, stride, size, 8};
    int64_t *starts = calloc(count + 2, 8);
    for (long i = 0; i < count * degree; i++)
        if (from[i] != NOBODY) starts[from[i] + 2]++;
    for (long n = 0; n < count; n++) starts[n + 2] += starts[n + 1];
    uint32_t *back = malloc(4 * starts[count + 1] + 4);
    for (long n = 0; n < count; n++)
        for (long i = 0; i < degree && from[n * degree + i] != NOBODY; i++)
            back[starts[from[n * degree + i] + 1]++] = (uint32_t)n;
#pragma omp parallel num_threads(threads)
    {
        long room = 1024;
        Found *candidates = malloc(room * sizeof(Found));
#pragma omp for schedule(dynamic, 64)
        for (long n = 0; n < count; n++) {
            long known = 0, behind = starts[n + 1] - starts[n];
            if (behind + degree > room) {
                room = 2 * (behind + degree);
                candidates = realloc(candidates, room * sizeof(Found));
            }
            for (long i = 0; i < degree && from[n * degree + i] != NOBODY; i++) candidates[known++].id = from[n * degree + i];
            for (long i = 0; i < behind; i++) candidates[known++].id = back[starts[n] + i];
            for (long i = 0; i < known; i++) fetch_record(&records, candidates[i].id);
            for (long i = 0; i < known; i++) candidates[i].far = apart(&records, (uint32_t)n, candidates[i].id);
            sort_found(candidates, known);
            long single = 0;
            for (long i = 0; i < known; i++)
                if (!single || candidates[i].id != candidates[single - 1].id) candidates[single++] = candidates[i];
            choose(&records, candidates, single, links + n * degree, degree);
        }
        free(candidates);
    }
    free(starts), free(back);
}

/* Links chosen from each vector's list and from what a walk to it meets: those give it long edges, on which others come
   to it. */
void nearest_by_walking(const uint8_t *at, long stride, long size, long count, const uint32_t *from, long degree,
                        const uint32_t *entries, long entry_count, const Found *lists, long length, long pool_size,
                        long most, uint32_t *links, long first, long last, int threads) {
    Graph graph = {{at, stride, size, 8}, from, degree, count, entries, entry_count};
#pragma omp parallel num_threads(threads)
    {
        long room = 64 * pool_size + entry_count;
        Walk state = begin_walk(&graph, room + length);
        state.met_room = room;
        Found *pool = malloc((pool_size + 1) * sizeof(Found));
#pragma omp for schedule(dynamic, 64)
        for (long n = first; n < last; n++) {
            Query query = {(const int8_t *)record(&graph.records, n), unit_of(&graph.records, n),
                           length_of(&graph.records, n), 1.0f, 0};
            walk(&graph, &query, pool, pool_size, &state);
            long known = state.met_count, single = 0;
            for (long i = 0; i < known; i++) state.met[i].far = no_less_than_zero(state.met[i].far);
            for (long i = 0; i < length && lists[n * length + i].id != NOBODY; i++) state.met[known++] = lists[n * length + i];
            sort_found(state.met, known);
            for (long i = 0; i < known && single < most; i++) {
                if (state.met[i].id == (uint32_t)n || (single && state.met[i].id == state.met[single - 1].id)) continue;
                state.met[single++] = state.met[i];
            }
            choose(&graph.records, state.met, single, links + n * degree, degree);
        }
        end_walk(&state), free(pool);
    }
}

/* Marks what is reachable from `start` and was not marked. */
static void spread(const uint32_t *links, long degree, uint32_t start, uint8_t *reached, uint32_t *stack) {
    long depth = 0;
    reached[start] = 1, stack[depth++] = start;
    while (depth) {
        uint32_t at = stack[--depth];
        for (long i = 0; i < degree; i++) {
            uint32_t next = links[at * degree + i];
            if (next == NOBODY) break;
            if (!reached[next]) reached[next] = 1, stack[depth++] = next;
        }
    }
}

static int attach(uint32_t *links, long degree, uint32_t to, uint32_t id) {
    for (long i = 0; i < degree; i++)
        if (links[to * degree + i] == NOBODY) {
            links[to * degree + i] = id;
            return 1;
        }
    return 0;
}

/* Adds edges until everything is reachable from the navigating node, entries[0]; how many, their ends in `added`
   (2 x count). Every vector comes with room for one link, so that the reached always have room: one that is attached
   takes a place and brings one. */
long nearest_connect(const uint8_t *at, long stride, long size, long count, uint32_t *links, long degree,
                     const uint32_t *entries, long pool_size, uint32_t *added) {
    Graph graph = {{at, stride, size, 8}, links, degree, count, entries, 1};
    uint8_t *reached = calloc(count, 1);
    uint32_t *stack = malloc(4 * count);
    Found *pool = malloc((pool_size + 1) * sizeof(Found));
    Walk state = begin_walk(&graph, 0);
    long edges = 0;
    spread(links, degree, entries[0], reached, stack);
    for (long n = 0; n < count; n++) {
        if (reached[n]) continue;
        Query query = {(const int8_t *)record(&graph.records, n), unit_of(&graph.records, n),
                       length_of(&graph.records, n), 1.0f, 0};
        long found = walk(&graph, &query, pool, pool_size, &state), done = 0;
        uint32_t to = NOBODY;
        for (long i = 0; i < found && !done; i++) done = attach(links, degree, to = pool[i].id, (uint32_t)n);
        for (long i = 0; i < count && !done; i++)
            if (reached[i]) done = attach(links, degree, to = (uint32_t)i, (uint32_t)n);
        added[2 * edges] = to, added[2 * edges + 1] = (uint32_t)n, edges++;
        spread(links, degree, (uint32_t)n, reached, stack);
    }
    free(reached), free(stack), free(pool), end_walk(&state);
    return edges;
}

/* Walks to every `step`th vector, and makes those that are not found entries: an island that no edge leads to has one
   then. How many entries there are, at most `room`. One after the other, because each helps the next. */
long nearest_find_lost(const uint8_t *at, long stride, long size, long count, const uint32_t *links, long degree,
                       uint32_t *entries, long entry_count, long room, long step, long pool_size) {
    Graph graph = {{at, stride, size, 8}, links, degree, count, entries, room};
    Walk state = begin_walk(&graph, 0);
    Found *pool = malloc((pool_size + 1) * sizeof(Found));
    graph.entry_count = entry_count;
    for (long n = 0; n < count && graph.entry_count < room; n += step) {
        Query query = {(const int8_t *)record(&graph.records, n), unit_of(&graph.records, n),
                       length_of(&graph.records, n), 1.0f, 0};
        long found = walk(&graph, &query, pool, pool_size, &state), lost = 1;
        /* A copy of it is as good. */
        for (long i = 0; i < found && lost; i++) lost = pool[i].id != (uint32_t)n && pool[i].far > 0.0f;
        if (lost) entries[graph.entry_count++] = (uint32_t)n;
    }
    free(pool), end_walk(&state);
    return graph.entry_count;
}
