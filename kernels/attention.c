/* Attention straight over the pool's blocks, in fp32, one KV head of one sequence at a time.
 *
 * Scores are reduced in tiles of TILE tokens by position, and the context of a lone query in runs
 * of RUN tokens, put together in order at the end. So the block size, the pool's strides, where
 * blocks lie, and how many threads or other sequences there are change no bit of a result. What lies
 * past a context is never read, nor, in tiles of their own, what lies between the sinks and a window.
 *
 * A lone query (decode): head dim in the lanes; the query heads of the group share what is read.
 * Several (prefill): rows, that is queries and heads of the group, in the lanes, so that softmax
 * needs no sums across lanes, and both products are those of tile.h.
 */
#include "attention.h"

#include <stdlib.h>

#include "tile.h"

enum {
    TILE = 64,
    RUN = 256,
    QUERIES = 64,     /* of a unit of prefill, at most; they share the copy of a tile */
    MOST_GROUPED = 4, /* query heads that one pass over a run serves */
};
static const float LOG2_E = 1.44269504f;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t group_of(const attention *at) { return at->num_query_heads / at->num_kv_heads; }

/* The floats of one partial result: head_dim sums, their total weight, and the largest score. */
INLINE int64_t part_floats(const attention *at) {
    return ceil_of(at->head_dim, LANES) * LANES + LANES;
}

/* The oldest token that the window of a query at such a position reaches. */
INLINE int64_t oldest_in_window(const attention *at, int64_t position) {
    return at->window && position >= at->window ? position + 1 - at->window : 0;
}

/* Of pieces of `size` tokens, those between the sinks and a window, which nobody reads. */
typedef struct {
    int64_t from, count;
} blind;

INLINE blind blind_pieces(const attention *at, int64_t position, int64_t size) {
    int64_t from = ceil_of(at->sinks, size), to = oldest_in_window(at, position) / size;
    return (blind){from, to > from ? to - from : 0};
}

INLINE int64_t runs_of(const attention *at, int64_t sequence) {
    int64_t context = at->contexts[sequence];
    return ceil_of(context, RUN) - blind_pieces(at, context - 1, RUN).count;
}

static int64_t units_of(const attention *at, int64_t sequence) {
    int64_t queries = at->num_queries[sequence];
    int64_t each = queries == 1 ? runs_of(at, sequence) : ceil_of(queries, QUERIES);
    return each * at->num_kv_heads;
}

static int64_t most_rows(const attention *at) {
    return ceil_of(QUERIES * group_of(at), PANEL) * PANEL;
}

/* What a member needs for itself: tiles of K and V, scores, and the rows' queries, sums and state. */
static int64_t own_floats(const attention *at) {
    int64_t rows = most_rows(at);
    return 2 * TILE * at->head_dim + TILE * PANEL + 2 * rows * at->head_dim + 3 * rows + PANEL;
}

static int64_t all_units(const attention *at) {
    int64_t units = 0;
    for (int64_t s = 0; s < at->num_sequences; s++) units += units_of(at, s);
    return units;
}

int64_t attention_scratch(const attention *at, int team_size) {
    int64_t parts = all_units(at) * group_of(at) * part_floats(at);
    return parts + team_size * own_floats(at) + LANES;
}

/* ---- a lone query ---- */

/* LANES vectors summed up across, each into its lane. */
INLINE vec sums_across(vec *parts) {
#if defined(__AVX512F__)
    static const int32_t order[4][16] = {
        {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
        {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
        {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
        {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
    };
#pragma GCC unroll 4
    for (int level = 0; level < 4; level++) {
        ivec first = *(const ivec *)(const void *)order[level];
        ivec second = first + (1 << level);
#pragma GCC unroll 8
        for (int i = 0; i < 8 >> level; i++)
            parts[i] = __builtin_shuffle(parts[2 * i], parts[2 * i + 1], first) +
                       __builtin_shuffle(parts[2 * i], parts[2 * i + 1], second);
    }
    return parts[0];
#elif defined(__AVX2__)
    __m256 quads[2];
    for (int i = 0; i < 2; i++) {
        __m256 low = _mm256_hadd_ps((__m256)parts[4 * i], (__m256)parts[4 * i + 1]);
        __m256 high = _mm256_hadd_ps((__m256)parts[4 * i + 2], (__m256)parts[4 * i + 3]);
        quads[i] = _mm256_hadd_ps(low, high);
    }
    return (vec)(_mm256_permute2f128_ps(quads[0], quads[1], 0x20) +
                 _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
#else
    vec sums;
    for (int i = 0; i < LANES; i++) sums[i] = sum_of(parts[i]);
    return sums;
#endif
}

typedef struct {
    const float *keys[2][TILE]; /* of this tile and of the next, which is fetched meanwhile */
    int now;                    /* which of the two this tile is */
    int64_t to_value;           /* floats from a key to its value */
    _Alignas(64) float scores[MOST_GROUPED][TILE];
} reading;

/* Every `of`th line of a token's head, from the `first` on. */
INLINE void fetch(const float *head, const int vectors, int first, const int of) {
    const int line = (LINE + LANES - 1) / LANES;
    for (int v = first * line; v < vectors; v += of * line) __builtin_prefetch(head + v * LANES);
}

/* One tile of a run, for `heads` query heads whose scaled queries and parts lie `stride` apart. A
 * head has `vectors` vectors; only the last of them may be `tail` floats wide instead of LANES. */
INLINE void lone_tile(const int heads, const int vectors, const int64_t tail, const float *query,
                      float *part, int64_t stride, reading *tile, int64_t count) {
    float *total = part + vectors * LANES, *top = total + 1;
    const float **keys = tile->keys[tile->now], **later = tile->keys[!tile->now];
    for (int64_t first = 0; first < count; first += LANES)
        for (int h = 0; h < heads; h++) { /* each fetches its part: memory is never left waiting */
            vec sums[LANES];
#pragma GCC unroll 16
            for (int t = 0; t < LANES; t++) {
                const float *key = keys[least(first + t, count - 1)];
                fetch(later[first + t], vectors, h, heads);
                vec sum = {};
#pragma GCC unroll 16
                for (int v = 0; v < vectors; v++) {
                    vec some = v + 1 < vectors ? load(key + v * LANES)
                                               : load_some(key + v * LANES, tail);
                    sum = fused(load(query + h * stride + v * LANES), some, sum);
                }
                sums[t] = sum;
            }
            store(tile->scores[h] + first, sums_across(sums));
        }
    int64_t filled = ceil_of(count, LANES) * LANES;
    for (int h = 0; h < heads; h++) {
        float *scores = tile->scores[h], *state = part + h * stride;
        for (int64_t t = count; t < filled; t++) scores[t] = -INFINITY;
        vec highest = load(scores);
        for (int64_t t = LANES; t < filled; t += LANES) highest = larger(highest, load(scores + t));
        float old = top[h * stride], most = largest_of(highest);
        most = most > old ? most : old;
        float keep = power_of_2(all(old - most))[0];
        vec sum = {};
        for (int64_t t = 0; t < filled; t += LANES) {
            vec weight = power_of_2(load(scores + t) - most);
            store(scores + t, weight);
            sum += weight;
        }
        total[h * stride] = total[h * stride] * keep + sum_of(sum);
        top[h * stride] = most;
        if (keep != 1.0f)
            for (int v = 0; v < vectors; v++) store(state + v * LANES, load(state + v * LANES) * keep);
    }
    vec sums[256 / LANES]; /* of the head dims of all heads of one pass */
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < vectors; v++) sums[h * vectors + v] = load(part + h * stride + v * LANES);
    for (int64_t t = 0; t < count; t++) {
        const float *value = keys[t] + tile->to_value;
        fetch(later[t] + tile->to_value, vectors, 0, 1);
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) {
            vec some = v + 1 < vectors ? load(value + v * LANES) : load_some(value + v * LANES, tail);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++)
                sums[h * vectors + v] = fused(all(tile->scores[h][t]), some, sums[h * vectors + v]);
        }
    }
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < vectors; v++) store(part + h * stride + v * LANES, sums[h * vectors + v]);
}

static void lone_heads(int heads, int vectors, int64_t tail, const float *query, float *part,
                       int64_t stride, reading *tile, int64_t count) {
#define CASE(n, w, t)                                                                           \
    if (heads == n && vectors == w && (t == LANES) == (tail == LANES)) {                        \
        lone_tile(n, w, t, query, part, stride, tile, count);                                   \
        return;                                                                                 \
    }
    CASE(1, 64 / LANES, LANES)
    CASE(2, 64 / LANES, LANES)
    CASE(3, 64 / LANES, LANES)
    CASE(4, 64 / LANES, LANES)
    CASE(1, 128 / LANES, LANES)
    CASE(2, 128 / LANES, LANES)
#undef CASE
    for (int h = 0; h < heads; h++)
        lone_tile(1, vectors, tail, query + h * stride, part + h * stride, stride, tile, count);
}

/* Of a tile; the last one again for what there is not. By blocks: a division for every token took a
 * third of the time of a tile that is in the cache. */
static void find_keys(const attention *at, int64_t sequence, int64_t head, int64_t token,
                      int64_t end, const float **keys) {
    int64_t count = least(TILE, end - token), slot = token % at->num_slots;
    const int64_t *table = at->tables + sequence * at->table_stride + token / at->num_slots;
    for (int64_t t = 0; t < count; slot = 0, table++) {
        const float *key = at->pool + *table * at->block_stride + head * at->head_stride +
                           slot * at->slot_stride;
        for (int64_t stop = least(count, t + at->num_slots - slot); t < stop; t++) {
            keys[t] = key;
            key += at->slot_stride;
        }
    }
    for (int64_t t = count; t < TILE; t++) keys[t] = keys[count - 1];
}

/* From `token` on and before `end`, the first token that a lone query sees; those after it in its
 * tile that it sees as well, itself included, are *count. */
static int64_t next_seen(const attention *at, int64_t oldest, int64_t token, int64_t end,
                         int64_t *count) {
    if (token >= at->sinks && token < oldest) token = oldest;
    int64_t stop = least(end, (token / TILE + 1) * TILE);
    if (token < at->sinks && at->sinks < oldest) stop = least(stop, at->sinks);
    *count = stop > token ? stop - token : 0;
    return token;
}

static void lone_unit(const attention *at, int64_t sequence, int64_t head, int64_t run,
                      float *parts) {
    int64_t dim = at->head_dim, vectors = ceil_of(dim, LANES), stride = part_floats(at);
    int64_t tail = dim - (vectors - 1) * LANES;
    int64_t context = at->contexts[sequence], group = group_of(at);
    int64_t oldest = oldest_in_window(at, context - 1);
    blind between = blind_pieces(at, context - 1, RUN);
    if (run >= between.from) run += between.count;
    int64_t end = least(context, (run + 1) * RUN);
    const float *q = at->q + at->first_query[sequence] * at->q_stride + head * group * dim;
    _Alignas(64) float query[MOST_GROUPED * (256 + LANES)];
    int64_t at_once = vectors == 64 / LANES ? MOST_GROUPED : vectors == 128 / LANES ? 2 : 1;
    for (int64_t first = 0; first < group; first += at_once) {
        int heads = least(at_once, group - first);
        float *part = parts + first * stride;
        for (int h = 0; h < heads; h++) {
            memset(part + h * stride, 0, stride * sizeof(float));
            memset(query + h * stride, 0, stride * sizeof(float));
            part[h * stride + vectors * LANES + 1] = -INFINITY;
            for (int64_t d = 0; d < dim; d++)
                query[h * stride + d] = q[(first + h) * dim + d] * (at->scale * LOG2_E);
        }
        reading tile = {.now = 0, .to_value = at->plane_stride};
        int64_t count, token = next_seen(at, oldest, run * RUN, end, &count);
        find_keys(at, sequence, head, token, token + count, tile.keys[0]);
        while (count) {
            int64_t more, next = next_seen(at, oldest, token + count, end, &more);
            if (more) /* else those of this one again, which cost nothing to fetch */
                find_keys(at, sequence, head, next, next + more, tile.keys[!tile.now]);
            else
                memcpy(tile.keys[!tile.now], tile.keys[tile.now], sizeof tile.keys[0]);
            lone_heads(heads, vectors, tail, query, part, stride, &tile, count);
            tile.now = !tile.now;
            token = next, count = more;
        }
    }
}

/* Put the runs of one query head together, in order. */
static void join_runs(const attention *at, int64_t sequence, int64_t query_head, const float *parts) {
    int64_t dim = at->head_dim, vectors = ceil_of(dim, LANES), stride = part_floats(at);
    int64_t group = group_of(at), runs = runs_of(at, sequence);
    const float *first = parts + (query_head / group * runs * group + query_head % group) * stride;
    float top = -INFINITY, total = 0.0f;
    _Alignas(64) float sums[256 + LANES] = {0};
    for (int64_t run = 0; run < runs; run++) {
        const float *part = first + run * group * stride;
        float own = part[vectors * LANES + 1], most = own > top ? own : top;
        float keep = power_of_2(all(top - most))[0], take = power_of_2(all(own - most))[0];
        for (int64_t v = 0; v < vectors; v++)
            store(sums + v * LANES,
                  load(sums + v * LANES) * keep + load(part + v * LANES) * take);
        total = total * keep + part[vectors * LANES] * take;
        top = most;
    }
    float *out = at->out + at->first_out[sequence] * at->out_stride + query_head * dim;
    for (int64_t d = 0; d < dim; d++) out[d] = sums[d] / total;
}

/* ---- several queries ---- */

typedef struct {
    float *keys, *values; /* [TILE, head_dim] */
    float *scores;        /* [TILE, PANEL] */
    float *queries, *sums; /* [panels, head_dim, PANEL] */
    float *top, *total, *position; /* [panels, PANEL] */
} own_scratch;

static own_scratch scratch_of(const attention *at, float *from) {
    int64_t rows = most_rows(at), dim = at->head_dim;
    own_scratch own;
    own.keys = from;
    own.values = own.keys + TILE * dim;
    own.scores = own.values + TILE * dim;
    own.queries = own.scores + TILE * PANEL;
    own.sums = own.queries + rows * dim;
    own.top = own.sums + rows * dim;
    own.total = own.top + rows;
    own.position = own.total + rows;
    return own;
}

static const fetching NOTHING = {0};

/* Scores of `rows` tokens, whose keys are dense, for a panel of queries; `highest` of either half
 * becomes the largest so far. */
INLINE void score_rows(const int rows, const float *keys, int64_t dim, const float *queries,
                       float *scores, vec highest[2]) {
    vec low[ROWS], high[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) low[r] = high[r] = (vec){};
    tile(rows, 0, keys, dim, 1, queries, dim, NOTHING, low, high);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        store(scores + r * PANEL, low[r]);
        store(scores + r * PANEL + LANES, high[r]);
        highest[0] = larger(highest[0], low[r]);
        highest[1] = larger(highest[1], high[r]);
    }
}

static void score_panel(const float *keys, int64_t dim, int64_t count, const float *queries,
                        float *scores, vec highest[2]) {
    int64_t at_once = rows_at_once(count);
    for (int64_t t = 0; t < count; t += at_once) {
#define CASE(n)                                                                                 \
    case n:                                                                                     \
        score_rows(n, keys + t * dim, dim, queries, scores + t * PANEL, highest);               \
        break;
        FOR_ROWS(least(at_once, count - t), CASE)
#undef CASE
    }
}

/* sums[rows][PANEL] of so many head dims: kept in part, and the weighted values of a tile added. */
INLINE void add_rows(const int rows, const float *values, int64_t dim, int64_t count,
                     const float *weights, const vec keep[2], float *sums) {
    vec low[ROWS], high[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        low[r] = load(sums + r * PANEL) * keep[0];
        high[r] = load(sums + r * PANEL + LANES) * keep[1];
    }
    tile(rows, 0, values, 1, dim, weights, count, NOTHING, low, high);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        store(sums + r * PANEL, low[r]);
        store(sums + r * PANEL + LANES, high[r]);
    }
}

static void add_values(const float *values, int64_t dim, int64_t count, const float *weights,
                       const vec keep[2], float *sums) {
    int64_t at_once = rows_at_once(dim);
    for (int64_t d = 0; d < dim; d += at_once) {
#define CASE(n)                                                                                 \
    case n:                                                                                     \
        add_rows(n, values + d, dim, count, weights, keep, sums + d * PANEL);                   \
        break;
        FOR_ROWS(least(at_once, dim - d), CASE)
#undef CASE
    }
}

/* Scores that rows of half a panel do not see become -infinity; returns the largest of the others. */
static vec hide(const attention *at, float *scores, int64_t token, int64_t count,
                const float *position, vec highest) {
    vec rank = load(position);
    for (int64_t t = 0; t < count; t++) {
        float far = at->window && token + t >= at->sinks ? (float)at->window : INFINITY;
        float own = (float)(token + t);
        ivec unseen = (rank < own) | (rank - far >= own);
        vec score = chosen(unseen, all(-INFINITY), load(scores + t * PANEL));
        store(scores + t * PANEL, score);
        highest = larger(highest, score);
    }
    return highest;
}

/* Scores of half a panel become weights; returns what is left of the rows' sums so far. */
static vec weigh(float *scores, int64_t count, vec most, float *top, float *total) {
    vec level = chosen(most == -INFINITY, (vec){}, most); /* of rows that saw nothing yet */
    vec keep = power_of_2(load(top) - level), sum = {};
    for (int64_t t = 0; t < count; t++) {
        vec weight = power_of_2(load(scores + t * PANEL) - level);
        store(scores + t * PANEL, weight);
        sum += weight;
    }
    store(total, load(total) * keep + sum);
    store(top, most);
    return keep;
}

static void several_panel(const attention *at, const own_scratch *own, int64_t panel,
                          int64_t token, int64_t count) {
    const float *position = own->position + panel * PANEL;
    int64_t dim = at->head_dim, from = (int64_t)position[0], to = (int64_t)position[PANEL - 1];
    count = least(count, to + 1 - token);
    if (count <= 0) return; /* all of its rows come before the tile */
    if (token >= at->sinks && token + count <= oldest_in_window(at, from)) return; /* or long after */
    float *sums = own->sums + panel * PANEL * dim, *top = own->top + panel * PANEL;
    vec highest[2] = {load(top), load(top + LANES)}, keep[2];
    int masked = token + count > from + 1 || token < oldest_in_window(at, to);
    vec before[2] = {highest[0], highest[1]};
    score_panel(own->keys, dim, count, own->queries + panel * PANEL * dim, own->scores, highest);
    for (int h = 0; h < 2; h++) {
        float *scores = own->scores + h * LANES, *total = own->total + panel * PANEL + h * LANES;
        if (masked) highest[h] = hide(at, scores, token, count, position + h * LANES, before[h]);
        keep[h] = weigh(scores, count, highest[h], top + h * LANES, total);
    }
    add_values(own->values, dim, count, own->scores, keep, sums);
}

/* Where a head of the row's query begins, of queries or outputs `stride` floats apart; rows past
 * the last one are that again. */
INLINE int64_t head_at(int64_t row, int64_t rows, int64_t first, int64_t head, int64_t group,
                       int64_t dim, int64_t stride) {
    row = least(row, rows - 1);
    return (first + row / group) * stride + (head * group + row % group) * dim;
}

/* Queries `first` to `end` of a sequence, in the panels of this member's scratch. */
static void lay_out_queries(const attention *at, int64_t sequence, int64_t head, int64_t first,
                            int64_t end, const own_scratch *own) {
    int64_t dim = at->head_dim, group = group_of(at), rows = (end - first) * group;
    int64_t before = at->contexts[sequence] - at->num_queries[sequence];
    int64_t begin = at->first_query[sequence] + first;
    for (int64_t row = 0; row < ceil_of(rows, PANEL) * PANEL; row += LANES) {
        const float *q[LANES];
        for (int r = 0; r < LANES; r++) {
            q[r] = at->q + head_at(row + r, rows, begin, head, group, dim, at->q_stride);
            own->position[row + r] = (float)(before + first + least(row + r, rows - 1) / group);
            own->top[row + r] = -INFINITY;
            own->total[row + r] = 0.0f;
        }
        float *to = own->queries + row / PANEL * PANEL * dim + row % PANEL;
        for (int64_t d = 0; d < dim; d += LANES) {
            vec some[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++)
                some[r] = load_some(q[r] + d, dim - d) * (at->scale * LOG2_E);
            transpose(some);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                if (d + i < dim) store(to + (d + i) * PANEL, some[i]);
        }
    }
    memset(own->sums, 0, ceil_of(rows, PANEL) * PANEL * dim * sizeof(float));
}

/* The rows' sums, each over its total weight, to where the outputs are wanted. */
static void put_outputs(const attention *at, int64_t sequence, int64_t head, int64_t first,
                        int64_t rows, const own_scratch *own) {
    int64_t dim = at->head_dim, group = group_of(at), begin = at->first_out[sequence] + first;
    for (int64_t row = 0; row < rows; row += LANES) {
        const float *sums = own->sums + row / PANEL * PANEL * dim + row % PANEL;
        vec total = load(own->total + row);
        for (int64_t d = 0; d < dim; d += LANES) {
            vec some[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                some[i] = d + i < dim ? load(sums + (d + i) * PANEL) / total : (vec){};
            transpose(some);
            for (int r = 0; r < LANES && row + r < rows; r++) {
                float *out = at->out + head_at(row + r, rows, begin, head, group, dim, at->out_stride);
                store_some(out + d, some[r], dim - d);
            }
        }
    }
}

static void several_unit(const attention *at, int64_t sequence, int64_t head, int64_t part,
                         float *scratch) {
    own_scratch own = scratch_of(at, scratch);
    int64_t dim = at->head_dim, group = group_of(at), first = part * QUERIES;
    int64_t end = least(first + QUERIES, at->num_queries[sequence]), rows = (end - first) * group;
    lay_out_queries(at, sequence, head, first, end, &own);
    int64_t seen = at->contexts[sequence] - at->num_queries[sequence] + end;
    blind between = blind_pieces(at, seen - (end - first), TILE);
    for (int64_t token = 0; token < seen; token += TILE) {
        if (token == between.from * TILE) token += between.count * TILE;
        int64_t count = least(TILE, seen - token);
        const float *keys[TILE];
        find_keys(at, sequence, head, token, seen, keys);
        for (int64_t t = 0; t < count; t++) {
            memcpy(own.keys + t * dim, keys[t], dim * sizeof(float));
            memcpy(own.values + t * dim, keys[t] + at->plane_stride, dim * sizeof(float));
        }
        for (int64_t panel = 0; panel < ceil_of(rows, PANEL); panel++)
            several_panel(at, &own, panel, token, count);
    }
    put_outputs(at, sequence, head, first, rows, &own);
}

void attend(const attention *at, team *t, int member) {
    float *parts = (float *)(((uintptr_t)at->scratch + 63) & ~(uintptr_t)63);
    int64_t part_size = group_of(at) * part_floats(at), units = all_units(at);
    float *own = parts + units * part_size + member * own_floats(at);
    int64_t sequence = 0, begun = 0;
    for (int64_t unit; (unit = team_next(t)) < units;) {
        while (unit >= begun + units_of(at, sequence)) begun += units_of(at, sequence++);
        int64_t each = units_of(at, sequence) / at->num_kv_heads, rest = unit - begun;
        if (at->num_queries[sequence] == 1)
            lone_unit(at, sequence, rest / each, rest % each, parts + unit * part_size);
        else /* the longest first */
            several_unit(at, sequence, rest / each, each - 1 - rest % each, own);
    }
    team_meet(t);
    int64_t heads = at->num_query_heads;
    sequence = begun = 0;
    for (int64_t item, passed = 0; (item = team_next(t)) < at->num_sequences * heads;) {
        for (; passed < item / heads; passed++) begun += units_of(at, passed);
        if (at->num_queries[passed] == 1)
            join_runs(at, passed, item % heads, parts + begun * part_size);
    }
}
