/* SPDX-License-Identifier: Apache-2.0 */
#include "loop.h"

#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define BATCH 64
#define SLEEP_MAX_MS 3600000u

static int epoll_fd = -1;
static struct epoll_event batch[BATCH];
static int batch_len, batch_at;
static bool again;
/* Sorted by time; new timers mostly go to the tail, where the search begins. No allocation, so setting never fails. */
static struct timer timers = {&timers, &timers, 0, NULL};

int loop_init(void)
{
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    return epoll_fd < 0 ? -1 : 0;
}

void loop_again(void)
{
    again = true;
}

int watch_open(struct watch *w, int fd, uint32_t events, void (*ready)(struct watch *, uint32_t))
{
    struct epoll_event ev = {.events = events, .data.ptr = w};
    w->fd = fd;
    w->events = events;
    w->ready = ready;
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &ev) == 0)
        return 0;
    int err = errno;
    close(fd);
    w->fd = -1;
    errno = err;
    return -1;
}

void watch_set(struct watch *w, uint32_t events)
{
    if (w->fd < 0 || w->events == events)
        return;
    struct epoll_event ev = {.events = events, .data.ptr = w};
    /* MOD of a registered descriptor allocates nothing and cannot fail. */
    (void)epoll_ctl(epoll_fd, EPOLL_CTL_MOD, w->fd, &ev);
    w->events = events;
}

void watch_close(struct watch *w)
{
    if (w->fd < 0)
        return;
    /* Explicit: a child between fork and exec may still share the open file, and epoll watches files, not numbers. */
    (void)epoll_ctl(epoll_fd, EPOLL_CTL_DEL, w->fd, NULL);
    close(w->fd);
    w->fd = -1;
    for (int i = batch_at; i < batch_len; i++)
        if (batch[i].data.ptr == w)
            batch[i].data.ptr = NULL;
}

uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000u + (uint64_t)t.tv_nsec / 1000000u;
}

uint64_t wall_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

bool timer_is_set(const struct timer *t)
{
    return t->next != NULL;
}

void timer_stop(struct timer *t)
{
    if (!timer_is_set(t))
        return;
    t->prev->next = t->next;
    t->next->prev = t->prev;
    t->next = t->prev = NULL;
}

void timer_set(struct timer *t, uint64_t in_ms, void (*fire)(struct timer *))
{
    timer_stop(t);
    uint64_t now = now_ms();
    t->at_ms = in_ms > UINT64_MAX - now ? UINT64_MAX : now + in_ms;
    t->fire = fire;
    struct timer *before = timers.prev;
    while (before != &timers && before->at_ms > t->at_ms)
        before = before->prev;
    t->prev = before;
    t->next = before->next;
    before->next->prev = t;
    before->next = t;
}

static int sleep_ms(void)
{
    if (again)
        return 0;
    if (timers.next == &timers)
        return -1;
    uint64_t now = now_ms();
    if (timers.next->at_ms <= now)
        return 0;
    uint64_t wait = timers.next->at_ms - now;
    return (int)(wait > SLEEP_MAX_MS ? SLEEP_MAX_MS : wait);
}

static void run_timers(void)
{
    uint64_t now = now_ms();
    while (timers.next != &timers && timers.next->at_ms <= now) {
        struct timer *t = timers.next;
        timer_stop(t);
        t->fire(t);
    }
}

static void run_events(int timeout_ms)
{
    batch_len = epoll_wait(epoll_fd, batch, BATCH, timeout_ms);
    for (batch_at = 0; batch_at < batch_len; batch_at++) {
        struct watch *w = batch[batch_at].data.ptr;
        if (w != NULL) /* NULL: closed by an earlier callback of this round */
            w->ready(w, batch[batch_at].events);
    }
    batch_len = 0;
}

void loop_run(const bool *stop, void (*after)(void))
{
    while (!*stop) {
        int timeout_ms = sleep_ms();
        again = false;
        run_events(timeout_ms);
        run_timers();
        after();
    }
}
