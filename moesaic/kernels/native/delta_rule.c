/* The gated delta rule (kernels/delta_rule.py), token by token: a token has the same bits alone and in any batch, and
   however its sequence was split into steps, because a state is the same numbers wherever a step ends. */
#include "vector.h"

#define ALONE 16384 /* numbers; fewer are not worth waking the other threads */
#define SIDE 4      /* vectors of a state's columns that are gone through side by side */

/* A row of a convolution's input: new, from before, or of nothing. */
static const float *input_row(const float *x, long stride, const float *before, const int64_t *span, long place,
                              long kept, long X) {
    if (place >= 0) return x + (span[0] + place) * stride;
    return span[2] ? before + (kept + place) * X : NULL;
}

/* What the taps make of a token and those before it, through a SiLU. `taps` are (width, X), the oldest first. */
static void mix_row(const float *x, long stride, const float *before, const int64_t *span, long place,
                    const float *taps, float *y, long width, long X) {
    const float *rows[width];
    for (long j = 0; j < width; j++)
        rows[j] = input_row(x, stride, before, span, place - (width - 1) + j, width - 1, X);
    long i = 0;
    for (; i + W <= X; i += W) {
        vec sum = splat(0.0f);
        for (long j = width - 1; j >= 0; j--)
            if (rows[j]) sum = fused(sum, load(rows[j] + i), load(taps + j * X + i));
        store(y + i, silu_gate(sum, splat(1.0f)));
    }
    for (; i < X; i++) {
        float sum = 0.0f;
        for (long j = width - 1; j >= 0; j--)
            if (rows[j]) sum = __builtin_fmaf(rows[j][i], taps[j * X + i], sum);
        y[i] = silu_gate(splat(sum), splat(1.0f))[0];
    }
}

/* A query or key of length `scale`. */
static void unit(float *x, long size, float scale) {
    vec sum = splat(0.0f);
    float rest = 0.0f;
    long i = 0;
    for (; i + W <= size; i += W) sum = fused(sum, load(x + i), load(x + i));
    for (; i < size; i++) rest = __builtin_fmaf(x[i], x[i], rest);
    float factor = scale / sqrtf(lane_sum(sum) + rest + 1e-6f);
    for (i = 0; i < size; i++) x[i] *= factor;
}

/* Some columns of a head's state through all tokens of a sequence. Sums over keys are in two halves. */
#define COLUMNS(name, count)                                                                                           \
    static void name(float *state, const float *q, const float *k, const float *v, const float *gates, float *out,     \
                     long tokens, long C, long V, long X, long gate_stride, long out_stride) {                         \
        for (long t = 0; t < tokens; t++, q += X, k += X, v += X, gates += gate_stride, out += out_stride) {           \
            vec known[2][count], read[2][count], wrong[count];                                                         \
            UNROLL for (int i = 0; i < 2; i++) UNROLL for (int j = 0; j < count; j++)                                  \
                known[i][j] = read[i][j] = splat(0.0f);                                                                \
            for (long c = 0; c < C; c += 2) UNROLL for (int i = 0; i < 2; i++) {                                       \
                    if (c + i == C) break;                                                                             \
                    vec key = splat(k[c + i]);                                                                         \
                    UNROLL for (int j = 0; j < count; j++)                                                             \
                        known[i][j] = fused(known[i][j], key, load(state + (c + i) * V + j * W));                      \
                }                                                                                                      \
            vec decay = splat(gates[0]), strength = splat(gates[1]);                                                   \
            UNROLL for (int j = 0; j < count; j++)                                                                     \
                wrong[j] = (load(v + j * W) - (known[0][j] + known[1][j]) * decay) * strength;                         \
            for (long c = 0; c < C; c += 2) UNROLL for (int i = 0; i < 2; i++) {                                       \
                    if (c + i == C) break;                                                                             \
                    vec key = splat(k[c + i]), query = splat(q[c + i]);                                                \
                    UNROLL for (int j = 0; j < count; j++) {                                                           \
                        float *at = state + (c + i) * V + j * W;                                                       \
                        vec now = fused(key * wrong[j], load(at), decay);                                              \
                        store(at, now);                                                                                \
                        read[i][j] = fused(read[i][j], query, now);                                                    \
                    }                                                                                                  \
                }                                                                                                      \
            UNROLL for (int j = 0; j < count; j++) store(out + j * W, read[0][j] + read[1][j]);                        \
        }                                                                                                              \
    }
COLUMNS(many_columns, SIDE)
COLUMNS(few_columns, 1)

static void one_column(float *state, const float *q, const float *k, const float *v, const float *gates, float *out,
                       long tokens, long C, long V, long X, long gate_stride, long out_stride) {
    for (long t = 0; t < tokens; t++, q += X, k += X, v += X, gates += gate_stride, out += out_stride) {
        float known = 0.0f, read = 0.0f;
        for (long c = 0; c < C; c++) known = __builtin_fmaf(k[c], state[c * V], known);
        float wrong = (*v - known * gates[0]) * gates[1];
        for (long c = 0; c < C; c++) {
            state[c * V] = __builtin_fmaf(state[c * V], gates[0], k[c] * wrong);
            read = __builtin_fmaf(q[c], state[c * V], read);
        }
        *out = read;
    }
}

/* `x` (T, X): queries and keys of N heads of size C and values of H heads of size V before the convolution, `stride`
   apart; `spans` as attention has them. Of sequence s the state (H, C, V) and the inputs of the last tokens (width - 1,
   X) are those at `places[s]`; where nothing is kept there is a scratch for each. `mixed` (T, X) and `gates` (T, H, 2)
   are room. */
void delta_rule(const float *x, const float *strength, const float *decay, const float *taps, const float *log_rate,
                const float *shift, float *states, float *befores, const int64_t *places, const int64_t *spans,
                float *mixed, float *gates, float *out, long sequences, long N, long H, long C, long V, long width,
                long stride, long gate_stride, int threads) {
    long X = 2 * N * C + H * V, size = H * C * V, kept = width - 1, tokens = 0;
    for (long s = 0; s < sequences; s++) tokens += spans[4 * s + 1] - spans[4 * s];
#pragma omp parallel num_threads(threads) if (tokens * X > ALONE)
    for (long s = 0; s < sequences; s++) {
        const int64_t *span = spans + 4 * s;
#pragma omp for schedule(static) nowait
        for (long t = span[0]; t < span[1]; t++) {
            float *row = mixed + t * X;
            mix_row(x, stride, befores + places[s] * kept * X, span, t - span[0], taps, row, width, X);
            for (long n = 0; n < 2 * N; n++) unit(row + n * C, C, n < N ? 1.0f / sqrtf((float)C) : 1.0f);
            for (long h = 0; h < H; h++) {
                float raw = decay[t * gate_stride + h] + shift[h];
                float soft = raw > 20.0f ? raw : log1pf(expf(raw)), *gate = gates + (t * H + h) * 2;
                gate[0] = expf(-expf(log_rate[h]) * soft);
                gate[1] = 1.0f / (1.0f + expf(-strength[t * gate_stride + h]));
            }
        }
    }
    for (long s = 0; s < sequences; s++) {
        const int64_t *span = spans + 4 * s;
        float *before = befores + places[s] * kept * X;
        for (long j = 0; j < kept; j++) { /* row j moves forward only, so none is read after it was written */
            const float *row = input_row(x, stride, before, span, span[1] - span[0] - kept + j, kept, X);
            if (row) memmove(before + j * X, row, X * sizeof *row);
            else memset(before + j * X, 0, X * sizeof *before);
        }
    }
    long blocks = (V + SIDE * W - 1) / (SIDE * W);
#pragma omp parallel for collapse(3) num_threads(threads) if (tokens * size > ALONE)
    for (long s = 0; s < sequences; s++)
        for (long h = 0; h < H; h++)
            for (long b = 0; b < blocks; b++) {
                const int64_t *span = spans + 4 * s;
                float *state = states + places[s] * size + h * C * V;
                long first = b * SIDE * W, last = first + SIDE * W < V ? first + SIDE * W : V, v = first;
                if (!span[2])
                    for (long c = 0; c < C; c++) memset(state + c * V + first, 0, (last - first) * sizeof *state);
                const float *row = mixed + span[0] * X, *gate = gates + (span[0] * H + h) * 2;
                const float *q = row + h / (H / N) * C, *k = q + N * C, *values = row + 2 * N * C + h * V;
                float *to = out + (span[0] * H + h) * V;
                long count = span[1] - span[0];
#define ON(columns) columns(state + v, q, k, values + v, gate, to + v, count, C, V, X, 2 * H, H * V)
                if (v + SIDE * W <= last) ON(many_columns), v += SIDE * W;
                for (; v + W <= last; v += W) ON(few_columns);
                for (; v < last; v++) ON(one_column);
#undef ON
            }
}
