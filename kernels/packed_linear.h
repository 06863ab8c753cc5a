/* The inner loops of packed_linear.c, included there once for each set of instructions. */

#define VECTORS (TILE / LANES)         /* of a tile */
#define ACROSS (VECTORS * TILES_AT_ONCE)

#if LANES == 16

static inline INTS ISA(load)(const uint8_t *from) { return _mm512_loadu_si512(from); }
static inline INTS ISA(spread)(int32_t quad) { return _mm512_set1_epi32(quad); }
static inline INTS ISA(signed)(INTS codes) {
    return _mm512_xor_si512(codes, _mm512_set1_epi8(-128));
}
static inline INTS ISA(nibbles)(INTS pair, int high) {
    return _mm512_and_si512(high ? _mm512_srli_epi16(pair, 4) : pair, _mm512_set1_epi8(15));
}
static inline INTS ISA(add_8)(INTS sum, INTS weight, INTS quad) {
    return _mm512_dpbusd_epi32(sum, weight, quad);
}
static inline INTS ISA(add_4)(INTS sum, INTS weight, INTS quad) {
    return _mm512_dpbusd_epi32(sum, weight, quad);
}
static inline INTS ISA(whole_4)(INTS sum) { return sum; }
static inline FLOATS ISA(floats)(INTS whole) { return _mm512_cvtepi32_ps(whole); }
static inline FLOATS ISA(spread_float)(float value) { return _mm512_set1_ps(value); }
static inline FLOATS ISA(times)(FLOATS a, FLOATS b) { return _mm512_mul_ps(a, b); }
static inline FLOATS ISA(fused)(FLOATS a, FLOATS b, FLOATS c) { return _mm512_fmadd_ps(a, b, c); }
static inline FLOATS ISA(plus)(FLOATS a, FLOATS b) { return _mm512_add_ps(a, b); }
static inline FLOATS ISA(load_floats)(const float *from) { return _mm512_loadu_ps(from); }
static inline void ISA(store)(float *to, FLOATS value) { _mm512_storeu_ps(to, value); }
static inline FLOATS ISA(factors)(const void *from, int half, int64_t at) {
    if (!half) return _mm512_loadu_ps((const float *)from + at);
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)from + at)));
}

#else

static inline INTS ISA(load)(const uint8_t *from) {
    return _mm256_loadu_si256((const __m256i *)from);
}
static inline INTS ISA(spread)(int32_t quad) { return _mm256_set1_epi32(quad); }
static inline INTS ISA(signed)(INTS codes) {
    return _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
}
static inline INTS ISA(nibbles)(INTS pair, int high) {
    return _mm256_and_si256(high ? _mm256_srli_epi16(pair, 4) : pair, _mm256_set1_epi8(15));
}
/* Of two factors of one sign each, the product of sizes in 16 bits: 2 * 128 * 127 fits. */
static inline INTS ISA(add_8)(INTS sum, INTS weight, INTS quad) {
    INTS pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weight), _mm256_sign_epi8(quad, weight));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
/* In 16 bits throughout the group: 8 * 2 * 15 * 127 fits. */
static inline INTS ISA(add_4)(INTS sum, INTS weight, INTS quad) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(weight, quad));
}
static inline INTS ISA(whole_4)(INTS sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
static inline FLOATS ISA(floats)(INTS whole) { return _mm256_cvtepi32_ps(whole); }
static inline FLOATS ISA(spread_float)(float value) { return _mm256_set1_ps(value); }
static inline FLOATS ISA(times)(FLOATS a, FLOATS b) { return _mm256_mul_ps(a, b); }
static inline FLOATS ISA(fused)(FLOATS a, FLOATS b, FLOATS c) { return _mm256_fmadd_ps(a, b, c); }
static inline FLOATS ISA(plus)(FLOATS a, FLOATS b) { return _mm256_add_ps(a, b); }
static inline FLOATS ISA(load_floats)(const float *from) { return _mm256_loadu_ps(from); }
static inline void ISA(store)(float *to, FLOATS value) { _mm256_storeu_ps(to, value); }
static inline FLOATS ISA(factors)(const void *from, int half, int64_t at) {
    if (!half) return _mm256_loadu_ps((const float *)from + at);
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)from + at)));
}

#endif

static void ISA(quantise)(const packed *w, const float *x, int8_t *codes, float *scales,
                          float *sums, int32_t *lifts) {
    quantise_row(w, x, codes, scales, sums, lifts);
}

static inline int32_t ISA(quad)(const int8_t *codes, int quad) {
    int32_t four;
    memcpy(&four, codes + 4 * quad, 4);
    return four;
}

/* The integer products of one part of a group: `count` rows by ACROSS vectors of outputs. */
static inline __attribute__((always_inline)) void ISA(whole)(
    INTS whole[MOST_ROWS][ACROSS], const uint8_t *codes[ACROSS], const int8_t *const x[MOST_ROWS],
    const int count, const int bits, const int vectors) {
#pragma GCC unroll 8
    for (int quad = 0; quad < vectors; quad++) {
        INTS weights[ACROSS];
#pragma GCC unroll 2
        for (int v = 0; v < ACROSS; v++) {
            weights[v] = ISA(load)(codes[v] + quad * TILE * 4);
            if (bits == 8 && !LIFTED) weights[v] = ISA(signed)(weights[v]);
        }
#pragma GCC unroll 6
        for (int r = 0; r < count; r++) {
            INTS low = ISA(spread)(ISA(quad)(x[r], quad));
            if (bits == 8) {
#pragma GCC unroll 2
                for (int v = 0; v < ACROSS; v++)
                    whole[r][v] = ISA(add_8)(whole[r][v], weights[v], low);
            } else {
                INTS high = ISA(spread)(ISA(quad)(x[r], quad + QUADS / 2));
#pragma GCC unroll 2
                for (int v = 0; v < ACROSS; v++) {
                    whole[r][v] = ISA(add_4)(whole[r][v], ISA(nibbles)(weights[v], 0), low);
                    whole[r][v] = ISA(add_4)(whole[r][v], ISA(nibbles)(weights[v], 1), high);
                }
            }
        }
    }
}

/* Outputs of TILES_AT_ONCE tiles for `count` rows, each in its place in a row of `made`. */
static inline __attribute__((always_inline)) void ISA(block)(
    const packed *w, const rows *x, const int64_t tiles[2], int64_t row, const int count,
    const int bits, const int parts, float *made) {
    const int64_t num_parts = w->num_groups * parts, part_bytes = GROUP * TILE * bits / 8 / parts;
    const int vectors = (bits == 8 ? QUADS : QUADS / 2) / parts;
    FLOATS sums[MOST_ROWS][ACROSS];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < ACROSS; v++) sums[r][v] = ISA(spread_float)(0);
    for (int64_t p = 0; p < num_parts; p++) {
        const uint8_t *codes[ACROSS];
        const int8_t *quads[MOST_ROWS];
        INTS whole[MOST_ROWS][ACROSS];
        for (int v = 0; v < ACROSS; v++)
            codes[v] = w->codes + (tiles[v / VECTORS] * num_parts + p) * part_bytes +
                       v % VECTORS * LANES * 4;
        for (int r = 0; r < count; r++) {
            int64_t at = (row + r) * num_parts + p;
            quads[r] = x->codes + at * (GROUP / parts);
            INTS start = ISA(spread)(bits == 8 && LIFTED ? x->lifts[at] : 0);
            for (int v = 0; v < ACROSS; v++) whole[r][v] = start;
        }
        ISA(whole)(whole, codes, quads, count, bits, vectors);
        for (int v = 0; v < ACROSS; v++) {
            int64_t place = (tiles[v / VECTORS] * num_parts + p) * TILE + v % VECTORS * LANES;
            FLOATS scales = ISA(factors)(w->scales, w->half, place), mins;
            if (w->mins) mins = ISA(factors)(w->mins, w->half, place);
            for (int r = 0; r < count; r++) {
                int64_t at = (row + r) * num_parts + p;
                INTS products = bits == 8 ? whole[r][v] : ISA(whole_4)(whole[r][v]);
                FLOATS scale = ISA(times)(scales, ISA(spread_float)(x->scales[at]));
                sums[r][v] = ISA(fused)(ISA(floats)(products), scale, sums[r][v]);
                if (w->mins)
                    sums[r][v] = ISA(fused)(mins, ISA(spread_float)(x->sums[at]), sums[r][v]);
            }
        }
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < ACROSS; v++)
            ISA(store)(made + r * 2 * TILE + v * LANES, sums[r][v]);
}

/* Outputs of two tiles for up to MOST_ROWS rows. */
static void ISA(some_rows)(const packed *w, const rows *x, const int64_t tiles[2], int64_t row,
                           int64_t count, float *made) {
#define CASE(n)                                                                         \
    case n:                                                                             \
        for (int t = 0; t < 2; t += TILES_AT_ONCE)                                      \
            if (w->bits == 4)                                                           \
                ISA(block)(w, x, tiles + t, row, n, 4, 1, made + t * TILE);             \
            else if (w->parts == 1)                                                     \
                ISA(block)(w, x, tiles + t, row, n, 8, 1, made + t * TILE);             \
            else                                                                        \
                ISA(block)(w, x, tiles + t, row, n, 8, 2, made + t * TILE);             \
        break;
    switch (count) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if MOST_ROWS > 4
        CASE(5) CASE(6)
#endif
    }
#undef CASE
}

/* Two tiles of outputs for rows [start, stop). */
static void ISA(tiles)(const packed *w, const rows *x, const target *to, const int64_t tiles[2],
                       int64_t start, int64_t stop) {
    float made[MOST_ROWS * 2 * TILE];
    for (int64_t row = start; row < stop; row += MOST_ROWS) {
        int64_t count = stop - row < MOST_ROWS ? stop - row : MOST_ROWS;
        ISA(some_rows)(w, x, tiles, row, count, made);
        for (int64_t r = 0; r < count; r++) put(w, to, row + r, tiles, made + r * 2 * TILE);
    }
}

#undef VECTORS
#undef ACROSS
