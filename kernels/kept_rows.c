/* Rows of kept digests, a block each: see kept_rows.py.
 *
 * Of one layer: `digests` and `known` have a row for each block of the pool, so far apart as their
 * strides say, in the order of heads and planes, and `written` one count. Meant are the heads from `lo`
 * up to `hi` of the blocks that are named, in `num_layers` layers. */
#include <stdint.h>
#include <string.h>

typedef struct {
    uint64_t *digests;
    int64_t digest_stride; /* in digests */
    uint8_t *known;
    int64_t known_stride;
    uint32_t *written;
    int64_t num_planes;
} rows;

void forget_rows(const rows *of, int64_t num_layers, const int64_t *blocks, int64_t num_blocks, int64_t lo,
                 int64_t hi) {
    for (int64_t b = 0; b < num_blocks; b++) {
        for (int64_t layer = 0; layer < num_layers; layer++)
            memset(of[layer].known + blocks[b] * of[layer].known_stride + lo, 0, hi - lo);
        of->written[blocks[b]]++;
    }
}

/* `found` are the digests of the blocks named, one behind the other. */
static void enter(const rows *of, int64_t block, int64_t lo, int64_t hi, const uint64_t *found) {
    memcpy(of->digests + block * of->digest_stride + lo * of->num_planes, found,
           (hi - lo) * of->num_planes * sizeof *found);
}

/* `good`, if given, says of which cells of a head the digests hold; of the others none are known. Both are
 * of all the layers, one behind the other. */
void keep_rows(const rows *of, int64_t num_layers, const int64_t *blocks, int64_t num_blocks, int64_t lo,
               int64_t hi, const uint64_t *found, const uint8_t *good) {
    const int64_t width = hi - lo;
    for (int64_t layer = 0; layer < num_layers; layer++, of++)
        for (int64_t b = 0; b < num_blocks; b++, found += width * of->num_planes) {
            uint8_t *known = of->known + blocks[b] * of->known_stride + lo;
            enter(of, blocks[b], lo, hi, found);
            if (good)
                memcpy(known, good + (layer * num_blocks + b) * width, width);
            else
                memset(known, 1, width);
            if (!layer) of->written[blocks[b]]++;
        }
}

/* Copies what is kept into `found`, if it is of all of them. Whether it is. */
int known_rows(const rows *of, int64_t num_layers, const int64_t *blocks, int64_t num_blocks, int64_t lo,
               int64_t hi, uint64_t *found) {
    const int64_t width = hi - lo;
    for (int64_t layer = 0; layer < num_layers; layer++, of++) {
        const int64_t num_digests = width * of->num_planes;
        for (int64_t b = 0; b < num_blocks; b++, found += num_digests) {
            const uint8_t *known = of->known + blocks[b] * of->known_stride + lo;
            if (memchr(known, 0, width)) return 0;
            memcpy(found, of->digests + blocks[b] * of->digest_stride + lo * of->num_planes,
                   num_digests * sizeof *found);
        }
    }
    return 1;
}

/* Whether `found` are the digests kept, or are kept from now on as none were and nobody has written
 * since `before`. 0: somebody has to look closer, and nothing was changed. */
int compare_rows(const rows *of, const int64_t *blocks, int64_t num_blocks, int64_t lo, int64_t hi,
                 const uint64_t *found, const uint32_t *before) {
    const int64_t width = hi - lo, num_digests = width * of->num_planes;
    int64_t num_known = 0;
    int same = 1, calm = 1;
    for (int64_t b = 0; b < num_blocks; b++) {
        const uint8_t *known = of->known + blocks[b] * of->known_stride + lo;
        const uint64_t *kept = of->digests + blocks[b] * of->digest_stride + lo * of->num_planes;
        for (int64_t head = 0; head < width; head++) num_known += known[head];
        same = same && !memcmp(kept, found + b * num_digests, num_digests * sizeof *found);
        calm = calm && of->written[blocks[b]] == before[b];
    }
    if (num_known) return same && num_known == num_blocks * width;
    if (!calm) return 0;
    for (int64_t b = 0; b < num_blocks; b++) {
        enter(of, blocks[b], lo, hi, found + b * num_digests);
        memset(of->known + blocks[b] * of->known_stride + lo, 1, width);
    }
    return 1;
}
