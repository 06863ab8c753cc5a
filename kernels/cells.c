/* Move cells between scattered blocks and one buffer, and digest them: see host_cells.py.
 *
 * A pool of one layer holds rows of `slot_bytes`, one for each block, plane, local head and slot, as
 * far apart as the strides say. A block's slots may count as several blocks, its parts: part p of
 * block b is then block b * parts + p. In a buffer cells are dense and in canonical order: block,
 * head, plane.
 */
#define _DEFAULT_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include "cells.h"

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

enum { MOST_VIEWS = 1024 }; /* that the kernel takes at once */

typedef struct {
    int64_t block_stride, plane_stride, head_stride, slot_stride; /* of the pool, in bytes */
    int64_t num_planes, num_slots, slot_bytes;                    /* slots are those of one part */
    int64_t parts;
    int64_t lo, hi; /* the local heads to move */
} layout;

static char *cell_of(char *pool, const layout *at, int64_t block, int64_t head, int64_t plane) {
    return pool + block / at->parts * at->block_stride + plane * at->plane_stride +
           head * at->head_stride + block % at->parts * at->num_slots * at->slot_stride;
}

/* One cell, whose slots lie `to_stride` and `from_stride` apart. */
static void copy_slots(char *to, int64_t to_stride, const char *from, int64_t from_stride,
                       const layout *at) {
    for (int64_t slot = 0; slot < at->num_slots; slot++)
        memcpy(to + slot * to_stride, from + slot * from_stride, at->slot_bytes);
}

/* Whether the cells of a block follow each other in the pool as they do in a buffer. */
static int in_order(const layout *at) {
    const int64_t cell_bytes = at->num_slots * at->slot_bytes;
    return at->slot_stride == at->slot_bytes && at->plane_stride == cell_bytes &&
           at->head_stride == at->num_planes * cell_bytes;
}

enum { LARGE = 1 << 20 }; /* what nobody who reads it next would find in a cache of his own */

/* Digests, where they are wanted, are made on the way; those of one block lie `digest_stride` apart
 * from those of the next. Without them much that lies in order goes past the caches. */
void gather_cells(char *pool, const layout *at, const int64_t *blocks, int64_t num_blocks,
                  char *cells, int64_t block_stride, digest_fn digest, uint64_t *digests,
                  int64_t digest_stride) {
    const int64_t cell_bytes = at->num_slots * at->slot_bytes;
    const int64_t block_bytes = (at->hi - at->lo) * at->num_planes * cell_bytes;
    const int dense = at->slot_stride == at->slot_bytes, whole = !digests && in_order(at);
    const int past = whole && num_blocks * block_bytes > LARGE;
    for (int64_t b = 0; b < num_blocks; b++) {
        char *to = cells + b * block_stride;
        uint64_t *found = digests ? digests + b * digest_stride : NULL;
        if (whole) {
            const char *from = cell_of(pool, at, blocks[b], at->lo, 0);
            if (past)
                copy_past_caches(to, from, block_bytes);
            else
                memcpy(to, from, block_bytes);
            continue;
        }
        for (int64_t head = at->lo; head < at->hi; head++)
            for (int64_t plane = 0; plane < at->num_planes; plane++) {
                const char *cell = cell_of(pool, at, blocks[b], head, plane);
                if (found && dense) {
                    *found++ = copy_and_digest(to, cell, cell_bytes, digest);
                } else if (dense) {
                    memcpy(to, cell, cell_bytes);
                } else {
                    copy_slots(to, at->slot_bytes, cell, at->slot_stride, at);
                    if (found) *found++ = digest_of(to, cell_bytes, digest);
                }
                to += cell_bytes;
            }
    }
    if (past) finish_copies();
}

/* Digests alone, of cells that stay where they are: those that lie in one piece are only read, others
 * pass through `room`, which takes one. Of the last block `tail_slots` slots have meaning, 0: all; the
 * rest of it counts as zero. */
static void digest_blocks(char *pool, const layout *at, const int64_t *blocks, int64_t num_blocks,
                          int64_t tail_slots, char *room, digest_fn digest, uint64_t *digests,
                          int64_t digest_stride) {
    const int64_t cell_bytes = at->num_slots * at->slot_bytes;
    const int dense = at->slot_stride == at->slot_bytes;
    layout some = *at;
    for (int64_t b = 0; b < num_blocks; b++) {
        const int tail = tail_slots && b + 1 == num_blocks;
        uint64_t *found = digests + b * digest_stride;
        if (tail) some.num_slots = tail_slots;
        const int64_t kept = some.num_slots * at->slot_bytes;
        if (tail) memset(room + kept, 0, cell_bytes - kept);
        for (int64_t head = at->lo; head < at->hi; head++)
            for (int64_t plane = 0; plane < at->num_planes; plane++) {
                const char *cell = cell_of(pool, at, blocks[b], head, plane);
                if (tail || !dense) {
                    copy_slots(room, at->slot_bytes, cell, at->slot_stride, &some);
                    cell = room;
                }
                *found++ = digest_of(cell, cell_bytes, digest);
            }
    }
}

typedef struct {
    char *pool;
    const layout *at;
    const int64_t *blocks;
    int64_t num_blocks, tail_slots;
    char *room;
    digest_fn digest;
    uint64_t *digests;
    int64_t digest_stride;
} digesting;

void run_digesting(const digesting *it) {
    digest_blocks(it->pool, it->at, it->blocks, it->num_blocks, it->tail_slots, it->room, it->digest,
                  it->digests, it->digest_stride);
}

/* As above, of whole blocks, and all that is kept of each: `digests` and `known` are of all blocks of the
 * pool, so far apart as their strides say, in the order of heads and planes; `written` counts. */
void note_blocks(char *pool, const layout *at, const int64_t *blocks, int64_t num_blocks, char *room,
                 digest_fn digest, uint64_t *digests, int64_t digest_stride, uint8_t *known,
                 int64_t known_stride, uint32_t *written) {
    for (int64_t b = 0; b < num_blocks; b++) {
        uint64_t *found = digests + blocks[b] * digest_stride;
        digest_blocks(pool, at, blocks + b, 1, 0, room, digest, found, digest_stride);
        memset(known + blocks[b] * known_stride, 1, at->hi - at->lo);
        written[blocks[b]]++;
    }
}

/* Of the last block only so many slots have meaning: the rest of each cell becomes zero. */
static void clear_tail(const layout *at, char *cells, int64_t tail_slots, digest_fn digest,
                       uint64_t *digests) {
    const int64_t cell_bytes = at->num_slots * at->slot_bytes, kept = tail_slots * at->slot_bytes;
    for (int64_t i = 0; i < (at->hi - at->lo) * at->num_planes; i++, cells += cell_bytes) {
        memset(cells + kept, 0, cell_bytes - kept);
        if (digests) digests[i] = digest_of(cells, cell_bytes, digest);
    }
}

/* Send what `views` name, and move them on past what has left; none are `left` when all has. Returns how
 * many bytes that was: all, or those before the socket took none for `patience_ms`; or -errno. */
static int64_t send_all(int fd, struct iovec *views, int64_t *left, int patience_ms) {
    int64_t gone = 0;
    while (*left) {
        struct msghdr message = {.msg_iov = views, .msg_iovlen = *left < MOST_VIEWS ? *left : MOST_VIEWS};
        ssize_t now = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (now >= 0) {
            gone += now;
            for (; *left && (size_t)now >= views->iov_len; views++, --*left) now -= views->iov_len;
            if (*left) views->iov_base = (char *)views->iov_base + now, views->iov_len -= now;
            continue;
        }
        if (errno == EINTR) continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK) return -errno;
        struct pollfd ready = {.fd = fd, .events = POLLOUT};
        int found = poll(&ready, 1, patience_ms);
        if (found == 0) return gone;
        if (found < 0 && errno != EINTR) return -errno;
    }
    return gone;
}

/* Gather as above, layer by layer of alike ones that lie at `pools`, and send it all through the socket `fd`
 * behind a `head`, `piece_blocks` at a time, their digests before their cells: what is small enough to be in
 * a cache still when the kernel copies it costs half. `room` takes one piece. Returns how many bytes have
 * left: all, or those before the socket took none for `patience_ms`; or -errno. */
int64_t pour_cells(int fd, void *head, int64_t head_bytes, char *const *pools, int64_t num_layers,
                   const layout *at, const int64_t *blocks, int64_t num_blocks, int64_t tail_slots,
                   int64_t piece_blocks, char *room, int patience_ms, digest_fn digest,
                   uint64_t *digests) {
    const int64_t num_cells = (at->hi - at->lo) * at->num_planes;
    const int64_t block_bytes = num_cells * at->num_slots * at->slot_bytes;
    struct iovec views[2] = {{head, head_bytes}};
    int64_t gone = 0, num_views = 1;
    for (int64_t layer = 0; layer < num_layers; layer++)
        for (int64_t b = 0; b < num_blocks; b += piece_blocks) {
            const int64_t count = num_blocks - b < piece_blocks ? num_blocks - b : piece_blocks;
            const int64_t proof_bytes = count * num_cells * (int64_t)sizeof *digests;
            char *cells = room + proof_bytes;
            uint64_t *proofs = digests ? digests + (layer * num_blocks + b) * num_cells : NULL;
            gather_cells(pools[layer], at, blocks + b, count, cells, block_bytes, digest, proofs, num_cells);
            if (tail_slots && b + count == num_blocks)
                clear_tail(at, cells + (count - 1) * block_bytes, tail_slots, digest,
                           proofs ? proofs + (count - 1) * num_cells : NULL);
            if (proofs)
                memcpy(room, proofs, proof_bytes);
            else
                memset(room, 0, proof_bytes);
            views[num_views++] = (struct iovec){room, proof_bytes + count * block_bytes};
            int64_t now = send_all(fd, views, &num_views, patience_ms);
            if (now < 0) return now;
            gone += now;
            if (num_views) return gone;
        }
    return gone;
}

/* The views of a block's cells, as they are to follow each other: where they lie in one piece, no more
 * than one. Returns how many there are now. */
static int64_t view_block(char *pool, const layout *at, int64_t block, struct iovec *views,
                          int64_t num_views) {
    const int64_t cell_bytes = at->num_slots * at->slot_bytes;
    for (int64_t head = at->lo; head < at->hi; head++)
        for (int64_t plane = 0; plane < at->num_planes; plane++) {
            char *cell = cell_of(pool, at, block, head, plane);
            struct iovec *last = views + num_views - 1; /* at least the digests' */
            if ((char *)last->iov_base + last->iov_len == cell)
                last->iov_len += cell_bytes;
            else
                views[num_views++] = (struct iovec){cell, cell_bytes};
        }
    return num_views;
}

/* As `pour_cells`, where digests are known, and so is the `seal` that comes behind all: nothing is read but
 * by the kernel, which copies the cells from where they lie. Those of a layout whose cells are in pieces,
 * and of a tail, pass through `room`. `views` takes one for each cell of a piece, and four more. */
int64_t send_cells(int fd, void *head, int64_t head_bytes, char *const *pools, int64_t num_layers,
                   const layout *at, const int64_t *blocks, int64_t num_blocks, int64_t tail_slots,
                   int64_t piece_blocks, char *room, int patience_ms, struct iovec *views,
                   uint64_t *digests, uint64_t seal) {
    const int64_t num_cells = (at->hi - at->lo) * at->num_planes;
    const int64_t block_bytes = num_cells * at->num_slots * at->slot_bytes;
    const int dense = at->slot_stride == at->slot_bytes;
    int64_t gone = 0, num_views = 1;
    views[0] = (struct iovec){head, head_bytes};
    for (int64_t layer = 0; layer < num_layers; layer++)
        for (int64_t b = 0; b < num_blocks; b += piece_blocks) {
            const int64_t count = num_blocks - b < piece_blocks ? num_blocks - b : piece_blocks;
            const int last = b + count == num_blocks, tail = tail_slots && last;
            const int64_t whole = dense ? count - tail : 0;
            const size_t proof_bytes = count * num_cells * sizeof *digests;
            uint64_t *proofs = digests + (layer * num_blocks + b) * num_cells;
            views[num_views++] = (struct iovec){proofs, proof_bytes};
            for (int64_t i = 0; i < whole; i++)
                num_views = view_block(pools[layer], at, blocks[b + i], views, num_views);
            if (whole < count) {
                gather_cells(pools[layer], at, blocks + b + whole, count - whole, room, block_bytes, NULL,
                             NULL, 0);
                if (tail)
                    clear_tail(at, room + (count - whole - 1) * block_bytes, tail_slots, NULL, NULL);
                views[num_views++] = (struct iovec){room, (count - whole) * block_bytes};
            }
            if (last && layer + 1 == num_layers) views[num_views++] = (struct iovec){&seal, sizeof seal};
            int64_t now = send_all(fd, views, &num_views, patience_ms);
            if (now < 0) return now;
            gone += now;
            if (num_views) return gone;
        }
    return gone;
}

/* With digests, a cell is written only if it is what its digest says; `bad` is set for the others. */
static void scatter_cells(char *pool, const layout *at, const int64_t *blocks, int64_t num_blocks,
                          const char *cells, int64_t block_stride, digest_fn digest,
                          const uint64_t *digests, int64_t digest_stride, uint8_t *bad) {
    const int64_t cell_bytes = at->num_slots * at->slot_bytes;
    for (int64_t b = 0; b < num_blocks; b++) {
        const char *from = cells + b * block_stride;
        int64_t row = b * digest_stride;
        for (int64_t head = at->lo; head < at->hi; head++)
            for (int64_t plane = 0; plane < at->num_planes; plane++, row++) {
                if (digests && digest_of(from, cell_bytes, digest) != digests[row])
                    bad[row] = 1;
                else if (at->slot_stride == at->slot_bytes)
                    copy_past_caches(cell_of(pool, at, blocks[b], head, plane), from, cell_bytes);
                else
                    copy_slots(cell_of(pool, at, blocks[b], head, plane), at->slot_stride, from,
                               at->slot_bytes, at);
                from += cell_bytes;
            }
    }
    finish_copies();
}

typedef struct {
    char *pool;
    const layout *at;
    const int64_t *blocks;
    int64_t num_blocks;
    const char *cells;
    int64_t block_stride;
    digest_fn digest;
    const uint64_t *digests;
    int64_t digest_stride;
    uint8_t *bad;
} scattering;

void run_scattering(const scattering *it) {
    scatter_cells(it->pool, it->at, it->blocks, it->num_blocks, it->cells, it->block_stride, it->digest,
                  it->digests, it->digest_stride, it->bad);
}

enum { AT_ONCE = 128 << 10 };

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Until so much is there to be read, or a good part of it: who sends would else have to wake us for every
 * few kilobytes, which costs it more than it does us. As `poll`. */
static int wait_for(int fd, int64_t num_bytes, int timeout_ms) {
    int least = (int)(num_bytes < AT_ONCE ? num_bytes : AT_ONCE), one = 1;
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least);
    int found = poll(&ready, 1, timeout_ms), why = errno;
    setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &one, sizeof one);
    errno = why;
    return found;
}

/* The other way of `pour_cells`: read from the socket `fd` into `room`, a piece at a time, and scatter
 * each piece as above while it is in a cache still. With `led`, its digests come before its cells, and
 * a last number, `seal`, after all; else `digests` are here already, and only cells come. Without
 * `proved` nothing is compared.
 *
 * `taken` bytes were taken by calls before this one; of a piece that has not come whole they lie in
 * `room`. Returns how many are now: all, or those that came within `turn_ms`; or -errno, which is
 * -EPIPE when no more will come. */
int64_t catch_cells(int fd, char *const *pools, int64_t num_layers, const layout *at, const int64_t *blocks,
                    int64_t num_blocks, int64_t piece_blocks, char *room, int64_t taken, int turn_ms,
                    digest_fn digest, int led, int proved, uint64_t *digests, uint8_t *bad,
                    uint64_t *seal) {
    const int64_t num_cells = (at->hi - at->lo) * at->num_planes;
    const int64_t block_bytes = num_cells * at->num_slots * at->slot_bytes;
    const int64_t proof_bytes = led ? num_cells * (int64_t)sizeof *digests : 0;
    const int64_t width = proof_bytes + block_bytes;
    const int64_t piece_bytes = piece_blocks * width, layer_bytes = num_blocks * width;
    const int64_t all_cells = num_layers * layer_bytes;
    const int64_t all = all_cells + (led ? (int64_t)sizeof *seal : 0);
    const int64_t until = now_ms() + turn_ms;
    while (taken < all) {
        const int64_t layer = taken / layer_bytes, begun = layer * layer_bytes; /* behind the last: the seal */
        const int64_t from = begun + (taken - begun) / piece_bytes * piece_bytes;
        const int64_t end = layer < num_layers ? begun + layer_bytes : all;
        const int64_t to = from + piece_bytes < end ? from + piece_bytes : end;
        ssize_t now = recv(fd, room + (taken - from), to - taken, MSG_DONTWAIT);
        if (now == 0) return -EPIPE;
        if (now < 0 && errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK) return -errno;
        if (now > 0) taken += now;
        if (now > 0 && taken == to && layer < num_layers) {
            const int64_t first = (from - begun) / width, count = (to - from) / width;
            const int64_t row = (layer * num_blocks + first) * num_cells;
            memcpy(digests + row, room, count * proof_bytes);
            scatter_cells(pools[layer], at, blocks + first, count, room + count * proof_bytes, block_bytes,
                          digest, proved ? digests + row : NULL, num_cells, bad + row);
        } else if (now > 0 && taken == to) {
            memcpy(seal, room, sizeof *seal);
        }
        const int64_t left = until - now_ms();
        if (left <= 0) return taken;
        if (now < 0 && errno != EINTR) {
            int found = wait_for(fd, to - taken, (int)left);
            if (found == 0) return taken;
            if (found < 0 && errno != EINTR) return -errno;
        }
    }
    return taken;
}

typedef struct {
    char *from;
    const layout *theirs;
    const int64_t *from_blocks;
    char *to;
    const layout *ours;
    const int64_t *to_blocks;
    int64_t num_blocks, tail_slots;
    char *room;
    digest_fn digest;
    const uint64_t *digests;
    int64_t digest_stride;
    uint8_t *bad;
} moving;

/* From one pool into another, which may be of another layout. What is written is what was digested,
 * whatever becomes of the first pool meanwhile: each cell is copied into `room` once, on the way of
 * its digest, and goes on from there only if it is the one that `digests`, if given, say; `bad` is
 * set for the others. Of the last block `tail_slots` slots have meaning, 0: all. */
void run_moving(const moving *it) {
    const layout *theirs = it->theirs, *ours = it->ours;
    const int64_t cell_bytes = ours->num_slots * ours->slot_bytes;
    const uint64_t *digests = it->digests;
    char *room = it->room;
    layout one = *theirs;
    for (int64_t b = 0; b < it->num_blocks; b++) {
        const int tail = it->tail_slots && b + 1 == it->num_blocks;
        int64_t row = b * it->digest_stride;
        for (int64_t i = 0; i < ours->hi - ours->lo; i++)
            for (int64_t plane = 0; plane < ours->num_planes; plane++, row++) {
                const char *cell = cell_of(it->from, theirs, it->from_blocks[b], theirs->lo + i, plane);
                char *place = cell_of(it->to, ours, it->to_blocks[b], ours->lo + i, plane);
                uint64_t found = 0;
                if (!digests && !tail && theirs->slot_stride == theirs->slot_bytes) {
                    memcpy(room, cell, cell_bytes);
                } else if (!tail && theirs->slot_stride == theirs->slot_bytes) {
                    found = copy_and_digest(room, cell, cell_bytes, it->digest);
                } else {
                    one.num_slots = tail ? it->tail_slots : theirs->num_slots;
                    copy_slots(room, theirs->slot_bytes, cell, theirs->slot_stride, &one);
                    memset(room + one.num_slots * theirs->slot_bytes, 0,
                           cell_bytes - one.num_slots * theirs->slot_bytes);
                    found = digest_of(room, cell_bytes, it->digest);
                }
                if (digests && found != digests[row])
                    it->bad[row] = 1;
                else if (ours->slot_stride == ours->slot_bytes)
                    copy_past_caches(place, room, cell_bytes);
                else
                    copy_slots(place, ours->slot_stride, room, ours->slot_bytes, ours);
            }
    }
    finish_copies();
}

void digest_cells(digest_fn digest, const char *cells, int64_t num_cells, int64_t cell_bytes,
                  uint64_t *digests) {
    for (int64_t i = 0; i < num_cells; i++)
        digests[i] = digest_of(cells + i * cell_bytes, cell_bytes, digest);
}
