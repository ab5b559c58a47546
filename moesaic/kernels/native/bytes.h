/* Rows of 8 bits times matrices of 8 bits with one group a row, where the processor has AVX-512 VNNI: codes in panels of
   64 outputs, in which those of four inputs (a quad) lie side by side as four vectors. The numbers are those of
   quantized.c to the bit. */
#pragma once

#include "quantized.h"

/* Room that a matrix takes in this form; 0 where the processor has no such instructions. */
long bytes_room(const Matrix *m);

/* From the tiles of quantized.h. */
void pack_bytes(const Matrix *m, uint8_t *to);

/* As round_row. */
void round_bytes(const float *x, const Matrix *m, const Rounded *to, long row);

/* y = x w' + bias; the codes of m are such panels. */
void bytes_matmul(const Matrix *m, const Rounded *x, const float *bias, float *y, long rows);
