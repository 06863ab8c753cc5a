/* Which lives hold which block, in about 40 bytes an entry: see compact_table.py.
 *
 * A record is a block's name and the set of those who hold it. Sets are interned: blocks with the
 * same holders, as those of one prefix mostly are, share one set, so that walking a prefix compares
 * numbers and looks into a set only where it changes. A seat is a life and the tier it holds the
 * block in. Records are found through a hash table in many small parts, each of which grows alone:
 * no single insertion waits for a large copy.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    NAME = 16,
    EVENT = 21, /* kind, depth as u32 LE, name */
    PART_BITS = 12,
    CHUNK_BITS = 15,
    CHUNK = 1 << CHUNK_BITS,
    FIRST_SLOTS = 8,
    AHEAD = 16, /* names looked at before they are needed: their memory is on its way meanwhile */
    REMOVED = '-',
    IN_HOST = 'h'
};

typedef struct {
    uint64_t name[2];
    uint32_t set;   /* 0: a free record */
    uint32_t depth; /* blocks before this one; of a free record, the next free one */
} record;

typedef struct { /* open addressing, linear probing, 0 is empty */
    uint32_t *slots, capacity, used;
} numbers;

typedef struct {
    uint32_t refs, hash, length, seats[]; /* ascending */
} holders;

typedef struct {
    numbers records;
    uint32_t swept; /* slots of `records` already looked at, once retired */
    uint8_t taken, retired;
} life;

typedef struct {
    numbers parts[1 << PART_BITS];
    record **chunks;
    uint32_t num_chunks, num_records, free_record; /* records ever handed out; 0 is none */
    holders **sets;
    uint32_t num_sets, set_room, free_set;
    numbers interned;
    life *lives;
    uint32_t num_lives, life_room;
    uint32_t *retired, num_retired;
    uint32_t *still, *kept; /* room for the lives of one walk */
    uint64_t num_blocks, bytes;
} table;

static void *sized(table *t, void *old, size_t before, size_t after) {
    void *made = realloc(old, after);
    if (!made) {
        fputs("kvferry: no memory for the prefix index\n", stderr);
        abort();
    }
    t->bytes += after - before;
    return made;
}

static void give_back(table *t, void *old, size_t bytes) {
    free(old);
    t->bytes -= bytes;
}

/* ---- sets of numbers ---- */

static uint32_t spread(uint32_t number) {
    uint32_t h = number * 2654435769u;
    return h ^ (h >> 15);
}

/* Where `number`, which hashes to `at`, is or would be; both kinds of table hash what they hold. */
typedef uint32_t (*hash_of)(const table *, uint32_t);

static void place(const table *t, numbers *in, uint32_t number, hash_of hash) {
    uint32_t mask = in->capacity - 1, at = hash(t, number) & mask;
    while (in->slots[at]) at = (at + 1) & mask;
    in->slots[at] = number;
}

static void make_room(table *t, numbers *in, hash_of hash) {
    if (in->capacity && 5 * (uint64_t)(in->used + 1) <= 4 * (uint64_t)in->capacity) return;
    uint32_t before = in->capacity, after = before ? 2 * before : FIRST_SLOTS;
    uint32_t *old = in->slots;
    in->slots = sized(t, NULL, 0, after * sizeof *old);
    memset(in->slots, 0, after * sizeof *old);
    in->capacity = after;
    for (uint32_t i = 0; i < before; i++)
        if (old[i]) place(t, in, old[i], hash);
    give_back(t, old, before * sizeof *old);
}

/* Take out what lies at `at`; whatever was pushed past it moves back, so nothing needs a mark. */
static void take_out(const table *t, numbers *in, uint32_t at, hash_of hash) {
    uint32_t mask = in->capacity - 1, gap = at;
    for (uint32_t next = (at + 1) & mask; in->slots[next]; next = (next + 1) & mask) {
        uint32_t home = hash(t, in->slots[next]) & mask;
        if (((next - home) & mask) >= ((next - gap) & mask)) {
            in->slots[gap] = in->slots[next];
            gap = next;
        }
    }
    in->slots[gap] = 0;
    in->used--;
}

static void forget_all(table *t, numbers *in) {
    give_back(t, in->slots, in->capacity * sizeof *in->slots);
    memset(in, 0, sizeof *in);
}

static uint32_t number_hash(const table *t, uint32_t number) {
    (void)t;
    return spread(number);
}

static int has(const numbers *in, uint32_t number) {
    if (!in->capacity) return 0;
    uint32_t mask = in->capacity - 1;
    for (uint32_t at = spread(number) & mask; in->slots[at]; at = (at + 1) & mask)
        if (in->slots[at] == number) return 1;
    return 0;
}

static void put(table *t, numbers *in, uint32_t number) {
    make_room(t, in, number_hash);
    place(t, in, number, number_hash);
    in->used++;
}

static void drop(table *t, numbers *in, uint32_t number) {
    uint32_t mask = in->capacity - 1, at = spread(number) & mask;
    while (in->slots[at] != number) at = (at + 1) & mask;
    take_out(t, in, at, number_hash);
}

/* ---- records ---- */

static record *record_at(const table *t, uint32_t number) {
    return &t->chunks[number >> CHUNK_BITS][number & (CHUNK - 1)];
}

static uint64_t name_hash(const uint64_t name[2]) {
    uint64_t h = (name[0] ^ name[1] * 0x9e3779b97f4a7c15u) * 0xd6e8feb86659fd93u;
    return h ^ (h >> 32);
}

static uint32_t record_hash(const table *t, uint32_t number) {
    return (uint32_t)name_hash(record_at(t, number)->name);
}

static numbers *part_of(table *t, uint64_t hash) { return &t->parts[hash >> (64 - PART_BITS)]; }

/* The number of the record of this name, or 0; `at` becomes its slot in its part. */
static uint32_t find(table *t, const uint64_t name[2], uint64_t hash, uint32_t *at) {
    const numbers *part = part_of(t, hash);
    if (!part->capacity) return 0;
    uint32_t mask = part->capacity - 1;
    for (*at = (uint32_t)hash & mask; part->slots[*at]; *at = (*at + 1) & mask) {
        const record *found = record_at(t, part->slots[*at]);
        if (found->name[0] == name[0] && found->name[1] == name[1]) return part->slots[*at];
    }
    return 0;
}

static uint32_t add_record(table *t, const uint64_t name[2], uint64_t hash) {
    uint32_t number = t->free_record;
    if (number) {
        t->free_record = record_at(t, number)->depth;
    } else {
        number = ++t->num_records;
        if (number >> CHUNK_BITS >= t->num_chunks) {
            size_t was = t->num_chunks * sizeof *t->chunks;
            t->chunks = sized(t, t->chunks, was, was + sizeof *t->chunks);
            t->chunks[t->num_chunks++] = sized(t, NULL, 0, CHUNK * sizeof(record));
        }
    }
    record *made = record_at(t, number);
    made->name[0] = name[0], made->name[1] = name[1], made->set = made->depth = 0;
    numbers *part = part_of(t, hash);
    make_room(t, part, record_hash);
    place(t, part, number, record_hash);
    part->used++;
    t->num_blocks++;
    return number;
}

static void free_record(table *t, uint32_t number) {
    record *gone = record_at(t, number);
    uint64_t hash = name_hash(gone->name);
    uint32_t at = 0;
    find(t, gone->name, hash, &at);
    take_out(t, part_of(t, hash), at, record_hash);
    gone->set = 0;
    gone->depth = t->free_record;
    t->free_record = number;
    t->num_blocks--;
}

/* ---- sets of holders ---- */

static uint32_t seats_hash(const uint32_t *seats, uint32_t length) {
    uint32_t h = length;
    for (uint32_t i = 0; i < length; i++) h = (h ^ seats[i]) * 0x01000193u + (h >> 13);
    return spread(h);
}

static uint32_t set_hash(const table *t, uint32_t number) { return t->sets[number]->hash; }

static size_t set_bytes(uint32_t length) { return sizeof(holders) + length * sizeof(uint32_t); }

/* The number of the set of these seats, with one reference more; 0 for no seats. */
static uint32_t intern(table *t, const uint32_t *seats, uint32_t length) {
    if (!length) return 0;
    uint32_t hash = seats_hash(seats, length);
    if (t->interned.capacity) {
        uint32_t mask = t->interned.capacity - 1;
        for (uint32_t at = hash & mask; t->interned.slots[at]; at = (at + 1) & mask) {
            holders *known = t->sets[t->interned.slots[at]];
            if (known->hash == hash && known->length == length &&
                !memcmp(known->seats, seats, length * sizeof *seats)) {
                known->refs++;
                return t->interned.slots[at];
            }
        }
    }
    uint32_t number = t->free_set;
    if (number) {
        t->free_set = (uint32_t)(uintptr_t)t->sets[number];
    } else {
        number = ++t->num_sets;
        if (number >= t->set_room) {
            uint32_t room = t->set_room ? 2 * t->set_room : 64;
            t->sets = sized(t, t->sets, t->set_room * sizeof *t->sets, room * sizeof *t->sets);
            t->set_room = room;
        }
    }
    holders *made = t->sets[number] = sized(t, NULL, 0, set_bytes(length));
    made->refs = 1, made->hash = hash, made->length = length;
    memcpy(made->seats, seats, length * sizeof *seats);
    make_room(t, &t->interned, set_hash);
    place(t, &t->interned, number, set_hash);
    t->interned.used++;
    return number;
}

static void release_set(table *t, uint32_t number) {
    if (!number) return;
    holders *set = t->sets[number];
    if (--set->refs) return;
    uint32_t mask = t->interned.capacity - 1, at = set->hash & mask;
    while (t->interned.slots[at] != number) at = (at + 1) & mask;
    take_out(t, &t->interned, at, set_hash);
    give_back(t, set, set_bytes(set->length));
    t->sets[number] = (holders *)(uintptr_t)t->free_set;
    t->free_set = number;
}

static uint32_t seat_of(uint32_t life, int in_host) { return life << 1 | (in_host != 0); }

/* The set `from` with its seats of `life` replaced by `seat`, or by none; takes a reference. */
static uint32_t with_seat(table *t, uint32_t from, uint32_t life, int64_t seat) {
    uint32_t length = from ? t->sets[from]->length : 0, n = 0;
    uint32_t room[64], *seats = length < 63 ? room : malloc((length + 1) * sizeof *seats);
    if (!seats) abort();
    int done = seat < 0;
    for (uint32_t i = 0; i < length; i++) {
        uint32_t each = t->sets[from]->seats[i];
        if (!done && (uint32_t)seat < each) seats[n++] = (uint32_t)seat, done = 1;
        if (each >> 1 != life) seats[n++] = each;
    }
    if (!done) seats[n++] = (uint32_t)seat;
    uint32_t made = intern(t, seats, n);
    if (seats != room) free(seats);
    return made;
}

typedef struct { /* the last change of a set: neighbours in a prefix mostly change alike */
    uint32_t from, to; /* referred to from here, so that their numbers go on meaning the same */
    int64_t seat;
    int known;
} change;

static uint32_t share(table *t, uint32_t set) {
    if (set) t->sets[set]->refs++;
    return set;
}

static void forget(table *t, change *last) {
    if (last->known) release_set(t, last->from), release_set(t, last->to);
    last->known = 0;
}

static void change_set(table *t, record *of, uint32_t life, int64_t seat, change *last) {
    uint32_t from = of->set;
    if (!last->known || last->from != from || last->seat != seat) {
        uint32_t to = with_seat(t, from, life, seat);
        forget(t, last);
        *last = (change){share(t, from), to, seat, 1};
    }
    of->set = share(t, last->to);
    release_set(t, from);
}

/* ---- what Python calls ---- */

table *table_new(void) {
    table *t = calloc(1, sizeof *t);
    if (t) t->bytes = sizeof *t;
    return t;
}

void table_free(table *t) {
    for (uint32_t i = 0; i < 1 << PART_BITS; i++) free(t->parts[i].slots);
    for (uint32_t i = 0; i < t->num_chunks; i++) free(t->chunks[i]);
    for (uint32_t i = 0; i < t->interned.capacity; i++)
        if (t->interned.slots[i]) free(t->sets[t->interned.slots[i]]);
    for (uint32_t i = 0; i < t->num_lives; i++) free(t->lives[i].records.slots);
    free(t->chunks), free(t->sets), free(t->interned.slots), free(t->lives);
    free(t->retired), free(t->still), free(t->kept);
    free(t);
}

uint64_t table_num_blocks(const table *t) { return t->num_blocks; }
uint64_t table_bytes(const table *t) { return t->bytes; }
uint64_t table_held(const table *t, uint32_t life) { return t->lives[life].records.used; }

/* A number for a new life that holds nothing. */
uint32_t table_begin(table *t) {
    uint32_t number = 0;
    while (number < t->num_lives && t->lives[number].taken) number++;
    if (number == t->num_lives) {
        if (number == t->life_room) {
            uint32_t was = t->life_room, room = was ? 2 * was : 16;
            t->lives = sized(t, t->lives, was * sizeof *t->lives, room * sizeof *t->lives);
            t->retired = sized(t, t->retired, was * sizeof(uint32_t), room * sizeof(uint32_t));
            t->still = sized(t, t->still, was * sizeof(uint32_t), room * sizeof(uint32_t));
            t->kept = sized(t, t->kept, was * sizeof(uint32_t), room * sizeof(uint32_t));
            t->life_room = room;
        }
        t->num_lives++;
    }
    t->lives[number] = (life){.taken = 1};
    return number;
}

void table_retire(table *t, uint32_t number) {
    t->lives[number].retired = 1;
    t->retired[t->num_retired++] = number;
}

static void leave(table *t, uint32_t number, uint32_t life, change *last) {
    record *of = record_at(t, number);
    change_set(t, of, life, -1, last);
    if (!of->set) free_record(t, number);
}

/* Look at up to `max` slots of retired lives; whether any are left. */
int table_sweep(table *t, int64_t max) {
    while (t->num_retired && max > 0) {
        uint32_t number = t->retired[t->num_retired - 1];
        life *gone = &t->lives[number];
        change last = {0};
        for (; gone->swept < gone->records.capacity && max > 0; gone->swept++) {
            uint32_t found = gone->records.slots[gone->swept];
            if (!found) continue;
            leave(t, found, number, &last);
            max--;
        }
        forget(t, &last);
        if (gone->swept < gone->records.capacity) break;
        forget_all(t, &gone->records);
        *gone = (life){0};
        t->num_retired--;
    }
    return t->num_retired != 0;
}

typedef struct {
    uint64_t low, high;
} sum; /* modulo 2^128 */

static void add_to(sum *total, const uint64_t name[2]) {
    total->low += name[0];
    total->high += name[1] + (total->low < name[0]);
}

/* Apply `count` events to a life, in order. `added` and `taken` become the sums of the names that
 * it holds since then, and of those that it held and holds no more. */
void table_apply(table *t, uint32_t number, const uint8_t *events, int64_t count, sum *added,
                 sum *taken) {
    life *of = &t->lives[number];
    change stored = {0}, removed = {0};
    *added = *taken = (sum){0, 0};
    for (int64_t i = 0; i < count; i++, events += EVENT) {
        uint64_t name[2];
        uint32_t depth, at = 0;
        memcpy(&depth, events + 1, sizeof depth);
        memcpy(name, events + EVENT - NAME, NAME);
        uint64_t hash = name_hash(name);
        uint32_t known = find(t, name, hash, &at);
        int held = known && has(&of->records, known);
        if (events[0] == REMOVED) {
            if (!held) continue;
            drop(t, &of->records, known);
            leave(t, known, number, &removed);
            add_to(taken, name);
            continue;
        }
        if (!known) known = add_record(t, name, hash);
        record *there = record_at(t, known);
        there->depth = depth;
        change_set(t, there, number, seat_of(number, events[0] == IN_HOST), &stored);
        if (held) continue;
        put(t, &of->records, known);
        add_to(added, name);
    }
    forget(t, &stored);
    forget(t, &removed);
}

static uint32_t set_of(table *t, const uint8_t *name, uint64_t hash) {
    uint64_t copy[2];
    uint32_t at = 0;
    memcpy(copy, name, NAME);
    uint32_t known = find(t, copy, hash, &at);
    return known ? record_at(t, known)->set : 0;
}

/* Leave in `still` the lives that sit in `set`, too; whoever does not has a run of `depth`. */
static uint32_t intersect(table *t, uint32_t count, uint32_t set, uint32_t depth, uint32_t *runs) {
    const holders *with = set ? t->sets[set] : NULL;
    uint32_t left = 0, j = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t life = t->still[i];
        while (with && j < with->length && with->seats[j] >> 1 < life) j++;
        if (with && j < with->length && with->seats[j] >> 1 == life)
            t->still[left++] = life;
        else
            runs[2 * life] = depth;
    }
    return left;
}

/* The lives still running hold `length` blocks more, in the tiers of `set`. */
static void count_tiers(table *t, uint32_t num_still, uint32_t set, uint32_t length,
                        uint32_t *runs) {
    for (uint32_t k = 0, j = 0; k < num_still; k++) {
        while (t->sets[set]->seats[j] >> 1 < t->still[k]) j++;
        if (t->sets[set]->seats[j] & 1) runs[2 * t->still[k] + 1] += length;
    }
}

/* Have the memory of these names fetched: first where to look, then what is to be found there. */
static void look_ahead(table *t, const uint8_t *names, uint32_t count, uint64_t *hashes) {
    for (uint32_t k = 0; k < count; k++) {
        uint64_t name[2];
        memcpy(name, names + k * NAME, NAME);
        hashes[k] = name_hash(name);
        const numbers *part = part_of(t, hashes[k]);
        if (part->capacity)
            __builtin_prefetch(&part->slots[(uint32_t)hashes[k] & (part->capacity - 1)]);
    }
    for (uint32_t k = 0; k < count; k++) {
        const numbers *part = part_of(t, hashes[k]);
        uint32_t at = part->capacity ? part->slots[(uint32_t)hashes[k] & (part->capacity - 1)] : 0;
        if (at) __builtin_prefetch(record_at(t, at));
    }
}

/* `runs` [num_lives, 2] gets, for the lives listed in `found`, how many of the names each holds
 * without a gap from the first on, and how many of these in host memory. All others hold none. */
uint32_t table_longest(table *t, const uint8_t *names, uint32_t count, uint32_t *runs,
                       uint32_t *found) {
    uint64_t hashes[AHEAD];
    uint32_t num_found = 0, num_still = 0, set = 0, since = 0, i = 0;
    for (; i < count; i++) {
        if (i % AHEAD == 0)
            look_ahead(t, names + i * NAME, count - i < AHEAD ? count - i : AHEAD, hashes);
        uint32_t next = set_of(t, names + i * NAME, hashes[i % AHEAD]);
        if (i && next == set) continue;
        if (i) {
            count_tiers(t, num_still, set, i - since, runs);
            num_still = intersect(t, num_still, next, i, runs);
        }
        for (uint32_t k = 0; !i && next && k < t->sets[next]->length; k++) {
            uint32_t life = t->sets[next]->seats[k] >> 1;
            if (t->lives[life].retired) continue;
            t->still[num_still++] = found[num_found++] = life;
            runs[2 * life] = count, runs[2 * life + 1] = 0;
        }
        set = next, since = i;
        if (!num_still) return num_found;
    }
    if (count) count_tiers(t, num_still, set, count - since, runs);
    return num_found;
}

/* The names of a life, and a kind and a depth for each, as events. */
void table_entries(table *t, uint32_t number, uint8_t *events) {
    const numbers *held = &t->lives[number].records;
    for (uint32_t i = 0; i < held->capacity; i++) {
        if (!held->slots[i]) continue;
        const record *each = record_at(t, held->slots[i]);
        const holders *set = t->sets[each->set];
        uint32_t k = 0;
        while (set->seats[k] >> 1 != number) k++;
        events[0] = set->seats[k] & 1 ? IN_HOST : 'g';
        memcpy(events + 1, &each->depth, sizeof each->depth);
        memcpy(events + EVENT - NAME, each->name, NAME);
        events += EVENT;
    }
}

/* 0 when the books balance, else the number of the rule that is broken. */
int table_check(table *t) {
    uint64_t entries = 0, seats = 0, refs = 0, blocks = 0;
    for (uint32_t i = 0; i < t->num_lives; i++) {
        const life *each = &t->lives[i];
        for (uint32_t k = each->swept; k < each->records.capacity; k++) {
            uint32_t number = each->records.slots[k];
            if (!number) continue;
            const record *found = record_at(t, number);
            if (!found->set) return 1; /* a life holds a free record */
            uint32_t at = 0;
            if (find(t, found->name, name_hash(found->name), &at) != number) return 2;
            const holders *set = t->sets[found->set];
            uint32_t sits = 0;
            for (uint32_t s = 0; s < set->length; s++) sits += set->seats[s] >> 1 == i;
            if (sits != 1) return 3; /* a holder without a seat, or with two */
            entries++;
        }
    }
    for (uint32_t i = 0; i < 1 << PART_BITS; i++) blocks += t->parts[i].used;
    for (uint32_t i = 0; i < t->interned.capacity; i++) {
        if (!t->interned.slots[i]) continue;
        const holders *set = t->sets[t->interned.slots[i]];
        refs += set->refs;
        seats += (uint64_t)set->refs * set->length;
    }
    if (blocks != t->num_blocks || refs != blocks) return 4;
    return seats == entries ? 0 : 5;
}
