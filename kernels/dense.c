/* Products with plain weights that were laid out once, in panels.
 *
 * A panel holds PANEL outputs, their weights side by side for one input after the other; the last
 * one is filled up with zeros. Narrow ones hold bf16, and become floats on the way into a register:
 * half of the bytes, and sums of the same kind. Of a paired matrix, a panel's first vector holds rows of the first
 * half and its second the rows of the other half that belong to them.
 */
#include "dense.h"

#include <stddef.h>

#include "tile.h"

enum {
    GROUP = 4,       /* panels that the same rows are multiplied by, one after the other */
    FEW_ROWS = 48,   /* from here on an item is a group of panels and a run of rows */
    ROWS_ITEM = 128, /* rows in such a run */
};

static int64_t num_panels(int64_t out) { return (out + PANEL - 1) / PANEL; }

/* Panels of a paired matrix hold LANES outputs of either half each. */
static int64_t panels_of(int64_t out, int64_t paired) {
    return paired ? (out / 2 + LANES - 1) / LANES : num_panels(out);
}

int64_t dense_floats(int64_t in, int64_t out, int64_t narrow) {
    int64_t step = narrow ? LANES : PANEL;
    return (num_panels(out) + 1) * step * in; /* one more: halves are filled up each by itself */
}

/* To the nearest, of two to the even one; NaN stays NaN. */
static uint32_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* Which output stands in a column of a panel; `out` and more where there is none. */
static int64_t output_at(int64_t panel, int64_t column, int64_t out, int64_t paired) {
    if (!paired) return panel * PANEL + column;
    int64_t in_half = panel * LANES + column % LANES;
    return in_half < out / 2 ? in_half + column / LANES * (out / 2) : out;
}

void dense_lay_out(const float *rows, int64_t in, int64_t out, int64_t paired, int64_t narrow,
                   float *panels) {
    for (int64_t panel = 0; panel < panels_of(out, paired); panel++) {
        const float *from[PANEL];
        for (int64_t column = 0; column < PANEL; column++) {
            int64_t output = output_at(panel, column, out, paired);
            from[column] = output < out ? rows + output * in : NULL;
        }
        float *to = panels + panel * (narrow ? LANES : PANEL) * in;
        for (int64_t i = 0; i < in; i++) {
            float wide[PANEL];
            for (int64_t column = 0; column < PANEL; column++)
                wide[column] = from[column] ? from[column][i] : 0.0f;
            if (!narrow) {
                memcpy(to, wide, sizeof wide);
                to += PANEL;
                continue;
            }
            for (int64_t lane = 0; lane < LANES; lane++, to++) {
                uint32_t word = to_bf16(wide[lane]) | to_bf16(wide[LANES + lane]) << 16;
                memcpy(to, &word, 4);
            }
        }
    }
}

/* `rows` rows of x times one panel, of which `width` outputs are real. */
INLINE void multiply_tile(const int rows, const int narrow, const matrix *at, const product *p,
                          int64_t row, int64_t panel, int64_t width) {
    vec low[ROWS], high[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) low[r] = high[r] = (vec){};
    const float *weights = (const float *)at->values + panel * (narrow ? LANES : PANEL) * at->in;
    tile(rows, narrow, p->x + row * p->x_stride, p->x_stride, 1, weights, at->in, low, high);
    vec bias_low = {}, bias_high = {};
    if (at->bias) {
        bias_low = load(at->bias + panel * PANEL);
        bias_high = load(at->bias + panel * PANEL + LANES);
    }
    float *out = p->out + row * p->out_stride + panel * (at->paired ? LANES : PANEL);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++, out += p->out_stride) {
        vec a = low[r] + bias_low, b = high[r] + bias_high;
        if (p->gated) {
            store_some(out, silu(a) * b, width);
        } else if (at->paired) {
            store_some(out, a, width);
            store_some(out + at->out / 2, b, width);
        } else if (width >= PANEL) {
            store(out, a);
            store(out + LANES, b);
        } else {
            store_some(out, a, width);
            if (width > LANES) store_some(out + LANES, b, width - LANES);
        }
    }
}

INLINE void multiply_rows(const int narrow, const matrix *at, const product *p, int64_t row,
                          int64_t rows, int64_t panel) {
    int64_t width = at->paired ? at->out / 2 - panel * LANES : at->out - panel * PANEL;
#define CASE(n)                                                                                 \
    case n:                                                                                     \
        multiply_tile(n, narrow, at, p, row, panel, width);                                             \
        break;
    FOR_ROWS(rows, CASE)
#undef CASE
}

static int64_t panels_per_item(int64_t panels, int64_t rows) {
    return rows >= FEW_ROWS || panels > 256 ? GROUP : 1;
}

static int64_t num_items(const matrix *at, int64_t rows) {
    int64_t panels = panels_of(at->out, at->paired), each = panels_per_item(panels, rows);
    int64_t runs = rows < FEW_ROWS ? 1 : (rows + ROWS_ITEM - 1) / ROWS_ITEM;
    return (panels + each - 1) / each * runs;
}

INLINE void multiply_item(const int narrow, const matrix *at, const product *p, int64_t item) {
    int64_t panels = panels_of(at->out, at->paired), each = panels_per_item(panels, p->rows);
    int64_t runs = p->rows < FEW_ROWS ? 1 : (p->rows + ROWS_ITEM - 1) / ROWS_ITEM;
    int64_t first = item / runs * each, last = first + each < panels ? first + each : panels;
    int64_t row = item % runs * ROWS_ITEM, end = runs == 1 ? p->rows : row + ROWS_ITEM;
    if (end > p->rows) end = p->rows;
    int64_t at_once = rows_at_once(end - row);
    for (; row < end; row += at_once)
        for (int64_t panel = first; panel < last; panel++)
            multiply_rows(narrow, at, p, row, row + at_once < end ? at_once : end - row, panel);
}

static void multiply(const matrix *at, const product *p, int64_t item) {
    multiply_item(0, at, p, item);
}

static void multiply_narrow(const matrix *at, const product *p, int64_t item) {
    multiply_item(1, at, p, item);
}

static void find_row(const matrix *at, int64_t number, int64_t *panel, int64_t *column) {
    *panel = number / PANEL, *column = number % PANEL;
    if (at->paired) {
        int64_t half = at->out / 2;
        *panel = number % half / LANES;
        *column = number % half % LANES + number / half * LANES;
    }
}

static void row_of(const matrix *at, int64_t number, float *out) {
    int64_t panel, column;
    find_row(at, number, &panel, &column);
    const float *from = (const float *)at->values + panel * PANEL * at->in + column;
    for (int64_t i = 0; i < at->in; i++) out[i] = from[i * PANEL];
}

static void narrow_row_of(const matrix *at, int64_t number, float *out) {
    int64_t panel, column;
    find_row(at, number, &panel, &column);
    const uint32_t *from = (const uint32_t *)at->values + panel * LANES * at->in + column % LANES;
    for (int64_t i = 0; i < at->in; i++) {
        uint32_t word = from[i * LANES], bits = column < LANES ? word << 16 : word & ~0xffffu;
        memcpy(out + i, &bits, 4);
    }
}

void dense_matrix(matrix *at, const float *panels, int64_t in, int64_t out, int64_t paired,
                  int64_t narrow, const float *bias) {
    *at = (matrix){.in = in, .out = out, .values = panels, .bias = bias, .paired = paired,
                   .num_items = num_items, .multiply = narrow ? multiply_narrow : multiply,
                   .row = narrow ? narrow_row_of : row_of};
}
