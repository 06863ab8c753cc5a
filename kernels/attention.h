/* Causal attention of some queries over the blocks of a paged pool. */
#ifndef KVFERRY_ATTENTION_H
#define KVFERRY_ATTENTION_H

#include <stdint.h>

#include "team.h"

typedef struct {
    const float *q; /* heads of a token side by side, tokens q_stride floats apart */
    float *out;     /* likewise */
    int64_t q_stride, out_stride;
    int64_t num_query_heads, num_kv_heads, head_dim;
    float scale;
    int64_t window, sinks; /* a query sees the newest `window` tokens (0: all) and the first `sinks` */
    const float *pool; /* strides in floats; a slot's head is one run of head_dim floats */
    int64_t block_stride, plane_stride, head_stride, slot_stride, num_slots;
    int64_t num_sequences; /* of each: */
    const int64_t *first_query, *num_queries, *first_out, *contexts;
    const int64_t *tables; /* rows of block ids, table_stride apart */
    int64_t table_stride;
    float *scratch; /* of attention_scratch floats */
} attention;

int64_t attention_scratch(const attention *, int team_size);

/* For every member to call; all have their results once the team has met again. */
void attend(const attention *, team *, int member);

#endif
