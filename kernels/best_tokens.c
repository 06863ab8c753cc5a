/* The largest of each row of logits in one pass: see best_tokens.py. */
#include "lanes.h"

enum { WIDE = 4 * LANES };

/* Rows lie `stride` floats apart. The sums tell whether all of a row is finite. */
void best_tokens(const float *logits, int64_t rows, int64_t width, int64_t stride, int64_t *best,
                 float *largest, float *sums) {
    for (int64_t row = 0; row < rows; row++, logits += stride) {
        vec most[4], sum[4];
        for (int v = 0; v < 4; v++) most[v] = all(-INFINITY), sum[v] = (vec){};
        int64_t i = 0;
        for (; i + WIDE <= width; i += WIDE)
            for (int v = 0; v < 4; v++) {
                vec some = load(logits + i + v * LANES);
                most[v] = larger(some, most[v]);
                sum[v] += some;
            }
        float top = largest_of(larger(larger(most[0], most[1]), larger(most[2], most[3])));
        float total = sum_of((sum[0] + sum[1]) + (sum[2] + sum[3]));
        for (; i < width; i++) {
            top = logits[i] > top ? logits[i] : top;
            total += logits[i];
        }
        int64_t at = 0; /* where there is a NaN, anywhere */
        while (at + 1 < width && !(logits[at] == top)) at++;
        best[row] = at;
        largest[row] = top;
        sums[row] = total;
    }
}
