/* The one inner loop of all products in fp32: a few rows times a panel of side-by-side columns.
 *
 * Each value is one chain of fused multiplications and additions, from the first input to the last,
 * so it does not depend on the rows made beside it. Measured on one core of an Intel Xeon with
 * AVX-512, 512 x 1,536 times 1,536 x 576: 4 rows 123, 6 rows 155, 8 rows 163, 12 rows 167 GFLOP/s,
 * 168 being what its multipliers can do; with AVX2 6 rows reach 81 of 84.
 */
#ifndef KVFERRY_TILE_H
#define KVFERRY_TILE_H

#include "lanes.h"

enum {
    PANEL = 2 * LANES,
#if defined(__AVX512F__)
    ROWS = 12, /* at a time: with two vectors each they fill the registers */
#elif defined(__AVX2__)
    ROWS = 6,
#else
    ROWS = 4,
#endif
    LINE = 16, /* floats that come from memory together */
    /* Inputs that are multiplied while the next so many are fetched. Without it a core waits for
     * weights and multiplies by turns: 8 rows took 29 ms where they take 16, 16 rows 46 and 31, one
     * row 15 and 12. A quarter as many gain half of that. */
    STRETCH = 64,
};

/* What to fetch meanwhile: at every input `lines` lines, `step` floats further on. */
typedef struct {
    const float *from;
    int64_t step;
    int lines;
} fetching;

/* low, high [rows] += the products of x with a panel of `in` times PANEL weights: floats, or if it is
 * `narrow` bf16, one of the first vector and one of the second in the halves of each word. Arrays of
 * a fixed size are what the compiler keeps in registers: with [rows] it wrote them all back in every
 * turn, at half the speed. */
INLINE void tile(const int rows, const int narrow, const float *x, const int64_t x_stride,
                 const int64_t x_step, const float *panel, int64_t in, fetching ahead,
                 vec low[ROWS], vec high[ROWS]) {
    const int step = narrow ? LANES : PANEL;
    vec one[ROWS], two[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) one[r] = low[r], two[r] = high[r];
    for (int64_t i = 0; i < in; i++, panel += step) {
        if (ahead.lines > 0) __builtin_prefetch(ahead.from);
        if (ahead.lines > 1) __builtin_prefetch(ahead.from + LINE);
        ahead.from += ahead.step;
        vec a = load(panel), b;
        if (narrow) {
            ivec words = (ivec)a;
            a = (vec)(words << 16);
            b = (vec)(words & ~0xffff);
        } else {
            b = load(panel + LANES);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vec value = all(x[r * x_stride + i * x_step]);
            one[r] = fused(value, a, one[r]);
            two[r] = fused(value, b, two[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) low[r] = one[r], high[r] = two[r];
}

/* Calls CASE(n) for the n that `rows` is, 1 to ROWS. */
#if defined(__AVX512F__)
#define FOR_ROWS(rows, CASE)                                                                    \
    switch (rows) {                                                                             \
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10)        \
        CASE(11) CASE(12)                                                                       \
    }
#elif defined(__AVX2__)
#define FOR_ROWS(rows, CASE)                                                                    \
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#else
#define FOR_ROWS(rows, CASE)                                                                    \
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) }
#endif

/* Rows at a time, so that all times are about alike: 16 rows are two times 8. */
INLINE int64_t rows_at_once(int64_t rows) {
    int64_t times = (rows + ROWS - 1) / ROWS;
    return times ? (rows + times - 1) / times : 1;
}

#endif
