/* SPDX-License-Identifier: Apache-2.0 */
/* From the pipes into the rings. */
#include "exec.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define READ_MAX ((size_t)64 << 10)
#define FRAME_BYTES ((size_t)32 << 10)
#define OUTPUT_HEADER 9u
#define TERMINAL_REST (64u << 10) /* more than a terminal holds */
#define RETRY_MS 100

static uint8_t scratch[READ_MAX];

/* ---- drains: pipes whose exec is over, but where others still write */

struct drain {
    struct watch watch;
};

static void drain_event(struct watch *w, uint32_t events)
{
    (void)events;
    ssize_t n = read(w->fd, scratch, sizeof(scratch));
    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR)))
        return;
    watch_close(w);
    free(container_of(w, struct drain, watch));
}

/* Closing the pipe would kill a background service with SIGPIPE at its next line, or hang up its terminal. */
static void hand_to_drain(struct output *out)
{
    int fd = out->watch.fd < 0 ? -1 : fcntl(out->watch.fd, F_DUPFD_CLOEXEC, 3);
    watch_close(&out->watch);
    struct drain *d = fd < 0 ? NULL : malloc(sizeof(*d));
    if (d == NULL) {
        if (fd >= 0)
            close(fd);
        return;
    }
    if (watch_open(&d->watch, fd, EPOLLIN, drain_event) < 0)
        free(d);
}

/* ---- reading */


/* The oldest byte that must not be lost. */
static uint64_t floor_of(const struct exec *ex, const struct output *out)
{
    if (!reader_holds(ex))
        return out->ring.end;
    /* At most half of the ring, so that there is always room for bytes not sent yet. */
    uint64_t back = out->window < out->ring.max / 2 ? out->window : out->ring.max / 2;
    return out->sent > back ? out->sent - back : 0;
}

static void add(struct output *out, size_t n)
{
    uint64_t before = out->ring.start;
    ring_add(&out->ring, scratch, n);
    if (before < out->seen)
        before = out->seen;
    if (out->ring.start > before)
        out->dropped += out->ring.start - before;
    if (out->sent < out->ring.start)
        out->sent = out->ring.start;
}

static void retry_fire(struct timer *t)
{
    output_resume(container_of(t, struct exec, retry));
}

static size_t room_for(struct exec *ex, struct output *out)
{
    size_t space = ring_space(&out->ring, floor_of(ex, out));
    if (ring_starved()) {
        if (exec_shed_output())
            space = ring_space(&out->ring, floor_of(ex, out));
        if (ring_starved() && space == 0)
            timer_set(&ex->retry, RETRY_MS, retry_fire);
    }
    if (!reader_holds(ex)) /* nobody waits for it: read in any case, the ring keeps what it can */
        return READ_MAX;
    return space < READ_MAX ? space : READ_MAX;
}

static void pause_reading(struct output *out, bool paused)
{
    out->paused = paused;
    watch_set(&out->watch, paused ? WATCH_PAUSED : (uint32_t)EPOLLIN);
}

enum read_result { READ_SOME, READ_NOTHING, READ_NO_ROOM, READ_END };

static enum read_result read_once(struct exec *ex, struct output *out, uint64_t limit)
{
    size_t want = room_for(ex, out);
    if (want == 0) {
        pause_reading(out, true);
        return READ_NO_ROOM;
    }
    if (want > limit)
        want = (size_t)limit;
    ssize_t n = read(out->watch.fd, scratch, want);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return READ_NOTHING;
    if (n <= 0) /* end of file; a terminal says EIO */
        return READ_END;
    add(out, (size_t)n);
    ex->last_output_ms = now_ms();
    if (out->drain_left > 0)
        out->drain_left -= (size_t)n < out->drain_left ? (size_t)n : out->drain_left;
    reader_ready(ex);
    return READ_SOME;
}

static void finish(struct output *out)
{
    out->done = true;
    out->drain_left = 0;
    if (out->watch.fd < 0)
        return;
    /* Usually everybody has closed the pipe by now; what can still be read came after the leader's end. */
    ssize_t n = read(out->watch.fd, scratch, sizeof(scratch));
    if (n > 0 || (n < 0 && errno == EAGAIN))
        hand_to_drain(out);
    else
        watch_close(&out->watch);
}

static void output_event(struct watch *w, uint32_t events)
{
    (void)events;
    struct output *out = container_of(w, struct output, watch);
    struct exec *ex = out->exec;
    if (out->paused)
        return;
    if (ex->state == EXEC_DRAINING) {
        output_resume(ex);
        return;
    }
    if (read_once(ex, out, READ_MAX) != READ_END)
        return;
    if (ex->pty) { /* nobody has the terminal open just now, but closing our side would hang the session up */
        pause_reading(out, true);
        timer_set(&ex->retry, RETRY_MS, retry_fire);
        return;
    }
    watch_close(&out->watch);
    out->done = true;
}

/* Reads on until what the pipe held at the leader's end is in the ring, or there is no room. */
static void drain_some(struct exec *ex, struct output *out)
{
    while (!out->done) {
        if (out->drain_left == 0) {
            finish(out);
            return;
        }
        enum read_result r = read_once(ex, out, out->drain_left);
        if (r == READ_NO_ROOM)
            return;
        if (r == READ_NOTHING || r == READ_END)
            finish(out);
    }
}

void output_drain(struct exec *ex, struct output *out)
{
    int held = 0;
    if (out->done)
        return;
    /* A terminal's reader cannot be asked how much there is to come; reading until it would block empties it. */
    if (ex->pty)
        out->drain_left = TERMINAL_REST;
    else if (ioctl(out->watch.fd, FIONREAD, &held) == 0 && held > 0)
        out->drain_left = (uint64_t)held;
    out->paused = false;
    drain_some(ex, out);
}

void output_resume(struct exec *ex)
{
    for (int i = 0; i < 2; i++) {
        struct output *out = &ex->out[i];
        if (out->done || (out->paused && room_for(ex, out) == 0))
            continue;
        if (out->paused)
            pause_reading(out, false);
        if (ex->state == EXEC_DRAINING)
            drain_some(ex, out);
    }
    if (ex->state == EXEC_DRAINING)
        exec_check_end(ex);
}

bool output_stuck(const struct exec *ex)
{
    for (int i = 0; i < 2; i++) {
        int held = 0;
        const struct output *out = &ex->out[i];
        if (out->paused && !out->done && ioctl(out->watch.fd, FIONREAD, &held) == 0 && held > 0)
            return true;
    }
    return false;
}

/* ---- opening, closing, frames */

int output_open(struct exec *ex, int stream, int fd, size_t max, bool polled)
{
    struct output *out = &ex->out[stream];
    out->exec = ex;
    ring_init(&out->ring, max);
    return watch_open(&out->watch, fd, polled ? (uint32_t)EPOLLIN : WATCH_PAUSED, output_event);
}

void output_poll(struct output *out)
{
    if (out->watch.fd >= 0 && !out->paused)
        watch_set(&out->watch, EPOLLIN);
}

void output_free(struct output *out)
{
    if (out->watch.fd >= 0 && out->done)
        watch_close(&out->watch);
    else
        hand_to_drain(out);
    ring_free(&out->ring);
}

size_t output_frame(struct buf *b, uint32_t channel, unsigned stream, const struct ring *ring, uint64_t offset, uint64_t max)
{
    size_t want = max < FRAME_BYTES ? (size_t)max : FRAME_BYTES;
    if (want > ring->end - offset)
        want = (size_t)(ring->end - offset);
    size_t begun = frame_begin(b, T_OUTPUT, channel);
    uint8_t *p = buf_reserve(b, OUTPUT_HEADER + want);
    if (p == NULL)
        return 0;
    p[0] = (uint8_t)stream;
    store_u64(p + 1, offset);
    size_t n = ring_copy(ring, offset, p + OUTPUT_HEADER, want);
    buf_commit(b, OUTPUT_HEADER + n);
    frame_end(b, begun);
    return n;
}
