/* xxh3-64 with AVX2, alone and on the way of a copy; elsewhere whatever `digest_fn` it is given. And
 * a copy past the caches, for what nobody will look at soon.
 *
 * By the specification of XXH3 for inputs longer than 240 bytes, seed 0, default secret. What it is
 * compared with is the package `xxhash`: `host_cells.load` at each start, and its tests.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef uint64_t (*digest_fn)(const void *, size_t);

#if defined(__x86_64__)
#include <immintrin.h>

enum { SHORT = 240, STRIPE = 64, STRIPES = 16, BLOCK = STRIPE * STRIPES, SECRET = 192 };
enum { AHEAD = 4096 }; /* bytes that are fetched before they are digested: mostly of the next cell */

static const uint8_t xxh3_secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87u, PRIME64_2 = 0xC2B2AE3D27D4EB4Fu,
                      PRIME64_3 = 0x165667B19E3779F9u, PRIME64_4 = 0x85EBCA77C2B2AE63u,
                      PRIME64_5 = 0x27D4EB2F165667C5u, PRIME_MX1 = 0x165667919E3779F9u;
static const uint32_t PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;

static uint64_t word_at(const uint8_t *p) {
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

/* The eight accumulators and the length become the digest. */
static uint64_t xxh3_merge(const uint64_t *acc, size_t len) {
    uint64_t sum = len * PRIME64_1;
    for (int i = 0; i < 4; i++) {
        const uint8_t *key = xxh3_secret + 11 + 16 * i;
        __uint128_t product = (__uint128_t)(acc[2 * i] ^ word_at(key)) *
                              (acc[2 * i + 1] ^ word_at(key + 8));
        sum += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    sum = (sum ^ sum >> 37) * PRIME_MX1;
    return sum ^ sum >> 32;
}

#define AVX2 __attribute__((target("avx2"), always_inline)) static inline

AVX2 __m256i load32(const void *p) { return _mm256_loadu_si256(p); }

/* Half a stripe: each lane gains its keyed product, and its neighbour's data. */
AVX2 __m256i accumulate(__m256i acc, __m256i data, const uint8_t *key) {
    __m256i keyed = _mm256_xor_si256(data, load32(key));
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    return _mm256_add_epi64(acc, _mm256_add_epi64(product, _mm256_shuffle_epi32(data, 0x4E)));
}

AVX2 __m256i scramble(__m256i acc, const uint8_t *key) {
    __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    __m256i mixed = _mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47));
    mixed = _mm256_xor_si256(mixed, load32(key));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}

/* With `to`, every byte is also copied there: the copy costs little more than the reading. */
AVX2 uint64_t xxh3_long(char *to, const char *from, size_t len) {
    uint64_t acc[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                       PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    __m256i low = load32(acc), high = load32(acc + 4);
    size_t at = 0;
    for (size_t left = len - 1;; left -= BLOCK) { /* the last byte is always in the last stripe */
        size_t stripes = left < BLOCK ? left / STRIPE : STRIPES;
        for (size_t i = 0; i < stripes; i++, at += STRIPE) {
            __m256i first = load32(from + at), second = load32(from + at + 32);
            _mm_prefetch(from + at + AHEAD, _MM_HINT_T0);
            if (to) {
                _mm256_storeu_si256((void *)(to + at), first);
                _mm256_storeu_si256((void *)(to + at + 32), second);
            }
            low = accumulate(low, first, xxh3_secret + 8 * i);
            high = accumulate(high, second, xxh3_secret + 8 * i + 32);
        }
        if (left < BLOCK) break;
        low = scramble(low, xxh3_secret + SECRET - STRIPE);
        high = scramble(high, xxh3_secret + SECRET - STRIPE + 32);
    }
    const uint8_t *key = xxh3_secret + SECRET - STRIPE - 7;
    __m256i first = load32(from + len - STRIPE), second = load32(from + len - STRIPE + 32);
    if (to) { /* at most a stripe is left to copy */
        _mm256_storeu_si256((void *)(to + len - STRIPE), first);
        _mm256_storeu_si256((void *)(to + len - STRIPE + 32), second);
    }
    low = accumulate(low, first, key);
    high = accumulate(high, second, key + 32);
    _mm256_storeu_si256((void *)acc, low);
    _mm256_storeu_si256((void *)(acc + 4), high);
    return xxh3_merge(acc, len);
}

__attribute__((target("avx2"))) static uint64_t avx2_digest(const char *from, size_t len) {
    return xxh3_long(NULL, from, len);
}

__attribute__((target("avx2"))) static uint64_t avx2_copy(char *to, const char *from, size_t len) {
    return xxh3_long(to, from, len);
}

static int use_avx2(size_t len) { return len > SHORT && __builtin_cpu_supports("avx2"); }

/* Blocks of a pool are far apart and cold: to fetch their lines only to overwrite them costs a third
 * of the time of a scatter. `finish_copies` comes before anybody is told of them. */
__attribute__((target("avx512f"))) static void copy_past_caches_by_lines(char *to, const char *from,
                                                                         size_t len) {
    for (size_t at = 0; at < len; at += 64)
        _mm512_stream_si512((void *)(to + at), _mm512_loadu_si512(from + at));
}

__attribute__((target("avx2"))) static void copy_past_caches(char *to, const char *from, size_t len) {
    if (len % 64 == 0 && (uintptr_t)to % 64 == 0 && __builtin_cpu_supports("avx512f")) {
        copy_past_caches_by_lines(to, from, len);
        return;
    }
    if (len % 32 || (uintptr_t)to % 32 || !__builtin_cpu_supports("avx2")) {
        memcpy(to, from, len);
        return;
    }
    for (size_t at = 0; at < len; at += 32) _mm256_stream_si256((void *)(to + at), load32(from + at));
}

static void finish_copies(void) { _mm_sfence(); }

#else

static int use_avx2(size_t len) { return 0; }
static uint64_t avx2_digest(const char *from, size_t len) { return 0; }
static uint64_t avx2_copy(char *to, const char *from, size_t len) { return 0; }
static void copy_past_caches(char *to, const char *from, size_t len) { memcpy(to, from, len); }
static void finish_copies(void) {}

#endif

static uint64_t digest_of(const char *bytes, size_t len, digest_fn digest) {
    return use_avx2(len) ? avx2_digest(bytes, len) : digest(bytes, len);
}

static uint64_t copy_and_digest(char *to, const char *from, size_t len, digest_fn digest) {
    if (use_avx2(len)) return avx2_copy(to, from, len);
    memcpy(to, from, len);
    return digest(to, len);
}
