/* Matrices of plain fp32 weights, laid out in panels. */
#ifndef KVFERRY_DENSE_H
#define KVFERRY_DENSE_H

#include "matrix.h"

/* Floats that the panels of such a matrix take. */
int64_t dense_floats(int64_t in, int64_t out);

/* Lay out `out` rows of `in` floats each. */
void dense_lay_out(const float *rows, int64_t in, int64_t out, int64_t paired, float *panels);

/* Make `at` the matrix that the panels hold; a bias is [out] floats, laid out likewise. */
void dense_matrix(matrix *at, const float *panels, int64_t in, int64_t out, int64_t paired,
                  const float *bias);

#endif
