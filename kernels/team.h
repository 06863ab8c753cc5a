/* A team of threads that go through one piece of work together, phase by phase.
 *
 * Every thread runs the whole of the work; `next_item` deals out the items of a phase, and `meet`
 * ends it. A waiting thread looks again and again for some microseconds, then lets others have its
 * core in between, then sleeps in the kernel: teams of several processes may share the cores.
 * Members keep off the core of the caller.
 */
#ifndef KVFERRY_TEAM_H
#define KVFERRY_TEAM_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct team team;
typedef void (*work_fn)(team *, int member, void *about);

/* NULL where threads cannot be had. A team of one has no thread of its own. */
team *team_made(int size);
void team_ended(team *);
int team_size(const team *);

/* Run the work on every member, the caller being member 0, and wait for all. */
void team_run(team *, work_fn, void *about);

/* Until every member is here; items are dealt from 0 again afterwards. */
void team_meet(team *);
int64_t team_next(team *);

/* What the calling member is at from here on. Compiled with TIMED, a team counts how long each member
 * computed and waited at each part (bench/profile_step.py); otherwise this is nothing at all. */
enum part { OUTSIDE, EMBED, NORM, QKV, WRITE_KV, ATTENTION, O, GATE_UP, DOWN, HEAD, NUM_PARTS };

#ifdef TIMED
void part_begins(enum part);

/* Nanoseconds [members, NUM_PARTS, computing and waiting] since the last call, by member 0. */
void team_times(team *, int64_t *times);
#else
#define part_begins(part) ((void)0)
#endif

#endif
