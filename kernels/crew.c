/* Threads that make calls of C, and never wait for the interpreter's lock: see crew.py. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/eventfd.h>

typedef struct call {
    void (*work)(void *about);
    void *about;
    struct call *next; /* the crew's */
} call;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t more;
    call *first, *last; /* to be made */
    call *made, *latest;
    int bell, leaving; /* the bell is an eventfd */
    int64_t num_threads;
    pthread_t threads[];
} crew;

static call *next_call(crew *all) {
    while (!all->first && !all->leaving) pthread_cond_wait(&all->more, &all->lock);
    call *one = all->first;
    if (one) all->first = one->next;
    return one;
}

/* Whether the bell is to be rung: nobody has been told of others yet. */
static int note_made(crew *all, call *one) {
    const int first = !all->made;
    one->next = NULL;
    if (first)
        all->made = one;
    else
        all->latest->next = one;
    all->latest = one;
    return first;
}

static void *work(void *own) {
    crew *all = own;
    call *one;
    pthread_mutex_lock(&all->lock);
    while ((one = next_call(all))) {
        pthread_mutex_unlock(&all->lock);
        one->work(one->about);
        pthread_mutex_lock(&all->lock);
        if (!note_made(all, one)) continue;
        pthread_mutex_unlock(&all->lock);
        eventfd_write(all->bell, 1);
        pthread_mutex_lock(&all->lock);
    }
    pthread_mutex_unlock(&all->lock);
    return NULL;
}

/* What is queued is made before; then the threads are gone, and the crew, too, but not what it made. */
void crew_leave(crew *all) {
    pthread_mutex_lock(&all->lock);
    all->leaving = 1;
    pthread_cond_broadcast(&all->more);
    pthread_mutex_unlock(&all->lock);
    for (int64_t i = 0; i < all->num_threads; i++) pthread_join(all->threads[i], NULL);
    pthread_cond_destroy(&all->more);
    pthread_mutex_destroy(&all->lock);
    free(all);
}

/* NULL where there are no threads to be had. */
crew *crew_start(int64_t num_threads, int bell) {
    crew *all = calloc(1, sizeof *all + num_threads * sizeof(pthread_t));
    if (!all) return NULL;
    pthread_mutex_init(&all->lock, NULL);
    pthread_cond_init(&all->more, NULL);
    all->bell = bell;
    for (; all->num_threads < num_threads; all->num_threads++)
        if (pthread_create(all->threads + all->num_threads, NULL, work, all)) {
            crew_leave(all);
            return NULL;
        }
    return all;
}

/* `one` is the crew's until it is among those that `crew_made` gives. */
void crew_put(crew *all, call *one) {
    one->next = NULL;
    pthread_mutex_lock(&all->lock);
    if (all->first)
        all->last->next = one;
    else
        all->first = one;
    all->last = one;
    pthread_cond_signal(&all->more);
    pthread_mutex_unlock(&all->lock);
}

/* The bell has rung: those that were made since the last time, in that order, or NULL. */
call *crew_made(crew *all) {
    pthread_mutex_lock(&all->lock);
    call *made = all->made;
    all->made = NULL;
    pthread_mutex_unlock(&all->lock);
    return made;
}
