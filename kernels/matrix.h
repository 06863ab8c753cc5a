/* What a form of weights offers to whoever multiplies by it: see dense.c for the plain one.
 *
 * A product out = x W^T + b is made in items, any of which any thread may make at any time. The
 * result of a row comes of that row alone: neither the number of rows nor of items changes a bit.
 */
#ifndef KVFERRY_MATRIX_H
#define KVFERRY_MATRIX_H

#include <stdint.h>

typedef struct matrix matrix;

typedef struct {
    const float *x; /* [rows, in], rows x_stride floats apart */
    int64_t x_stride, rows;
    float *out; /* [rows, out], rows out_stride floats apart */
    int64_t out_stride;
    void *scratch; /* of scratch_bytes: what `prepare` makes of x, for all items */
    int64_t gated; /* out = silu(first half) * second half, and half as wide */
    int64_t members; /* how many make items at once */
} product;

struct matrix {
    int64_t in, out;
    const void *values; /* the form's own */
    const float *bias;  /* [out], or NULL */
    int64_t paired;     /* whether a product with it can be gated */
    int64_t (*num_items)(const matrix *, int64_t rows);
    void (*multiply)(const matrix *, const product *, int64_t item);
    void (*row)(const matrix *, int64_t number, float *out); /* of W itself: [in] */
    /* Both NULL for forms that take x as it is; else `prepare` is called for every row first. */
    int64_t (*scratch_bytes)(const matrix *, int64_t rows);
    void (*prepare)(const matrix *, const product *, int64_t row);
};

#endif
