#include "product.h"

/* Work below this many products is not worth waking the other threads. */
#define ALONE 262144

void linear(const float *x, const float *w, const float *bias, float *y, long rows, long inputs, long outputs,
            long x_stride, int threads) {
    const float **xs = malloc(rows * sizeof *xs);
    for (long t = 0; t < rows; t++) xs[t] = x + t * x_stride;
    long blocks = (outputs + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads) if (rows * inputs * outputs > ALONE)
    {
        float **ys = malloc(rows * sizeof *ys);
#pragma omp for schedule(dynamic, 4)
        for (long b = 0; b < blocks; b++) {
            long at = b * BLOCK, count = outputs - at < BLOCK ? outputs - at : BLOCK;
            for (long t = 0; t < rows; t++) ys[t] = y + t * outputs + at;
            product(w, inputs, outputs - 1, at, count, xs, ys, rows);
            if (bias)
                for (long t = 0; t < rows; t++)
                    for (long o = 0; o < count; o++) ys[t][o] += bias[at + o];
        }
        free(ys);
    }
    free(xs);
}
