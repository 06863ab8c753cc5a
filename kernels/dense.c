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

INLINE const float *panel_at(const matrix *at, const int narrow, int64_t panel) {
    return (const float *)at->values + panel * (narrow ? LANES : PANEL) * at->in;
}

/* sums[rows][PANEL] of one panel go to their places. */
static void put_rows(const matrix *at, const product *p, int64_t row, int64_t rows, int64_t panel,
                     const float *sums) {
    int64_t width = at->paired ? at->out / 2 - panel * LANES : at->out - panel * PANEL;
    vec bias_low = {}, bias_high = {};
    if (at->bias) {
        bias_low = load(at->bias + panel * PANEL);
        bias_high = load(at->bias + panel * PANEL + LANES);
    }
    float *out = p->out + row * p->out_stride + panel * (at->paired ? LANES : PANEL);
    for (int64_t r = 0; r < rows; r++, out += p->out_stride, sums += PANEL) {
        vec a = load(sums) + bias_low, b = load(sums + LANES) + bias_high;
        if (p->gated) {
            store_some(out, silu(a) * b, width);
        } else if (at->paired) {
            store_some(out, a, width);
            store_some(out + at->out / 2, b, width);
        } else {
            store_some(out, a, width);
            if (width > LANES) store_some(out + LANES, b, width - LANES);
        }
    }
}

/* `rows` rows of x times one panel; `next` is the panel that comes after it. */
INLINE void multiply_tile(const int rows, const int narrow, const matrix *at, const product *p,
                          int64_t row, int64_t panel, const float *next) {
    const int step = narrow ? LANES : PANEL;
    vec low[ROWS], high[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) low[r] = high[r] = (vec){};
    const float *weights = panel_at(at, narrow, panel), *x = p->x + row * p->x_stride;
    float *out = p->out + row * p->out_stride + panel * (at->paired ? LANES : PANEL);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) __builtin_prefetch(out + r * p->out_stride, 1);
    int64_t stretch = p->rows < FEW_ROWS ? STRETCH : at->in; /* others fetch what follows in memory */
    for (int64_t i = 0; i < at->in; i += stretch, weights += stretch * step) {
        int64_t left = at->in - i;
        int ends = stretch == STRETCH && left <= STRETCH;
        fetching ahead = {ends ? next : weights + STRETCH * step, step, step > LINE ? 2 : 1};
        tile(rows, narrow, x + i, p->x_stride, 1, weights, left < stretch ? left : stretch, ahead,
             low, high);
    }
    _Alignas(64) float sums[ROWS * PANEL];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        store(sums + r * PANEL, low[r]), store(sums + r * PANEL + LANES, high[r]);
    put_rows(at, p, row, rows, panel, sums);
}

INLINE void multiply_rows(const int narrow, const matrix *at, const product *p, int64_t row,
                          int64_t rows, int64_t panel, const float *next) {
#define CASE(n)                                                                                 \
    case n:                                                                                     \
        multiply_tile(n, narrow, at, p, row, panel, next);                                      \
        break;
    FOR_ROWS(rows, CASE)
#undef CASE
}

/* sums[rows][PANEL] += x times `count` inputs of a panel. */
INLINE void add_stretch(const int rows, const int narrow, const float *x, int64_t x_stride,
                        const float *weights, int64_t count, fetching ahead, float *sums) {
    vec low[ROWS], high[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        low[r] = load(sums + r * PANEL), high[r] = load(sums + r * PANEL + LANES);
    tile(rows, narrow, x, x_stride, 1, weights, count, ahead, low, high);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        store(sums + r * PANEL, low[r]), store(sums + r * PANEL + LANES, high[r]);
}

/* More rows than fit the registers, and few enough to wait for memory: they take turns at every
 * stretch of a panel, and share the fetching of the next one. Were each to go through all of the
 * panel, the first would wait for memory while the others leave it idle. */
INLINE void multiply_in_turns(const int narrow, const matrix *at, const product *p, int64_t panel,
                              const float *next) {
    const int step = narrow ? LANES : PANEL;
    int64_t rows = p->rows, at_once = rows_at_once(rows);
    int64_t lead = (step * at_once + rows - 1) / rows; /* of the fetching, an input */
    _Alignas(64) float sums[FEW_ROWS * PANEL];
    memset(sums, 0, rows * PANEL * sizeof(float));
    const float *weights = panel_at(at, narrow, panel);
    for (int64_t i = 0; i < at->in; i += STRETCH, weights += STRETCH * step) {
        int64_t left = at->in - i, count = left < STRETCH ? left : STRETCH;
        fetching ahead = {left > STRETCH ? weights + STRETCH * step : next, lead, 1};
        for (int64_t row = 0; row < rows; row += at_once, ahead.from += count * lead) {
            const float *x = p->x + row * p->x_stride + i;
#define CASE(n)                                                                                 \
    case n:                                                                                     \
        add_stretch(n, narrow, x, p->x_stride, weights, count, ahead, sums + row * PANEL);      \
        break;
            FOR_ROWS(row + at_once < rows ? at_once : rows - row, CASE)
#undef CASE
        }
    }
    put_rows(at, p, 0, rows, panel, sums);
}

static int64_t panels_per_item(int64_t panels, int64_t rows) {
    return rows >= FEW_ROWS || panels > 256 ? GROUP : 1;
}

static int64_t num_items(const matrix *at, int64_t rows) {
    int64_t panels = panels_of(at->out, at->paired), each = panels_per_item(panels, rows);
    int64_t runs = rows < FEW_ROWS ? 1 : (rows + ROWS_ITEM - 1) / ROWS_ITEM;
    return (panels + each - 1) / each * runs;
}

/* One after the other; what is fetched last is the first panel of the item that this member gets
 * next, if all are equally fast. */
INLINE void multiply_few(const int narrow, const matrix *at, const product *p, int64_t first,
                         int64_t last, int64_t panels) {
    int64_t later = first + p->members * (last - first);
    for (int64_t panel = first; panel < last; panel++) {
        int64_t then = panel + 1 < last ? panel + 1 : later < panels ? later : panel;
        const float *next = panel_at(at, narrow, then);
        if (p->rows <= ROWS)
            multiply_rows(narrow, at, p, 0, p->rows, panel, next);
        else
            multiply_in_turns(narrow, at, p, panel, next);
    }
}

INLINE void multiply_item(const int narrow, const matrix *at, const product *p, int64_t item) {
    int64_t panels = panels_of(at->out, at->paired), each = panels_per_item(panels, p->rows);
    int64_t runs = p->rows < FEW_ROWS ? 1 : (p->rows + ROWS_ITEM - 1) / ROWS_ITEM;
    int64_t first = item / runs * each, last = first + each < panels ? first + each : panels;
    if (p->rows < FEW_ROWS) {
        multiply_few(narrow, at, p, first, last, panels);
        return;
    }
    int64_t row = item % runs * ROWS_ITEM, end = row + ROWS_ITEM;
    if (end > p->rows) end = p->rows;
    int64_t at_once = rows_at_once(end - row);
    for (; row < end; row += at_once)
        for (int64_t panel = first; panel < last; panel++) {
            int64_t rows = row + at_once < end ? at_once : end - row;
            const float *next = panel_at(at, narrow, panel + 1 < last ? panel + 1 : first);
            multiply_rows(narrow, at, p, row, rows, panel, next);
        }
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
