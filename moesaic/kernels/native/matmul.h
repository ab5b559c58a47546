/* Products of rows with a matrix stored output by output: y[t][o] = sum over i of x[t][i] * w[o][i]. */
#pragma once

#include "vector.h"

#define BLOCK 16 /* outputs that one call takes at most */
#define GROUP 96 /* rows that are taken at a time, so that they stay in a core's own cache */

/* Outputs at..at+outputs (at most BLOCK) of the matrix for any number of rows; y[t] is where the first of them goes.
   Rows of weights past `last` do not exist. */
void matmul(const float *w, long inputs, long last, long at, long outputs, const float *const *x, float *const *y,
             long rows);
