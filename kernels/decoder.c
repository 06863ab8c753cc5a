/* A step of a decoder of the Llama family, all of it but what ranks and callers do in between.
 *
 *   BEGIN    embed the tokens (where no other rank has a part in it), turn positions into angles
 *   PROJECT  norm, q, k and v
 *   WRITE    rotate; write K and V of the layer into the pool
 *   ATTEND   attention over the pool, and its output product
 *   FEED     norm, gate and up, down
 *   FINISH   norm and logits
 *
 * ATTEND and FEED leave their sum beside the residual stream (`sum`), where ranks may add up theirs;
 * whatever comes next adds it. Every member of the team runs the whole step, phase by phase.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "attention.h"
#include "dense.h"
#include "lanes.h"
#include "matrix.h"
#include "team.h"

enum { BEGIN = 1, WRITE = 2, ATTEND = 4, FEED = 8, FINISH = 16, PROJECT = 32 };

typedef struct {
    const float *attention_norm, *mlp_norm; /* [width] */
    const float *qk_norm;                   /* [heads of q and k, head_dim], or NULL */
    const float *o_bias, *down_bias;        /* [width], or NULL: added once all ranks have added up */
    const matrix *qkv, *o, *gate_up, *down;
    int64_t window; /* newest tokens that it sees, 0: all */
} layer;

typedef struct {
    int64_t width, middle, head_dim, num_query_heads, num_kv_heads, num_layers;
    float eps, scale;
    const float *frequencies; /* [head_dim / 2] */
    const layer *layers;
    const matrix *embedding, *lm_head;
    const float *final_norm;
} decoder;

typedef struct {
    int64_t num_rows;    /* now: fewer once only those are left whose logits are wanted */
    int64_t num_sequences;
    const int64_t *token_ids, *positions, *slots;
    attention about;     /* all but q, out and the pool */
    int64_t num_wanted;  /* rows whose logits are wanted */
    const int64_t *wanted;
    int64_t only_last;   /* the last layer's queries are the wanted rows alone: `about` says so */
    float *x, *sum, *h;  /* [rows, width] */
    float *qkv;          /* [rows, (q + 2 kv) heads, head_dim] */
    float *attended;     /* [rows, q heads, head_dim] */
    float *inner;        /* [rows, middle or twice as much] */
    float *angles;       /* [rows, cos and sin, head_dim / 2] */
    float *kept;         /* [wanted rows, width + q heads * head_dim] */
    float *logits;       /* [wanted rows, out of lm_head] */
    char *scratch;       /* see decoder_scratch */
    float *const *pools; /* of each layer */
    const float *bias;   /* to be added with `sum`, or NULL */
    int64_t pending;     /* whether `sum` is still to be added */
} step;

typedef struct {
    const decoder *of;
    step *at;
    int64_t layer, what, times; /* of layers that follow one another */
} job;

static void multiply(const matrix *by, const float *x, int64_t rows, float *out, int64_t gated,
                     char *scratch, team *t) {
    product p = {x, by->in, rows, out, gated ? by->out / 2 : by->out, scratch, gated,
                 team_size(t)};
    if (by->prepare) {
        for (int64_t row; (row = team_next(t)) < rows;) by->prepare(by, &p, row);
        team_meet(t);
    }
    int64_t items = by->num_items(by, rows);
    for (int64_t item; (item = team_next(t)) < items;) by->multiply(by, &p, item);
    team_meet(t);
}

/* Rows of a phase that does little with each: where there are many they are dealt some at a time, so
 * that a member can fetch the next one, half of which another member wrote, beside its own. */
typedef struct {
    int64_t next, end, at_once;
} rows_of;

static rows_of rows_begin(int64_t num_rows) {
    return (rows_of){0, 0, num_rows < 64 ? 1 : 8};
}

static int64_t rows_next(rows_of *rows, int64_t num_rows, team *t) {
    if (rows->next == rows->end) {
        rows->next = team_next(t) * rows->at_once;
        rows->end = rows->next + rows->at_once;
    }
    return rows->next < num_rows ? rows->next++ : num_rows;
}

static void fetch(const rows_of *rows, const float *table, int64_t width) {
    if (rows->next == rows->end) return;
    const char *from = (const char *)(table + rows->next * width);
    for (int64_t at = 0; at < width * (int64_t)sizeof(float); at += 64) __builtin_prefetch(from + at);
}

static float scale_of(const float *x, int64_t width, float eps) {
    vec squares = {};
    for (int64_t i = 0; i < width; i += LANES) {
        vec some = load_some(x + i, width - i);
        squares = fused(some, some, squares);
    }
    return 1.0f / sqrtf(sum_of(squares) / (float)width + eps);
}

static void normalise(const float *x, const float *weight, int64_t width, float eps, float *out) {
    float scale = scale_of(x, width, eps);
    for (int64_t i = 0; i < width; i += LANES) {
        vec value = load_some(x + i, width - i) * scale * load_some(weight + i, width - i);
        store_some(out + i, value, width - i);
    }
}

/* The residual stream takes what was computed beside it; its norm goes to h. */
static void add_and_norm(const job *j, const float *weight, team *t) {
    step *s = j->at;
    int64_t width = j->of->width;
    part_begins(NORM);
    rows_of rows = rows_begin(s->num_rows);
    for (int64_t row; (row = rows_next(&rows, s->num_rows, t)) < s->num_rows;) {
        fetch(&rows, s->x, width);
        fetch(&rows, s->sum, width);
        float *x = s->x + row * width;
        const float *sum = s->sum + row * width;
        if (s->pending)
            for (int64_t i = 0; i < width; i++) x[i] += sum[i];
        if (s->pending && s->bias)
            for (int64_t i = 0; i < width; i++) x[i] += s->bias[i];
        normalise(x, weight, width, j->of->eps, s->h + row * width);
    }
    team_meet(t);
}

static void begin_row(const job *j, int64_t row) {
    const decoder *of = j->of;
    step *s = j->at;
    int64_t half = of->head_dim / 2;
    if (of->embedding) of->embedding->row(of->embedding, s->token_ids[row], s->x + row * of->width);
    float *angles = s->angles + row * of->head_dim;
    for (int64_t f = 0; f < half; f++) {
        float angle = (float)s->positions[row] * of->frequencies[f];
        angles[f] = cosf(angle);
        angles[half + f] = sinf(angle);
    }
}

/* The halves of a head turned against each other. */
static void rotate(float *head, const float *angles, int64_t half) {
    for (int64_t f = 0; f < half; f += LANES) {
        int64_t left = half - f;
        vec first = load_some(head + f, left), second = load_some(head + half + f, left);
        vec cosine = load_some(angles + f, left), sine = load_some(angles + half + f, left);
        store_some(head + f, first * cosine - second * sine, left);
        store_some(head + half + f, second * cosine + first * sine, left);
    }
}

static void write_row(const job *j, int64_t row) {
    const decoder *of = j->of;
    step *s = j->at;
    int64_t dim = of->head_dim, kv = of->num_kv_heads, turned = of->num_query_heads + kv;
    const float *norm = of->layers[j->layer].qk_norm;
    float *qkv = s->qkv + row * (turned + kv) * dim;
    for (int64_t head = 0; head < turned; head++) {
        float *at = qkv + head * dim;
        if (norm) normalise(at, norm + head * dim, dim, of->eps, at);
        rotate(at, s->angles + row * dim, dim / 2);
    }
    const attention *pool = &s->about;
    int64_t slot = s->slots[row];
    float *to = s->pools[j->layer] + slot / pool->num_slots * pool->block_stride +
                slot % pool->num_slots * pool->slot_stride;
    for (int64_t head = 0; head < kv; head++, to += pool->head_stride) {
        memcpy(to, qkv + (of->num_query_heads + head) * dim, dim * sizeof(float));
        memcpy(to + pool->plane_stride, qkv + (turned + head) * dim, dim * sizeof(float));
    }
}

static void project(const job *j, team *t) {
    const layer *own = &j->of->layers[j->layer];
    step *s = j->at;
    add_and_norm(j, own->attention_norm, t);
    part_begins(QKV);
    multiply(own->qkv, s->h, s->num_rows, s->qkv, 0, s->scratch, t);
}

static void write(const job *j, team *t) {
    step *s = j->at;
    int64_t width = (j->of->num_query_heads + 2 * j->of->num_kv_heads) * j->of->head_dim;
    part_begins(WRITE_KV);
    rows_of rows = rows_begin(s->num_rows);
    for (int64_t row; (row = rows_next(&rows, s->num_rows, t)) < s->num_rows;) {
        fetch(&rows, s->qkv, width);
        write_row(j, row);
    }
    team_meet(t);
}

/* Nothing reads the other rows any more. */
static void keep_wanted(const job *j, team *t, int member) {
    step *s = j->at;
    int64_t width = j->of->width, heads = j->of->num_query_heads * j->of->head_dim;
    float *attended = s->kept + s->num_wanted * width;
    if (member == 0)
        for (int64_t r = 0; r < s->num_wanted; r++) {
            memcpy(s->kept + r * width, s->x + s->wanted[r] * width, width * sizeof(float));
            if (!s->only_last)
                memcpy(attended + r * heads, s->attended + s->wanted[r] * heads,
                       heads * sizeof(float));
        }
    team_meet(t);
    if (member == 0) {
        s->x = s->kept;
        if (!s->only_last) s->attended = attended;
        s->num_rows = s->num_wanted;
    }
    team_meet(t);
}

static void attend_and_project(const job *j, team *t, int member) {
    const decoder *of = j->of;
    const layer *own = &of->layers[j->layer];
    step *s = j->at;
    attention at = s->about;
    at.q = s->qkv;
    at.q_stride = own->qkv->out;
    at.out = s->attended;
    at.out_stride = of->num_query_heads * of->head_dim;
    at.num_query_heads = of->num_query_heads;
    at.num_kv_heads = of->num_kv_heads;
    at.head_dim = of->head_dim;
    at.scale = of->scale;
    at.window = own->window;
    at.pool = s->pools[j->layer];
    at.scratch = (float *)s->scratch;
    part_begins(ATTENTION);
    attend(&at, t, member);
    team_meet(t);
    part_begins(O);
    if (j->layer + 1 == of->num_layers) keep_wanted(j, t, member);
    multiply(own->o, s->attended, s->num_rows, s->sum, 0, s->scratch, t);
}

static void feed(const job *j, team *t) {
    const layer *own = &j->of->layers[j->layer];
    step *s = j->at;
    int64_t middle = j->of->middle, width = 2 * middle;
    add_and_norm(j, own->mlp_norm, t);
    part_begins(GATE_UP);
    multiply(own->gate_up, s->h, s->num_rows, s->inner, own->gate_up->paired, s->scratch, t);
    float *inner = s->inner;
    if (!own->gate_up->paired) { /* into the other half of the buffer, dense */
        inner += s->num_rows * width;
        for (int64_t row; (row = team_next(t)) < s->num_rows;) {
            const float *gate = s->inner + row * width, *up = gate + middle;
            for (int64_t i = 0; i < middle; i += LANES) {
                int64_t left = middle - i;
                vec value = silu(load_some(gate + i, left)) * load_some(up + i, left);
                store_some(inner + row * middle + i, value, left);
            }
        }
        team_meet(t);
    }
    part_begins(DOWN);
    multiply(own->down, inner, s->num_rows, s->sum, 0, s->scratch, t);
}

/* Said by one while the others wait: what the next phase is to add. */
static void leave(const job *j, team *t, int member, const float *bias, int64_t pending) {
    if (member == 0) {
        j->at->bias = bias;
        j->at->pending = pending;
    }
    team_meet(t);
}

static void run_layer(const job *j, team *t, int member) {
    const decoder *of = j->of;
    step *s = j->at;
    const layer *own = &of->layers[j->layer];
    if (j->what & BEGIN) {
        part_begins(EMBED);
        for (int64_t row; (row = team_next(t)) < s->num_rows;) begin_row(j, row);
        team_meet(t);
    }
    if (j->what & ATTEND) {
        attend_and_project(j, t, member);
        leave(j, t, member, own->o_bias, 1);
    }
    if (j->what & FEED) {
        feed(j, t);
        leave(j, t, member, own->down_bias, 1);
    }
    if (j->what & FINISH) {
        add_and_norm(j, of->final_norm, t);
        part_begins(HEAD);
        multiply(of->lm_head, s->h, s->num_rows, s->logits, 0, s->scratch, t);
    }
    job next = *j;
    next.layer += (j->what & FEED) != 0; /* the one after the layer that was just fed */
    if (j->what & PROJECT) {
        project(&next, t);
        leave(j, t, member, NULL, 0);
    }
    if (j->what & WRITE) write(&next, t);
}

static void run(team *t, int member, void *about) {
    job own = *(const job *)about;
    for (; own.times > 0; own.times--, own.layer++) run_layer(&own, t, member);
}

/* Parts of a layer; where that is a whole one, and the next one's beginning, of several. */
void decoder_run(team *t, const decoder *of, step *at, int64_t layer, int64_t what,
                 int64_t times) {
    job j = {of, at, layer, what, times};
    team_run(t, run, &j);
}

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t needed_by(const matrix *by, int64_t rows) {
    return by->scratch_bytes ? by->scratch_bytes(by, rows) : 0;
}

/* Bytes of scratch that a step of so many rows needs. */
int64_t decoder_scratch(const decoder *of, const step *at, int team_size) {
    attention about = at->about;
    about.num_query_heads = of->num_query_heads;
    about.num_kv_heads = of->num_kv_heads;
    about.head_dim = of->head_dim;
    int64_t bytes = attention_scratch(&about, team_size) * (int64_t)sizeof(float);
    const layer *own = of->layers;
    const matrix *all_of[] = {own->qkv, own->o, own->gate_up, own->down, of->lm_head};
    for (int i = 0; i < 5; i++) bytes = most(bytes, needed_by(all_of[i], at->num_rows));
    return bytes + 64;
}

typedef struct {
    const matrix *by;
    const float *x;
    int64_t rows, gated;
    float *out;
    char *scratch;
} plain_product;

static void run_product(team *t, int member, void *about) {
    const plain_product *p = about;
    (void)member;
    multiply(p->by, p->x, p->rows, p->out, p->gated, p->scratch, t);
}

int64_t decoder_product_scratch(const matrix *by, int64_t rows) { return needed_by(by, rows); }

/* One product by itself; `scratch` of scratch_bytes, or NULL for forms that want none. */
void decoder_multiply(team *t, const matrix *by, const float *x, int64_t rows, int64_t gated,
                      float *out, char *scratch) {
    plain_product p = {by, x, rows, gated, out, scratch};
    team_run(t, run_product, &p);
}

void decoder_rows(const matrix *of, const int64_t *numbers, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) of->row(of, numbers[i], out + i * of->in);
}

static void run_attention(team *t, int member, void *about) { attend(about, t, member); }

void decoder_attend(team *t, attention *at) { team_run(t, run_attention, at); }
