#include "matmul.h"
#include "stages.h"

/* Work below this many products is not worth waking the other threads. */
#define ALONE 262144

void linear_stage(Member *m, const float *x, const float *w, const float *bias, const float *plus, float *y, long rows,
                  long inputs, long outputs, long x_stride) {
    const float **xs = malloc(rows * sizeof *xs);
    float **ys = malloc(rows * sizeof *ys);
    for (long t = 0; t < rows; t++) xs[t] = x + t * x_stride;
    long blocks = (outputs + BLOCK - 1) / BLOCK, from, to;
    while (take(m, blocks, &from, &to))
        for (long b = from; b < to; b++) {
            long at = b * BLOCK, count = outputs - at < BLOCK ? outputs - at : BLOCK;
            for (long t = 0; t < rows; t++) ys[t] = y + t * outputs + at;
            matmul(w, inputs, outputs - 1, at, count, xs, ys, rows);
            for (long t = 0; bias && t < rows; t++)
                for (long o = 0; o < count; o++) ys[t][o] += bias[at + o];
            for (long t = 0; plus && t < rows; t++)
                for (long o = 0; o < count; o++) ys[t][o] += plus[t * outputs + at + o];
        }
    free(xs), free(ys);
}

void linear(const float *x, const float *w, const float *bias, float *y, long rows, long inputs, long outputs,
            long x_stride, int threads) {
    Team team = {0};
#pragma omp parallel num_threads(threads) if (rows * inputs * outputs > ALONE)
    {
        Member m = join(&team);
        linear_stage(&m, x, w, bias, NULL, y, rows, inputs, outputs, x_stride);
    }
}
