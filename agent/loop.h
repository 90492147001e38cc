/* SPDX-License-Identifier: Apache-2.0 */
/* The event loop: descriptors and timers. Everything in the agent happens in its callbacks. */
#ifndef DSEC_LOOP_H
#define DSEC_LOOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>

#define container_of(ptr, type, member) ((type *)(void *)((char *)(ptr) - offsetof(type, member)))

struct watch {
    int fd;          /* -1: closed */
    uint32_t events; /* what epoll was told */
    void (*ready)(struct watch *w, uint32_t events);
};

struct timer {
    struct timer *next, *prev; /* NULL: not set */
    uint64_t at_ms;
    void (*fire)(struct timer *t);
};

/* events of a watch that only waits: reports a hang-up once, never spins. */
#define WATCH_PAUSED ((uint32_t)EPOLLET)

int loop_init(void);
/* Runs `after` once per round, after all callbacks; ends when *stop. */
void loop_run(const bool *stop, void (*after)(void));
/* The next round does not sleep: work was left over. */
void loop_again(void);

/* The watch takes the descriptor over, also when this fails (closed then). 0 or -1 with errno. */
int watch_open(struct watch *w, int fd, uint32_t events, void (*ready)(struct watch *, uint32_t));
void watch_set(struct watch *w, uint32_t events);
void watch_close(struct watch *w);

uint64_t now_ms(void);      /* monotonic */
uint64_t wall_ns(void);
void timer_set(struct timer *t, uint64_t in_ms, void (*fire)(struct timer *));
void timer_stop(struct timer *t);
bool timer_is_set(const struct timer *t);

#endif
