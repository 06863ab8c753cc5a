/* Rows times a packed matrix of 8 or 4 bits a weight: see packed_linear.py.
 *
 * A matrix lies in an even number of tiles of TILE outputs, a tile in groups of GROUP inputs, a
 * group in quads of four inputs: one vector holds the same quad of several outputs, and a lane is
 * an output.
 *
 *   8 bits    codes[tile][group][quad][output][4], a weight w as w + 128
 *   4 bits    codes[tile][group][quad of the lower half][output][4], the quad of the upper half in
 *             the high nibbles
 *   scales    [tile][group][output], and mins alike: a weight is scale * code + min
 *
 * Rows are quantised by group to 8 bits. Products of a group are added up as integers, exactly; the
 * groups are added up in order, in fp32, by fused multiply-adds. So the bits of a result depend
 * neither on the other rows nor on the number of threads nor on the instructions used.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { TILE = 16, GROUP = 32, QUADS = GROUP / 4, RUN = 120 };
enum { PLAIN, AVX2, VNNI512 }; /* instructions */

typedef struct {
    const uint8_t *codes;
    const void *scales, *mins; /* of half precision or single; mins may be NULL if bits is 8 */
    int64_t num_outputs, num_groups;
    int64_t width, skip; /* of a row; the row begins `skip` inputs into the first group */
    int32_t bits, half, instructions;
} packed;

typedef struct {
    int8_t *codes;  /* [num_rows, num_groups, GROUP] */
    float *scales;  /* [num_rows, num_groups], as the next two */
    float *sums;    /* of the quantised row's values */
    int32_t *lifts; /* -128 times the sum of the codes: undoes the 128 in a weight's code */
    int64_t num_groups;
} rows;

typedef struct {
    float *out; /* [num_rows, stride] */
    int64_t stride;
    const float *bias;
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
static inline __attribute__((always_inline)) void quantise_row(
    const packed *w, const float *x, int8_t *codes, float *scales, float *sums, int32_t *lifts) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    for (int64_t g = 0; g < w->num_groups; g++) {
        float values[GROUP];
        int64_t from = g * GROUP - w->skip, lo = from < 0 ? -from : 0;
        int64_t hi = w->width - from < GROUP ? w->width - from : GROUP;
        if (lo == 0 && hi == GROUP)
            memcpy(values, x + from, sizeof values);
        else
            for (int i = 0; i < GROUP; i++) values[i] = i >= lo && i < hi ? x[from + i] : 0;
        int32_t bits[GROUP], most = 0, sum = 0;
        memcpy(bits, values, sizeof bits);
        for (int i = 0; i < GROUP; i++) {
            int32_t size = bits[i] & 0x7fffffff; /* as integers, sizes of floats are in order */
            most = size > most ? size : most;
        }
        float largest;
        memcpy(&largest, &most, 4);
        float inverse = largest > 1e-30f ? 127.0f / largest : 0;
        for (int i = 0; i < GROUP; i++) values[i] = values[i] * inverse + shift;
        memcpy(bits, values, sizeof bits);
        for (int i = 0; i < GROUP; i++) {
            int32_t code = bits[i] - 0x4b400000;
            codes[g * GROUP + i] = (int8_t)code;
            sum += code;
        }
        float scale = most >= 0x7f800000 ? NAN : inverse ? largest / 127.0f : 0;
        scales[g] = scale;
        sums[g] = scale * (float)sum;
        lifts[g] = -128 * sum;
    }
}

typedef void quantise_fn(const packed *, const float *, int8_t *, float *, float *, int32_t *);
typedef void tiles_fn(const packed *, const rows *, const target *, int64_t, int64_t, int64_t,
                      int64_t);

static void plain_quantise(const packed *w, const float *x, int8_t *codes, float *scales,
                           float *sums, int32_t *lifts) {
    quantise_row(w, x, codes, scales, sums, lifts);
}

/* What the others do, with no vectors: outputs of tiles [first, last) for rows [start, stop). */
static void plain_tiles(const packed *w, const rows *x, const target *to, int64_t first,
                        int64_t last, int64_t start, int64_t stop) {
    for (int64_t tile = first; tile < last; tile++)
        for (int64_t row = start; row < stop; row++)
            for (int lane = 0; lane < TILE; lane++) {
                float sum = 0;
                if (tile * TILE + lane >= w->num_outputs) break;
                for (int64_t g = 0; g < w->num_groups; g++) {
                    int64_t at = row * x->num_groups + g;
                    const int8_t *codes = x->codes + at * GROUP;
                    int32_t whole = 0;
                    for (int i = 0; i < GROUP; i++) whole += code_at(w, tile, g, lane, i) * codes[i];
                    int64_t place = (tile * w->num_groups + g) * TILE + lane;
                    sum = fmaf((float)whole, factor(w->scales, w->half, place) * x->scales[at], sum);
                    if (w->mins) sum = fmaf(factor(w->mins, w->half, place), x->sums[at], sum);
                }
                if (to->bias) sum += to->bias[tile * TILE + lane];
                to->out[row * to->stride + tile * TILE + lane] = sum;
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
    return aligned(groups * GROUP) + 3 * aligned(groups * 4) + 64;
}

/* Where in scratch the quantised rows are. */
static rows rows_in(const packed *w, int64_t num_rows, char *scratch) {
    int64_t groups = num_rows * w->num_groups, each = aligned(groups * 4);
    scratch += -(uintptr_t)scratch & 63;
    char *factors = scratch + aligned(groups * GROUP);
    return (rows){(int8_t *)scratch, (float *)factors, (float *)(factors + each),
                  (int32_t *)(factors + 2 * each), w->num_groups};
}

static void prepare_row(const packed *w, const float *x, int64_t row, const rows *to) {
    int64_t at = row * w->num_groups;
    quantise_by(w)(w, x, to->codes + at * GROUP, to->scales + at, to->sums + at, to->lifts + at);
}

/* An item is two tiles of outputs for a run of rows; the items of a run follow one another, so that
 * its rows stay in the cache. */
static int64_t num_pairs(const packed *w) { return (w->num_outputs + 2 * TILE - 1) / (2 * TILE); }

static int64_t num_items_of(const packed *w, int64_t num_rows) {
    return num_pairs(w) * ((num_rows + RUN - 1) / RUN);
}

static void make_item(const packed *w, const rows *x, int64_t num_rows, const target *to,
                      int64_t item) {
    int64_t pair = item % num_pairs(w), start = item / num_pairs(w) * RUN;
    int64_t stop = start + RUN < num_rows ? start + RUN : num_rows;
    tiles_by(w)(w, x, to, 2 * pair, 2 * pair + 2, start, stop);
}

/* out[num_rows, num_outputs] from x[num_rows, width], whose rows are `x_stride` floats apart. */
void packed_multiply(const packed *w, const float *x, int64_t x_stride, int64_t num_rows,
                     const float *bias, float *out, char *scratch, int num_threads) {
    const rows quantised = rows_in(w, num_rows, scratch);
    const target to = {out, w->num_outputs, bias};
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
            int64_t g = (i + w->skip) / GROUP, place = (tile * w->num_groups + g) * TILE + lane;
            int code = code_at(w, tile, g, lane, (int)((i + w->skip) % GROUP));
            float value = factor(w->scales, w->half, place) * (float)code;
            if (w->mins) value += factor(w->mins, w->half, place);
            out[n * w->width + i] = value;
        }
    }
}
