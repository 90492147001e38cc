/* SPDX-License-Identifier: Apache-2.0 */
#include "conn.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <linux/vm_sockets.h>
#include <unistd.h>

#define UNAUTHENTICATED_MAX 4
#define HELLO_TIMEOUT_MS 5000
#define LISTEN_AGAIN_MS 100
#define HELLO_BYTES 4096u           /* what an unauthenticated peer may make us hold */
#define IN_BYTES (2u * FRAME_MAX)
#define READ_BUDGET (4u * FRAME_MAX) /* per round, so that others get their turn */
#define OUT_MAX ((size_t)1 << 20)
#define OUT_FILL ((size_t)128 << 10)  /* channels are asked for more below this */
#define OUT_PAUSE ((size_t)512 << 10) /* no more requests are read above this */
#define WRITE_BUDGET ((size_t)2 << 20)
#define CHANNELS_MAX 10000u
#define PATIENCE_MS 2
#define BUCKETS 512u

struct conn {
    struct watch watch;
    struct timer hello_timer;
    struct timer patience; /* set: the first `patient` bytes of `out` may wait for more to go with them */
    size_t patient;
    struct conn *next; /* in `all` */
    bool authenticated;
    bool dead;
    struct buf in, out;
    unsigned open;
    struct channel *buckets[BUCKETS];
    struct channel ready; /* list head */
};

static struct watch listener;
static struct timer listen_again;
static struct conn *all;
static struct conn *charge; /* the one that said HELLO last */
static struct conn *adopted;
static unsigned unauthenticated;
static bool some_dead;

/* ---- channels */

static struct channel **slot_of(struct conn *conn, uint32_t number)
{
    struct channel **at = &conn->buckets[number % BUCKETS];
    while (*at != NULL && (*at)->number != number)
        at = &(*at)->hash_next;
    return at;
}

bool channel_open(struct channel *c, struct conn *conn, uint32_t number, const struct channel_ops *ops)
{
    if (conn->open >= CHANNELS_MAX)
        return false;
    struct channel **at = slot_of(conn, number);
    if (*at != NULL)
        return false;
    *c = (struct channel){.conn = conn, .number = number, .ops = ops};
    *at = c;
    conn->open++;
    return true;
}

static void unready(struct channel *c)
{
    if (c->ready_next == NULL)
        return;
    c->ready_prev->ready_next = c->ready_next;
    c->ready_next->ready_prev = c->ready_prev;
    c->ready_next = c->ready_prev = NULL;
}

void channel_close(struct channel *c)
{
    if (c->conn == NULL)
        return;
    unready(c);
    struct channel **at = slot_of(c->conn, c->number);
    *at = c->hash_next;
    c->conn->open--;
    c->conn = NULL;
}

void channel_ready(struct channel *c)
{
    if (c->conn == NULL || c->ready_next != NULL)
        return;
    struct channel *head = &c->conn->ready;
    c->ready_next = head;
    c->ready_prev = head->ready_prev;
    head->ready_prev->ready_next = c;
    head->ready_prev = c;
}

/* ---- ending */

static void lose_channels(struct conn *conn)
{
    for (unsigned i = 0; i < BUCKETS; i++) {
        while (conn->buckets[i] != NULL) {
            struct channel *c = conn->buckets[i];
            channel_close(c);
            c->ops->lost(c, false);
        }
    }
}

void conn_fail(struct conn *conn)
{
    if (conn->dead)
        return;
    conn->dead = true;
    some_dead = true;
    timer_stop(&conn->hello_timer);
    timer_stop(&conn->patience);
    watch_close(&conn->watch);
    if (!conn->authenticated)
        unauthenticated--;
    if (charge == conn)
        charge = NULL;
    if (adopted == conn)
        adopted = NULL;
    lose_channels(conn);
}

static void bury_dead(void)
{
    if (!some_dead)
        return;
    some_dead = false;
    for (struct conn **at = &all; *at != NULL;) {
        struct conn *conn = *at;
        if (!conn->dead) {
            at = &conn->next;
            continue;
        }
        *at = conn->next;
        buf_free(&conn->in);
        buf_free(&conn->out);
        free(conn);
    }
}

void conn_take_charge(struct conn *conn)
{
    if (charge == conn)
        return;
    if (charge != NULL)
        conn_fail(charge);
    charge = conn;
    conn->authenticated = true;
    unauthenticated--;
    timer_stop(&conn->hello_timer);
    conn->in.max = IN_BYTES;
}

static void patience_ends(struct timer *t)
{
    (void)t; /* the round that follows writes */
}

void conn_let_wait(struct conn *conn, size_t n)
{
    if (conn->out.len != n) /* something else goes out now anyway */
        return;
    conn->patient = n;
    timer_set(&conn->patience, PATIENCE_MS, patience_ends);
}

static bool is_patient(const struct conn *conn)
{
    return timer_is_set(&conn->patience) && conn->out.len <= conn->patient;
}

static bool flush(struct conn *conn)
{
    timer_stop(&conn->patience);
    while (conn->out.len > 0) {
        ssize_t n = send(conn->watch.fd, buf_head(&conn->out), conn->out.len, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0) {
            if (errno != EAGAIN && errno != EINTR)
                conn_fail(conn);
            return false;
        }
        buf_take(&conn->out, (size_t)n);
    }
    return true;
}

/* ---- reading */

static bool take_frame(struct conn *conn, const struct frame *f)
{
    if (!conn->authenticated)
        return f->type == T_HELLO && request_hello(conn, f);
    struct channel *c = *slot_of(conn, f->channel);
    if (f->type == T_CLOSE || f->type == T_CREDIT || f->type == T_INPUT || f->type == T_DATA || f->type == T_COMMIT) {
        if (f->flags & ~(f->type == T_INPUT ? FLAG_EOF : 0u))
            return false;
        if (c == NULL) /* it ended while the frame was on its way */
            return true;
        if (f->type != T_CLOSE)
            return c->ops->frame(c, f);
        channel_close(c);
        c->ops->lost(c, true);
        return true;
    }
    if (c != NULL) /* only a split START has several request frames on one channel */
        return f->type == T_START && c->ops->frame(c, f);
    return request_dispatch(conn, f);
}

static void parse(struct conn *conn)
{
    while (!conn->dead && conn->out.len < OUT_PAUSE) {
        struct frame f;
        long n = frame_decode(buf_head(&conn->in), conn->in.len, &f);
        if (n == 0 && conn->in.len >= FRAME_HEADER && FRAME_HEADER + f.len > conn->in.max)
            n = -1; /* more than an unauthenticated peer may send */
        if (n == 0)
            return;
        if (n < 0 || !take_frame(conn, &f)) {
            if (!conn->authenticated)
                (void)flush(conn); /* the ERROR that says why a HELLO was refused */
            conn_fail(conn);
            return;
        }
        if (!conn->dead)
            buf_take(&conn->in, (size_t)n);
    }
}

static bool read_some(struct conn *conn, size_t *budget)
{
    size_t want = conn->in.max - conn->in.len;
    if (want > FRAME_MAX)
        want = FRAME_MAX;
    if (want == 0)
        return false;
    uint8_t *at = buf_reserve(&conn->in, want);
    if (at == NULL) { /* no memory now: try again later */
        conn->in.failed = false;
        return false;
    }
    ssize_t n = recv(conn->watch.fd, at, want, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        conn_fail(conn);
        return false;
    }
    if (n < 0)
        return false;
    buf_commit(&conn->in, (size_t)n);
    *budget -= (size_t)n < *budget ? (size_t)n : *budget;
    return (size_t)n == want && *budget > 0;
}

static void read_frames(struct conn *conn)
{
    size_t budget = READ_BUDGET;
    bool more = true;
    while (more && !conn->dead && conn->out.len < OUT_PAUSE) {
        more = read_some(conn, &budget);
        parse(conn);
    }
}

/* ---- writing */

/* Each ready channel adds a frame and goes to the end of the line. */
static void fill(struct conn *conn)
{
    while (!conn->dead && conn->out.len < OUT_FILL && conn->ready.ready_next != &conn->ready) {
        struct channel *c = conn->ready.ready_next;
        unready(c);
        if (c->ops->pull(c))
            channel_ready(c);
    }
}

static void settle_watch(struct conn *conn)
{
    bool waiting = conn->out.len > 0 && !is_patient(conn);
    bool paused = conn->out.len >= OUT_PAUSE;
    watch_set(&conn->watch, (paused ? 0u : (uint32_t)EPOLLIN) | (waiting ? (uint32_t)EPOLLOUT : 0u));
}

static void service(struct conn *conn)
{
    size_t budget = WRITE_BUDGET;
    for (;;) {
        fill(conn);
        if (conn->out.failed)
            conn_fail(conn);
        size_t pending = conn->out.len;
        if (conn->dead || pending == 0 || is_patient(conn) || !flush(conn))
            break;
        if (pending >= budget) {
            loop_again();
            break;
        }
        budget -= pending;
    }
    if (conn->dead)
        return;
    /* Frames that waited in the input queue because the output queue was full. */
    if (conn->in.len >= FRAME_HEADER && conn->out.len < OUT_PAUSE) {
        size_t before = conn->in.len;
        parse(conn);
        if (conn->dead)
            return;
        if (conn->in.len != before)
            loop_again();
    }
    settle_watch(conn);
}

void conn_service(void)
{
    if (charge != NULL)
        service(charge);
    for (struct conn *conn = all; conn != NULL; conn = conn->next)
        if (!conn->dead && conn != charge)
            (void)flush(conn);
    bury_dead();
}

bool conn_is_idle(void)
{
    return charge == NULL || (charge->out.len == 0 && charge->ready.ready_next == &charge->ready);
}

/* ---- beginning */

static void conn_event(struct watch *w, uint32_t events)
{
    struct conn *conn = container_of(w, struct conn, watch);
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        read_frames(conn);
}

static void hello_late(struct timer *t)
{
    conn_fail(container_of(t, struct conn, hello_timer));
}

/* Over vsock anybody inside could connect too: only the host (CID 2) is let in. */
static bool peer_is_host(const struct sockaddr_storage *peer)
{
    if (peer->ss_family != AF_VSOCK)
        return true;
    struct sockaddr_vm vm;
    memcpy(&vm, peer, sizeof(vm));
    return vm.svm_cid == VMADDR_CID_HOST;
}

static void listen_resume(struct timer *t)
{
    (void)t;
    watch_set(&listener, EPOLLIN);
}

static struct conn *begin(int fd)
{
    struct conn *conn = calloc(1, sizeof(*conn));
    if (conn == NULL) {
        close(fd);
        return NULL;
    }
    if (watch_open(&conn->watch, fd, EPOLLIN, conn_event) < 0) { /* which closes it */
        free(conn);
        return NULL;
    }
    conn->ready.ready_next = conn->ready.ready_prev = &conn->ready;
    buf_init(&conn->in, HELLO_BYTES);
    buf_init(&conn->out, OUT_MAX);
    conn->next = all;
    all = conn;
    unauthenticated++;
    return conn;
}

/*
 * Nobody tells the host of a port that its connection ended. So nothing may end this one but the next: not a HELLO that
 * comes late, nor how many came before. What the last one was asked for is read first; nothing of it comes later.
 */
bool conn_adopt(int fd)
{
    struct conn *last = adopted;
    if (last != NULL) {
        read_frames(last);
        conn_fail(last);
    }
    return (adopted = begin(fd)) != NULL;
}

static void accept_one(struct watch *w, uint32_t events)
{
    (void)events;
    struct sockaddr_storage peer = {0};
    socklen_t peer_len = sizeof(peer);
    int fd = accept4(w->fd, (struct sockaddr *)&peer, &peer_len, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) { /* no spinning until there is room */
            watch_set(w, WATCH_PAUSED);
            timer_set(&listen_again, LISTEN_AGAIN_MS, listen_resume);
        }
        return;
    }
    if (!peer_is_host(&peer) || unauthenticated >= UNAUTHENTICATED_MAX) {
        close(fd);
        return;
    }
    struct conn *conn = begin(fd);
    if (conn != NULL)
        timer_set(&conn->hello_timer, HELLO_TIMEOUT_MS, hello_late);
}

int conn_listen(int fd)
{
    return watch_open(&listener, fd, EPOLLIN, accept_one);
}

/* ---- replies */

struct buf *conn_queue(struct conn *conn)
{
    return &conn->out;
}

void reply_ok(struct conn *conn, uint32_t channel)
{
    frame_end(&conn->out, frame_begin(&conn->out, T_OK, channel));
}

void reply_error(struct conn *conn, uint32_t channel, const char *code, int err, const char *message)
{
    put_error(&conn->out, channel, code, err, message);
}
