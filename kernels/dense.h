/* Matrices of plain weights, in fp32 or rounded to bf16 (`narrow`), laid out in panels. */
#ifndef KVFERRY_DENSE_H
#define KVFERRY_DENSE_H

#include "matrix.h"

/* Floats that the panels of such a matrix take. */
int64_t dense_floats(int64_t in, int64_t out, int64_t narrow);

/* Lay out `out` rows of `in` floats each. */
void dense_lay_out(const float *rows, int64_t in, int64_t out, int64_t paired, int64_t narrow,
                   float *panels);

/* Make `at` the matrix that the panels hold; a bias is [out] floats, laid out as wide ones. */
void dense_matrix(matrix *at, const float *panels, int64_t in, int64_t out, int64_t paired,
                  int64_t narrow, const float *bias);

#endif
