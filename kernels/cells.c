/* Move cells between scattered blocks and one buffer, and digest them: see host_cells.py.
 *
 * A pool of one layer holds, for each block, each plane, each local head, one cell of `cell_bytes`.
 * In a buffer cells are in canonical order: block, head, plane.
 */
#include <stdint.h>
#include <string.h>

typedef uint64_t (*digest_fn)(const void *, size_t);

typedef struct {
    int64_t num_planes, num_heads, cell_bytes; /* of the pool */
    int64_t lo, hi;                            /* the local heads to move */
} layout;

static char *cell_of(char *pool, const layout *at, int64_t block, int64_t head, int64_t plane) {
    return pool + ((block * at->num_planes + plane) * at->num_heads + head) * at->cell_bytes;
}

void gather_cells(char *pool, const layout *at, const int64_t *blocks, int64_t num_blocks,
                  char *cells, int64_t block_stride) {
    for (int64_t b = 0; b < num_blocks; b++) {
        char *to = cells + b * block_stride;
        for (int64_t head = at->lo; head < at->hi; head++)
            for (int64_t plane = 0; plane < at->num_planes; plane++, to += at->cell_bytes)
                memcpy(to, cell_of(pool, at, blocks[b], head, plane), at->cell_bytes);
    }
}

void scatter_cells(char *pool, const layout *at, const int64_t *blocks, int64_t num_blocks,
                   const char *cells, int64_t block_stride) {
    for (int64_t b = 0; b < num_blocks; b++) {
        const char *from = cells + b * block_stride;
        for (int64_t head = at->lo; head < at->hi; head++)
            for (int64_t plane = 0; plane < at->num_planes; plane++, from += at->cell_bytes)
                memcpy(cell_of(pool, at, blocks[b], head, plane), from, at->cell_bytes);
    }
}

void digest_cells(digest_fn digest, const char *cells, int64_t num_cells, int64_t cell_bytes,
                  uint64_t *digests) {
    for (int64_t i = 0; i < num_cells; i++)
        digests[i] = digest(cells + i * cell_bytes, cell_bytes);
}
