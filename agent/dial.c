/* SPDX-License-Identifier: Apache-2.0 */
#include "dial.h"

#include "spawn.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define DATA_BYTES ((size_t)32 << 10)
#define DATA_OFFSET 8u
#define WINDOW ((size_t)64 << 10) /* of what the host may send ahead */

struct dial {
    struct channel channel;
    struct watch watch;
    struct buf pending; /* of the host, not written yet */
    uint64_t owed;      /* written, and not granted again yet */
    uint64_t credit, sent;
    uint16_t port;
    bool second; /* the other family's loopback is tried */
    bool connected, readable;
    bool host_ended, guest_ended;
};

static void dial_free(struct dial *d)
{
    watch_close(&d->watch);
    buf_free(&d->pending);
    free(d);
}

/* The channel's last frame: OK when err is 0. */
static void finish(struct dial *d, const char *code, int err)
{
    struct conn *conn = d->channel.conn;
    uint32_t number = d->channel.number;
    channel_close(&d->channel);
    dial_free(d);
    if (err == 0)
        reply_ok(conn, number);
    else
        reply_error(conn, number, code, err, strerror(err));
}

static void settle_watch(struct dial *d)
{
    uint32_t in = !d->guest_ended && !d->readable && d->credit > 0 ? (uint32_t)EPOLLIN : 0u;
    uint32_t out = d->pending.len > 0 ? (uint32_t)EPOLLOUT : 0u;
    watch_set(&d->watch, (in | out) ? (in | out) : WATCH_PAUSED);
}

static void grant(struct dial *d)
{
    if (d->owed == 0 || (d->owed < WINDOW / 4 && d->pending.len > 0))
        return;
    struct buf *b = conn_queue(d->channel.conn);
    size_t begun = frame_begin(b, T_CREDIT, d->channel.number);
    put_u64(b, F_STREAM, STREAM_IN);
    put_u64(b, F_BYTES, d->owed);
    frame_end(b, begun);
    d->owed = 0;
}

/* Writes what is pending; an error number when the connection broke. */
static int push(struct dial *d)
{
    while (d->pending.len > 0) {
        ssize_t n = send(d->watch.fd, buf_head(&d->pending), d->pending.len, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN)
            break;
        if (n < 0 && errno != EINTR)
            return errno;
        if (n > 0) {
            buf_take(&d->pending, (size_t)n);
            d->owed += (size_t)n;
        }
    }
    grant(d);
    if (d->pending.len > 0)
        return 0;
    buf_free(&d->pending); /* an idle connection holds no memory */
    if (d->host_ended)
        (void)shutdown(d->watch.fd, SHUT_WR);
    return 0;
}

static bool is_over(const struct dial *d)
{
    return d->host_ended && d->guest_ended && d->pending.len == 0;
}

/* ---- from the guest's port to the host */

static ssize_t send_piece(struct dial *d)
{
    struct buf *b = conn_queue(d->channel.conn);
    size_t want = d->credit < DATA_BYTES ? (size_t)d->credit : DATA_BYTES;
    size_t begun = frame_begin(b, T_DATA, d->channel.number);
    uint8_t *p = buf_reserve(b, DATA_OFFSET + want);
    if (p == NULL) { /* the connection's end */
        frame_end(b, begun);
        return 0;
    }
    store_u64(p, d->sent);
    ssize_t n = recv(d->watch.fd, p + DATA_OFFSET, want, MSG_DONTWAIT);
    if (n < 0) {
        int err = errno;
        buf_truncate(b, begun);
        errno = err;
        return -1;
    }
    /* Without a byte it says that there are none any more. */
    buf_commit(b, DATA_OFFSET + (size_t)n);
    frame_end(b, begun);
    return n;
}

static bool dial_pull(struct channel *c)
{
    struct dial *d = container_of(c, struct dial, channel);
    if (!d->readable || d->guest_ended || d->credit == 0)
        return false;
    ssize_t n = send_piece(d);
    if (n < 0 && errno != EAGAIN && errno != EINTR) {
        finish(d, "io-error", errno);
        return false;
    }
    if (n > 0) {
        d->sent += (uint64_t)n;
        d->credit -= (uint64_t)n;
        if (d->credit > 0)
            return true;
    }
    d->readable = n > 0;
    d->guest_ended = n == 0;
    if (is_over(d)) {
        finish(d, NULL, 0);
        return false;
    }
    settle_watch(d);
    return false;
}

/* ---- from the host to the guest's port */

static bool take_credit(struct dial *d, const struct frame *f)
{
    struct request r;
    if (!request_decode(f->payload, f->len, &r) || !request_has(&r, F_BYTES))
        return false;
    uint64_t bytes = r.num[F_BYTES];
    d->credit = bytes > UINT64_MAX - d->credit ? UINT64_MAX : d->credit + bytes;
    if (d->readable)
        channel_ready(&d->channel);
    settle_watch(d);
    return true;
}

static bool dial_frame(struct channel *c, const struct frame *f)
{
    struct dial *d = container_of(c, struct dial, channel);
    if (!d->connected)
        return false;
    if (f->type == T_CREDIT)
        return take_credit(d, f);
    if (f->type != T_INPUT || d->host_ended || f->len > WINDOW - d->pending.len)
        return false;
    if (!buf_add(&d->pending, f->payload, f->len)) {
        finish(d, "io-error", ENOMEM);
        return true;
    }
    d->host_ended = f->flags & FLAG_EOF;
    int err = push(d);
    if (err != 0 || is_over(d))
        finish(d, "io-error", err);
    else
        settle_watch(d);
    return true;
}

static void dial_lost(struct channel *c, bool by_host)
{
    (void)by_host;
    dial_free(container_of(c, struct dial, channel));
}

static const struct channel_ops dial_ops = {dial_pull, dial_frame, dial_lost};

/* ---- beginning */

static void dial_event(struct watch *w, uint32_t events);

/* A connection to one of the two loopbacks, on its way; an error number. */
static int try_next(struct dial *d)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } to;
    memset(&to, 0, sizeof(to));
    if (d->second) {
        to.v6.sin6_family = AF_INET6;
        to.v6.sin6_port = htons(d->port);
        to.v6.sin6_addr.s6_addr[15] = 1;
    } else {
        to.v4.sin_family = AF_INET;
        to.v4.sin_port = htons(d->port);
        to.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    }
    watch_close(&d->watch);
    int fd = socket(to.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return errno;
    if (connect(fd, &to.any, d->second ? sizeof(to.v6) : sizeof(to.v4)) < 0 && errno != EINPROGRESS) {
        int err = errno;
        close(fd);
        return err;
    }
    return watch_open(&d->watch, fd, EPOLLOUT, dial_event) < 0 ? errno : 0;
}

static void connect_on(struct dial *d, int err)
{
    while (err != 0 && !d->second) {
        d->second = true;
        err = try_next(d);
    }
    if (err != 0)
        finish(d, "refused", err);
}

static void connected(struct dial *d)
{
    d->connected = true;
    struct buf *b = conn_queue(d->channel.conn);
    size_t begun = frame_begin(b, T_READY, d->channel.number);
    put_u64(b, F_CREDIT, WINDOW);
    frame_end(b, begun);
    settle_watch(d);
}

static void dial_event(struct watch *w, uint32_t events)
{
    struct dial *d = container_of(w, struct dial, watch);
    int err = 0;
    if (!d->connected) {
        socklen_t len = sizeof(err);
        if (getsockopt(w->fd, SOL_SOCKET, SO_ERROR, &err, &len) < 0)
            err = errno;
        if (err != 0)
            connect_on(d, err);
        else
            connected(d);
        return;
    }
    if (events & EPOLLOUT)
        err = push(d);
    if (err != 0 || is_over(d)) {
        finish(d, "io-error", err);
        return;
    }
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        d->readable = true;
        channel_ready(&d->channel);
    }
    settle_watch(d);
}

void dial_begin(struct conn *conn, uint32_t channel, const struct request *r)
{
    uint64_t port = request_num(r, F_PORT, 0);
    if (spawn_config.container || port < 1 || port > UINT16_MAX) {
        reply_error(conn, channel, "invalid", EINVAL, "PORT of a virtual machine");
        return;
    }
    struct dial *d = calloc(1, sizeof(*d));
    if (d == NULL || !channel_open(&d->channel, conn, channel, &dial_ops)) {
        free(d);
        reply_error(conn, channel, "busy", EAGAIN, "too many requests at once");
        return;
    }
    d->watch.fd = -1;
    d->port = (uint16_t)port;
    d->credit = request_num(r, F_CREDIT, 0);
    buf_init(&d->pending, WINDOW);
    connect_on(d, try_next(d));
}
