#include "matmul.h"
#include "stages.h"

/* Work below this many products is not worth waking the other threads. */
#define ALONE 262144

void linear_stage(Member *m, const float *x, const float *w, const float *bias, const float *plus, float *y, long rows,
                  long inputs, long outputs, long x_stride) {
    long blocks = (outputs + BLOCK - 1) / BLOCK, from, to;
    while (take(m, blocks, &from, &to))
        for (long item = 0; item < (to - from) * ((rows + GROUP - 1) / GROUP); item++) {
            /* All of these outputs for some rows, then for the next: rows are read again and again, and stay at hand. */
            long at = (from + item % (to - from)) * BLOCK, first = item / (to - from) * GROUP;
            long count = outputs - at < BLOCK ? outputs - at : BLOCK, here = rows - first < GROUP ? rows - first : GROUP;
            const float *xs[GROUP];
            float *ys[GROUP];
            for (long t = 0; t < here; t++) xs[t] = x + (first + t) * x_stride, ys[t] = y + (first + t) * outputs + at;
            matmul(w, inputs, outputs - 1, at, count, xs, ys, here);
            for (long t = 0; bias && t < here; t++)
                for (long o = 0; o < count; o++) ys[t][o] += bias[at + o];
            for (long t = 0; plus && t < here; t++)
                for (long o = 0; o < count; o++) ys[t][o] += plus[(first + t) * outputs + at + o];
        }
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
