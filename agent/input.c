/* SPDX-License-Identifier: Apache-2.0 */
/* From the channel into an exec's stdin. */
#include "exec.h"
#include "pty.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

static void grant(struct exec *ex)
{
    struct channel *c = ex->stdin_owner;
    /* In big steps, but never so late that the host waits for us with nothing on its way. */
    if (c == NULL || c->conn == NULL || ex->in.owed == 0)
        return;
    if (ex->in.owed < INPUT_WINDOW / 4 && ex->in.pending.len > 0)
        return;
    struct buf *b = conn_queue(c->conn);
    size_t begun = frame_begin(b, T_CREDIT, c->number);
    put_u64(b, F_STREAM, STREAM_IN);
    put_u64(b, F_BYTES, ex->in.owed);
    frame_end(b, begun);
    ex->in.owed = 0;
}

/* Nobody reads it any more: what came and what will come is thrown away, so that the host is never stuck. */
static void discard(struct exec *ex)
{
    watch_close(&ex->in.watch);
    ex->in.owed += ex->in.pending.len;
    buf_free(&ex->in.pending);
    grant(ex);
}

void input_close(struct exec *ex)
{
    discard(ex);
}

/* Writes what is pending; false when the other side is gone. */
static bool push(struct exec *ex)
{
    struct input *in = &ex->in;
    while (in->pending.len > 0) {
        ssize_t n = write(in->watch.fd, buf_head(&in->pending), in->pending.len);
        if (n < 0 && errno == EAGAIN)
            return true;
        if (n < 0 && errno != EINTR)
            return false;
        if (n > 0) {
            buf_take(&in->pending, (size_t)n);
            in->owed += (size_t)n;
        }
    }
    return !in->eof || ex->pty;
}

static void settle(struct exec *ex)
{
    struct input *in = &ex->in;
    if (in->watch.fd < 0 || !push(ex)) {
        discard(ex);
        return;
    }
    if (in->pending.len == 0)
        buf_free(&in->pending); /* an idle stdin holds no memory */
    watch_set(&in->watch, in->pending.len > 0 ? (uint32_t)EPOLLOUT : WATCH_PAUSED);
    grant(ex);
}

static void input_event(struct watch *w, uint32_t events)
{
    struct exec *ex = container_of(w, struct exec, in.watch);
    if (events & EPOLLOUT)
        settle(ex);
    else if ((events & EPOLLERR) && !ex->pty)
        discard(ex); /* the last reader of the pipe has gone */
}

int input_open(struct exec *ex, int fd)
{
    buf_init(&ex->in.pending, INPUT_WINDOW + 64); /* and a terminal's end-of-file characters */
    ex->in.accepts = true;
    return watch_open(&ex->in.watch, fd, WATCH_PAUSED, input_event);
}

size_t input_credit(const struct exec *ex)
{
    return ex->in.accepts ? INPUT_WINDOW - (ex->in.pending.len < INPUT_WINDOW ? ex->in.pending.len : INPUT_WINDOW) : 0;
}

static bool accept_eof(struct exec *ex)
{
    static const uint8_t end_of_file = PTY_EOF;
    if (ex->pty)
        return buf_add(&ex->in.pending, &end_of_file, 1);
    ex->in.eof = true;
    return true;
}

bool input_frame(struct exec *ex, struct channel *from, const struct frame *f)
{
    struct input *in = &ex->in;
    if (!in->accepts)
        return f->len == 0; /* no credit was given */
    if (ex->stdin_owner != from)
        return true;
    if (in->watch.fd < 0 || in->eof) {
        in->owed += f->len;
        grant(ex);
        return true;
    }
    if (f->len > INPUT_WINDOW - (in->pending.len < INPUT_WINDOW ? in->pending.len : INPUT_WINDOW))
        return false; /* more than the credit */
    if (!buf_add(&in->pending, f->payload, f->len) || ((f->flags & FLAG_EOF) && !accept_eof(ex))) {
        in->pending.failed = false;
        discard(ex); /* no memory: the command sees its input end, as if the disk under it were full */
        return true;
    }
    settle(ex);
    return true;
}
