/* Vectors of floats as wide as the machine's registers, in the compiler's own notation. */
#ifndef KVFERRY_LANES_H
#define KVFERRY_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

INLINE vec load(const float *at) { return *(const loose *)at; }
INLINE void store(float *at, vec value) { *(loose *)at = value; }
INLINE vec all(float value) { return value - (vec){}; }

/* The first `count` floats, zeros after them. */
INLINE vec load_some(const float *at, int64_t count) {
    if (count >= LANES) return load(at);
    vec value = {};
    memcpy(&value, at, count * sizeof(float));
    return value;
}

INLINE void store_some(float *at, vec value, int64_t count) {
    if (count >= LANES)
        store(at, value);
    else
        memcpy(at, &value, count * sizeof(float));
}

/* a * b + c, rounded once where the machine can: in every kernel alike, so that a product does not
 * depend on which of them made it. */
INLINE vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE vec chosen(ivec which, vec yes, vec no) {
    return (vec)((which & (ivec)yes) | (~which & (ivec)no));
}

/* The second where they cannot be compared. */
INLINE vec larger(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return chosen(a > b, a, b);
#endif
}

/* Lanes added pairwise: the same order on every machine of one width. */
INLINE float sum_of(vec value) {
    float at[LANES];
    memcpy(at, &value, sizeof at);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) at[i] += at[i + width];
    return at[0];
}

INLINE float largest_of(vec value) {
    float at[LANES];
    memcpy(at, &value, sizeof at);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) at[i] = at[i] > at[i + width] ? at[i] : at[i + width];
    return at[0];
}

/* LANES vectors, of which each becomes what stood in its lane of all of them: bit after bit of the
 * lanes' numbers changes places with the same bit of the vectors'. */
INLINE void transpose(vec at[LANES]) {
#pragma GCC unroll 4
    for (int bit = 1; bit < LANES; bit *= 2) {
        ivec first = {}, second = {};
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++) {
            first[lane] = lane & bit ? LANES + lane - bit : lane;
            second[lane] = lane & bit ? LANES + lane : lane + bit;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & bit) continue;
            vec low = at[i], high = at[i + bit];
            at[i] = __builtin_shuffle(low, high, first);
            at[i + bit] = __builtin_shuffle(low, high, second);
        }
    }
}

/* 2^x to within 2 ulp for x <= 0; 0 below the smallest normal float, -infinity included. NaN stays
 * NaN, so that who looks at the logits sees it. */
INLINE vec power_of_2(vec x) {
    vec bounded = larger(all(-126.0f), x);
    vec shifted = bounded + 12582912.0f; /* 1.5 * 2^23: rounds to whole numbers */
    vec whole = shifted - 12582912.0f;
    vec part = bounded - whole; /* -0.5 to 0.5 */
    vec y = all(1.54035304e-4f);
    y = fused(y, part, all(1.33335581e-3f));
    y = fused(y, part, all(9.61812911e-3f));
    y = fused(y, part, all(5.55041087e-2f));
    y = fused(y, part, all(2.40226507e-1f));
    y = fused(y, part, all(6.93147181e-1f));
    y = fused(y, part, all(1.0f));
#if defined(__AVX512F__)
    __mmask16 large = _mm512_cmp_ps_mask((__m512)x, (__m512)all(-126.0f), _CMP_NLT_UQ);
    return (vec)_mm512_maskz_scalef_ps(large, (__m512)y, (__m512)whole);
#else
    ivec tiny = x < -126.0f, exponent = (__builtin_convertvector(whole, ivec) + 127) << 23;
    vec result = y * (vec)exponent;
    return chosen(tiny, (vec){}, result);
#endif
}

INLINE vec silu(vec x) {
    vec small = power_of_2(larger(x, -x) * -1.44269504f); /* e^-|x| */
    vec top = chosen(x < 0.0f, small, all(1.0f));
    return x * (top / (small + 1.0f));
}

#endif
