/* A chain of keyed BLAKE2b-256 digests: see chained_digests.py. RFC 7693, section 3.2. */
#include <stdint.h>
#include <string.h>

enum { BLOCK = 128, DIGEST = 32, FIELD = 4 };

static const uint64_t IV[8] = {0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu,
                               0xa54ff53a5f1d36f1u, 0x510e527fade682d1u, 0x9b05688c2b3e6c1fu,
                               0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u};

static const uint8_t SIGMA[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

static inline uint64_t turned(uint64_t word, int by) { return word >> by | word << (64 - by); }

#define MIX(a, b, c, d, x, y)                                                                      \
    a += b + (x), d = turned(d ^ a, 32), c += d, b = turned(b ^ c, 24);                            \
    a += b + (y), d = turned(d ^ a, 16), c += d, b = turned(b ^ c, 63)

static void compress(uint64_t h[8], const uint8_t block[BLOCK], uint64_t num_bytes, int last) {
    uint64_t m[16], v[16];
    memcpy(m, block, BLOCK);
    for (int i = 0; i < 8; i++) v[i] = h[i], v[i + 8] = IV[i];
    v[12] ^= num_bytes;
    if (last) v[14] = ~v[14];
#pragma GCC unroll 12
    for (int round = 0; round < 12; round++) {
        const uint8_t *s = SIGMA[round];
        MIX(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
        MIX(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
        MIX(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
        MIX(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
        MIX(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
        MIX(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
        MIX(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
        MIX(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
}

static uint8_t *put_size(uint8_t *to, uint32_t size) {
    memcpy(to, &size, FIELD);
    return to + FIELD;
}

/* `parent` is the digest that the first one goes on from, NULL where a chain begins. `room` holds at
 * least head_bytes + width + 3 * FIELD + DIGEST bytes, rounded up to a BLOCK, and zeros beyond what
 * is written. */
void chain_digests(const uint8_t key[DIGEST], const uint8_t *head, int64_t head_bytes,
                   const uint8_t *items, int64_t count, int64_t width, const uint8_t *parent,
                   uint8_t *room, uint8_t *digests) {
    uint64_t keyed[8];
    uint8_t block[BLOCK] = {0};
    memcpy(block, key, DIGEST);
    memcpy(keyed, IV, sizeof keyed);
    keyed[0] ^= 0x01010000u ^ DIGEST << 8 ^ DIGEST;
    compress(keyed, block, BLOCK, 0);
    memcpy(room, head, head_bytes);
    for (int64_t i = 0; i < count; i++, items += width, digests += DIGEST) {
        uint8_t *at = put_size(room + head_bytes, parent ? DIGEST : 0);
        if (parent) memcpy(at, parent, DIGEST), at += DIGEST;
        at = put_size(at, (uint32_t)width);
        memcpy(at, items, width);
        at = put_size(at + width, 0);
        int64_t length = at - room, done = 0;
        uint64_t h[8];
        memcpy(h, keyed, sizeof h);
        for (; length - done > BLOCK; done += BLOCK)
            compress(h, room + done, BLOCK + done + BLOCK, 0);
        compress(h, room + done, BLOCK + length, 1);
        memcpy(digests, h, DIGEST);
        parent = digests;
    }
}
