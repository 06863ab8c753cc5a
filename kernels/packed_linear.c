/* Rows times a packed matrix of 8 or 4 bits a weight: see packed_linear.py.
 *
 * A matrix lies in an even number of tiles of TILE outputs, a tile in groups of GROUP inputs, a
 * group in quads of four inputs: one vector holds the same quad of several outputs, and a lane is
 * an output.
 *
 *   8 bits    codes[tile][group][quad][output][4], a weight w as w + 128
 *   4 bits    codes[tile][group][quad of the lower half][output][4], the quad of the upper half in
 *             the high nibbles
 *   scales    [tile][group][output], and mins alike: a weight is scale * code + min; in matrices of
 *             8 bits a group may have two parts with a scale and a min each
 *
 * Rows are quantised by group to 8 bits. Products of a group are added up as integers, exactly; the
 * groups are added up in order, in fp32, by fused multiply-adds. So the bits of a result depend
 * neither on the other rows nor on the number of threads nor on the instructions used.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "matrix.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { TILE = 16, GROUP = 32, QUADS = GROUP / 4, RUN = 120 };
enum { PLAIN, AVX2, VNNI512 }; /* instructions */

#define INLINE static inline __attribute__((always_inline))
#define SHIFT 12582912.0f /* 1.5 * 2^23: adding it rounds to a whole number */

typedef struct {
    const uint8_t *codes;
    const void *scales, *mins; /* of half precision or single; mins may be NULL if bits is 8 */
    int64_t num_outputs, num_groups;
    int64_t width, skip; /* of a row; the row begins `skip` inputs into the first group */
    int32_t bits, parts, half, instructions;
} packed;

typedef struct {
    int8_t *codes;  /* [num_rows, num_groups, GROUP] */
    float *scales;  /* [num_rows, num_groups * parts], as the next two */
    float *sums;    /* of the quantised row's values */
    int32_t *lifts; /* -128 times the sum of the codes: undoes the 128 in a weight's code */
    int64_t num_parts; /* of a row */
} rows;

typedef struct {
    float *out; /* [num_rows, stride] */
    int64_t stride;
    const float *bias;
    int64_t gated; /* silu of an output of the first half times its like of the second */
} target;

static float from_half(uint16_t half) {
#ifdef __FLT16_MANT_DIG__
    _Float16 value;
    memcpy(&value, &half, 2);
    return (float)value;
#else
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, bits;
    if (rest >= 0x7c00)
        bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400)
        bits = sign | ((rest << 13) + (112u << 23));
    else {
        float small = (float)rest * 0x1p-24f;
        memcpy(&bits, &small, 4);
        bits |= sign;
    }
    float value;
    memcpy(&value, &bits, 4);
    return value;
#endif
}

static float factor(const void *factors, int32_t half, int64_t at) {
    return half ? from_half(((const uint16_t *)factors)[at]) : ((const float *)factors)[at];
}

static int code_at(const packed *w, int64_t tile, int64_t group, int output, int input) {
    int64_t at = tile * w->num_groups + group;
    int quad = input / 4;
    if (w->bits == 8)
        return w->codes[((at * QUADS + quad) * TILE + output) * 4 + input % 4] - 128;
    uint8_t pair =
        w->codes[((at * QUADS / 2 + quad % (QUADS / 2)) * TILE + output) * 4 + input % 4];
    return quad < QUADS / 2 ? pair & 15 : pair >> 4;
}

/* One row by groups: 127 steps either side of zero. A value that is no number, or infinite, makes
 * its group's scale NaN, and so the whole row's results. Done alike whatever the instructions. */
INLINE void quantise_row(const packed *w, const float *x, int8_t *codes, float *scales,
                         float *sums, int32_t *lifts) {
    for (int64_t g = 0; g < w->num_groups; g++) {
        float values[GROUP];
        int64_t from = g * GROUP - w->skip, lo = from < 0 ? -from : 0;
        int64_t hi = w->width - from < GROUP ? w->width - from : GROUP;
        if (lo == 0 && hi == GROUP)
            memcpy(values, x + from, sizeof values);
        else
            for (int i = 0; i < GROUP; i++) values[i] = i >= lo && i < hi ? x[from + i] : 0;
        int32_t bits[GROUP], most = 0;
        uint32_t sum[2] = {0, 0}; /* of what is no number it may wrap */
        memcpy(bits, values, sizeof bits);
        for (int i = 0; i < GROUP; i++) {
            int32_t size = bits[i] & 0x7fffffff; /* as integers, sizes of floats are in order */
            most = size > most ? size : most;
        }
        float largest;
        memcpy(&largest, &most, 4);
        float inverse = largest > 1e-30f ? 127.0f / largest : 0;
        for (int i = 0; i < GROUP; i++) values[i] = values[i] * inverse + SHIFT;
        memcpy(bits, values, sizeof bits);
        for (int i = 0; i < GROUP; i++) {
            uint32_t code = (uint32_t)bits[i] - 0x4b400000;
            codes[g * GROUP + i] = (int8_t)code;
            sum[i / (GROUP / 2)] += code;
        }
        if (w->parts == 1) sum[0] += sum[1];
        float scale = most >= 0x7f800000 ? NAN : inverse ? largest / 127.0f : 0;
        for (int64_t part = 0, at = g * w->parts; part < w->parts; part++, at++) {
            scales[at] = scale;
            sums[at] = scale * (float)(int32_t)sum[part];
            lifts[at] = (int32_t)(-128 * sum[part]);
        }
    }
}

typedef void quantise_fn(const packed *, const float *, int8_t *, float *, float *, int32_t *);
typedef void tiles_fn(const packed *, const rows *, const target *, const int64_t[2], int64_t,
                      int64_t);

static void plain_quantise(const packed *w, const float *x, int8_t *codes, float *scales,
                           float *sums, int32_t *lifts) {
    quantise_row(w, x, codes, scales, sums, lifts);
}

/* 2^x for x <= 0, to within 2 ulp; the same operations whatever the instructions. */
INLINE float power_of_2(float x) {
    float bounded = x < -126.0f ? -126.0f : x;
    float shifted = bounded + SHIFT, whole = shifted - SHIFT, part = bounded - whole;
    float y = 1.54035304e-4f;
    y = fmaf(y, part, 1.33335581e-3f);
    y = fmaf(y, part, 9.61812911e-3f);
    y = fmaf(y, part, 5.55041087e-2f);
    y = fmaf(y, part, 2.40226507e-1f);
    y = fmaf(y, part, 6.93147181e-1f);
    y = fmaf(y, part, 1.0f);
    int32_t bits = ((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return y * power;
}

INLINE float silu(float x) {
    float small = power_of_2(fabsf(x) * -1.44269504f); /* e^-|x| */
    return x * ((x < 0 ? small : 1.0f) / (small + 1.0f));
}

/* What came of a row for two tiles goes to its place. */
INLINE void put(const packed *w, const target *to, int64_t row, const int64_t tiles[2],
                float *made) {
    float *out = to->out + row * to->stride + tiles[0] * TILE;
    if (to->bias)
        for (int t = 0; t < 2; t++)
            for (int64_t i = 0; i < TILE && tiles[t] * TILE + i < w->num_outputs; i++)
                made[t * TILE + i] += to->bias[tiles[t] * TILE + i];
    if (to->gated) {
        for (int i = 0; i < TILE; i++) made[i] = silu(made[i]) * made[TILE + i];
        memcpy(out, made, TILE * sizeof(float));
    } else {
        int64_t left = w->num_outputs - tiles[0] * TILE;
        memcpy(out, made, (left < 2 * TILE ? left : 2 * TILE) * sizeof(float));
    }
}

/* What the others do, with no vectors: two tiles of outputs for rows [start, stop). */
static void plain_tiles(const packed *w, const rows *x, const target *to, const int64_t tiles[2],
                        int64_t start, int64_t stop) {
    for (int64_t row = start; row < stop; row++) {
        float made[2 * TILE];
        for (int lane = 0; lane < 2 * TILE; lane++) {
            int64_t tile = tiles[lane / TILE];
            float sum = 0;
            for (int64_t p = 0; p < x->num_parts; p++) {
                const int size = GROUP / w->parts;
                int64_t at = row * x->num_parts + p;
                int32_t whole = 0;
                for (int64_t i = p * size; i < (p + 1) * size; i++)
                    whole += code_at(w, tile, i / GROUP, lane % TILE, (int)(i % GROUP)) *
                             x->codes[row * w->num_groups * GROUP + i];
                int64_t place = (tile * x->num_parts + p) * TILE + lane % TILE;
                sum = fmaf((float)whole, factor(w->scales, w->half, place) * x->scales[at], sum);
                if (w->mins) sum = fmaf(factor(w->mins, w->half, place), x->sums[at], sum);
            }
            made[lane] = sum;
        }
        put(w, to, row, tiles, made);
    }
}

#ifdef __x86_64__

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define ISA(name) avx2_##name
#define LANES 8
#define MOST_ROWS 4
#define TILES_AT_ONCE 1
#define FLOATS __m256
#define INTS __m256i
#define LIFTED 0 /* weights are multiplied as signed numbers */
#include "packed_linear.h"
#undef ISA
#undef LANES
#undef MOST_ROWS
#undef TILES_AT_ONCE
#undef FLOATS
#undef INTS
#undef LIFTED
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")
#define ISA(name) vnni512_##name
#define LANES 16
#define MOST_ROWS 6
#define TILES_AT_ONCE 2
#define FLOATS __m512
#define INTS __m512i
#define LIFTED 1 /* weights are multiplied as they lie, 128 too large */
#include "packed_linear.h"
#pragma GCC pop_options

#endif

int best_instructions(void) {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        return VNNI512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return PLAIN;
}

static quantise_fn *quantise_by(const packed *w) {
#ifdef __x86_64__
    if (w->instructions == AVX2) return avx2_quantise;
    if (w->instructions == VNNI512) return vnni512_quantise;
#endif
    return plain_quantise;
}

static tiles_fn *tiles_by(const packed *w) {
#ifdef __x86_64__
    if (w->instructions == AVX2) return avx2_tiles;
    if (w->instructions == VNNI512) return vnni512_tiles;
#endif
    return plain_tiles;
}

static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t packed_scratch(const packed *w, int64_t num_rows) {
    int64_t groups = num_rows * w->num_groups;
    return aligned(groups * GROUP) + 3 * aligned(groups * w->parts * 4) + 64;
}

/* Where in scratch the quantised rows are. */
static rows rows_in(const packed *w, int64_t num_rows, char *scratch) {
    int64_t groups = num_rows * w->num_groups, each = aligned(groups * w->parts * 4);
    scratch += -(uintptr_t)scratch & 63;
    char *factors = scratch + aligned(groups * GROUP);
    return (rows){(int8_t *)scratch, (float *)factors, (float *)(factors + each),
                  (int32_t *)(factors + 2 * each), w->num_groups * w->parts};
}

static void prepare_row(const packed *w, const float *x, int64_t row, const rows *to) {
    int64_t at = row * to->num_parts;
    quantise_by(w)(w, x, to->codes + row * w->num_groups * GROUP, to->scales + at, to->sums + at,
                   to->lifts + at);
}

/* An item is two tiles of outputs for a run of rows; the items of a run follow one another, so that
 * its rows stay in the cache. Of a gated product the tiles are as far apart as the halves. */
static int64_t num_pairs(const packed *w) { return (w->num_outputs + 2 * TILE - 1) / (2 * TILE); }

static int64_t num_items_of(const packed *w, int64_t num_rows) {
    return num_pairs(w) * ((num_rows + RUN - 1) / RUN);
}

static void make_item(const packed *w, const rows *x, int64_t num_rows, const target *to,
                      int64_t item) {
    int64_t pair = item % num_pairs(w), start = item / num_pairs(w) * RUN;
    int64_t stop = start + RUN < num_rows ? start + RUN : num_rows;
    const int64_t apart[2] = {pair, pair + num_pairs(w)}, beside[2] = {2 * pair, 2 * pair + 1};
    tiles_by(w)(w, x, to, to->gated ? apart : beside, start, stop);
}

/* out[num_rows, num_outputs] from x[num_rows, width], whose rows are `x_stride` floats apart. */
void packed_multiply(const packed *w, const float *x, int64_t x_stride, int64_t num_rows,
                     const float *bias, float *out, char *scratch, int num_threads) {
    const rows quantised = rows_in(w, num_rows, scratch);
    const target to = {out, w->num_outputs, bias, 0};
    const int64_t num_items = num_items_of(w, num_rows);
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; row++)
            prepare_row(w, x + row * x_stride, row, &quantised);
#pragma omp for schedule(static) nowait
        for (int64_t item = 0; item < num_items; item++)
            make_item(w, &quantised, num_rows, &to, item);
    }
}

/* The given rows of the matrix, [count, width]: what the codes stand for, rounded as GGUF's own
 * arithmetic rounds it. */
void packed_rows(const packed *w, const int64_t *numbers, int64_t count, float *out) {
    for (int64_t n = 0; n < count; n++) {
        int64_t tile = numbers[n] / TILE;
        int lane = (int)(numbers[n] % TILE);
        for (int64_t i = 0; i < w->width; i++) {
            int64_t input = i + w->skip, part = input / (GROUP / w->parts);
            int64_t place = (tile * w->num_groups * w->parts + part) * TILE + lane;
            int code = code_at(w, tile, input / GROUP, lane, (int)(input % GROUP));
            float value = factor(w->scales, w->half, place) * (float)code;
            if (w->mins) value += factor(w->mins, w->half, place);
            out[n * w->width + i] = value;
        }
    }
}

/* The same as a form of weights that the compiled decoder multiplies by; see matrix.h. */

static int64_t matrix_items(const matrix *at, int64_t num_rows) {
    return num_items_of(at->values, num_rows);
}

static int64_t matrix_scratch(const matrix *at, int64_t num_rows) {
    return packed_scratch(at->values, num_rows);
}

static void matrix_prepare(const matrix *at, const product *p, int64_t row) {
    const rows x = rows_in(at->values, p->rows, p->scratch);
    prepare_row(at->values, p->x + row * p->x_stride, row, &x);
}

static void matrix_multiply(const matrix *at, const product *p, int64_t item) {
    const rows x = rows_in(at->values, p->rows, p->scratch);
    const target to = {p->out, p->out_stride, at->bias, p->gated};
    make_item(at->values, &x, p->rows, &to, item);
}

static void matrix_row(const matrix *at, int64_t number, float *out) {
    packed_rows(at->values, &number, 1, out);
}

void packed_matrix(matrix *at, const packed *w, const float *bias) {
    int64_t paired = w->num_outputs % (2 * TILE) == 0; /* then no tile lies across both halves */
    *at = (matrix){.in = w->width, .out = w->num_outputs, .values = w, .bias = bias,
                   .paired = paired, .num_items = matrix_items, .multiply = matrix_multiply, .row = matrix_row,
                   .scratch_bytes = matrix_scratch, .prepare = matrix_prepare};
}
