/* SPDX-License-Identifier: Apache-2.0 */
/* The agent never touches a path of the sandbox itself: a path can be slow, and can lead anywhere. A worker takes the request over, and
 * the two exchange the very frames of the protocol, one or more to a message of a socket pair. */
#include "files.h"

#include "spawn.h"
#include "worker.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define WORKERS_MAX 128
#define TO_WORKER_MAX ((size_t)768 << 10) /* what credit allows, with room for small frames' headers */
/* How long a worker may live on when nobody waits for it: time to take back what it began, or, when only the
 * connection was cut, to end what it was asked for. */
#define FAREWELL_MS 5000
#define UNHEARD_MS 60000

struct hired {
    pid_t pid;     /* 0: the slot is free */
    uint64_t turn; /* counts those who had the slot */
    struct timer patience;
};

struct transfer {
    struct channel channel;
    struct watch watch;
    struct buf to_worker;
    struct hired *slot; /* of its worker, as long as turn is the same */
    uint64_t turn;
};

static struct hired workers[WORKERS_MAX];

static struct hired *free_slot(void)
{
    for (struct hired *w = workers; w < workers + WORKERS_MAX; w++) {
        if (w->pid == 0)
            return w;
    }
    return NULL;
}

bool files_reaped(pid_t pid)
{
    for (struct hired *w = workers; w < workers + WORKERS_MAX; w++) {
        if (w->pid != pid)
            continue;
        timer_stop(&w->patience);
        w->pid = 0;
        return true;
    }
    return false;
}

void files_kill_all(void)
{
    for (struct hired *w = workers; w < workers + WORKERS_MAX; w++) {
        if (w->pid != 0)
            (void)kill(w->pid, SIGKILL);
    }
}

static void lose_patience(struct timer *t)
{
    (void)kill(container_of(t, struct hired, patience)->pid, SIGKILL);
}

/* A worker runs as a user of the sandbox, so that user's processes can stop it: unless it is driven, it would keep its slot for ever. */
static void dismiss(struct hired *w, uint64_t turn, uint64_t in_ms)
{
    if (w->pid == 0 || w->turn != turn)
        return; /* reaped already */
    (void)kill(w->pid, SIGCONT);
    timer_set(&w->patience, in_ms, lose_patience);
}

static void transfer_free(struct transfer *t, uint64_t patience_ms)
{
    dismiss(t->slot, t->turn, patience_ms);
    watch_close(&t->watch);
    buf_free(&t->to_worker);
    free(t);
}

/* ---- from the worker */

static void set_events(struct transfer *t, bool readable)
{
    watch_set(&t->watch, (readable ? (uint32_t)EPOLLIN : WATCH_PAUSED) | (t->to_worker.len > 0 ? (uint32_t)EPOLLOUT : 0u));
}

static bool is_answer(uint8_t type)
{
    return type == T_INFO || type == T_DATA || type == T_READY || type == T_CREDIT || type == T_OK || type == T_ERROR;
}

enum message { MESSAGE_BAD, MESSAGE_PART, MESSAGE_FINAL };

/* Sets the channel of every frame in a message. The worker runs as a user of the sandbox: what it says is checked. */
static enum message address(uint8_t *data, size_t len, uint32_t channel)
{
    enum message kind = MESSAGE_BAD;
    while (len > 0) {
        struct frame f;
        long n = frame_decode(data, len, &f);
        if (n <= 0 || !is_answer(f.type) || kind == MESSAGE_FINAL)
            return MESSAGE_BAD;
        store_u32(data + 8, channel);
        kind = f.type == T_OK || f.type == T_ERROR ? MESSAGE_FINAL : MESSAGE_PART;
        data += n;
        len -= (size_t)n;
    }
    return kind;
}

static bool transfer_end(struct transfer *t, const char *fault)
{
    if (fault != NULL)
        reply_error(t->channel.conn, t->channel.number, "io-error", EIO, fault);
    channel_close(&t->channel);
    transfer_free(t, FAREWELL_MS);
    return false;
}

/* A worker that ended with frames of ours unread resets the socket: that error comes before its last words, which are still there. */
static ssize_t receive(const struct transfer *t, uint8_t *at)
{
    ssize_t n = recv(t->watch.fd, at, FRAME_MAX, MSG_DONTWAIT);
    return n < 0 && errno == ECONNRESET ? recv(t->watch.fd, at, FRAME_MAX, MSG_DONTWAIT) : n;
}

static bool transfer_pull(struct channel *c)
{
    struct transfer *t = container_of(c, struct transfer, channel);
    struct buf *b = conn_queue(c->conn);
    uint8_t *at = buf_reserve(b, FRAME_MAX);
    if (at == NULL)
        return false;
    ssize_t n = receive(t, at);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        set_events(t, true);
        return false;
    }
    if (n <= 0)
        return transfer_end(t, "the worker died");
    enum message kind = address(at, (size_t)n, c->number);
    if (kind == MESSAGE_BAD)
        return transfer_end(t, "the worker made no sense");
    buf_commit(b, (size_t)n);
    return kind == MESSAGE_FINAL ? transfer_end(t, NULL) : true;
}

/* ---- to the worker */

/* One frame, one message. A worker that has gone is noticed by reading. */
static void push(struct transfer *t)
{
    struct frame f;
    for (long n; (n = frame_decode(buf_head(&t->to_worker), t->to_worker.len, &f)) > 0; buf_take(&t->to_worker, (size_t)n)) {
        ssize_t sent = send(t->watch.fd, buf_head(&t->to_worker), (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && (errno == EAGAIN || errno == EINTR))
            break;
    }
    set_events(t, t->watch.events & EPOLLIN);
}

static bool transfer_frame(struct channel *c, const struct frame *f)
{
    struct transfer *t = container_of(c, struct transfer, channel);
    if (f->flags != 0 || (f->type != T_DATA && f->type != T_COMMIT && f->type != T_CREDIT))
        return false;
    if (t->to_worker.len + FRAME_HEADER + f->len > TO_WORKER_MAX)
        return false; /* far more than the credit */
    uint8_t header[FRAME_HEADER] = {0};
    store_u32(header, (uint32_t)f->len);
    header[4] = f->type;
    if (!buf_add(&t->to_worker, header, sizeof(header)) || !buf_add(&t->to_worker, f->payload, f->len)) {
        (void)transfer_end(t, "out of memory");
        return true;
    }
    push(t);
    return true;
}

static void transfer_event(struct watch *w, uint32_t events)
{
    struct transfer *t = container_of(w, struct transfer, watch);
    if (events & EPOLLOUT)
        push(t);
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        set_events(t, false); /* until the channel has had its turn and found nothing more */
        channel_ready(&t->channel);
    }
}

static void transfer_lost(struct channel *c, bool by_host)
{
    struct transfer *t = container_of(c, struct transfer, channel);
    static const uint8_t farewell[FRAME_HEADER] = {0, 0, 0, 0, T_CLOSE};
    if (by_host) /* given up on purpose: nothing is to be kept. Else the worker sees the end of the socket. */
        (void)!send(t->watch.fd, farewell, sizeof(farewell), MSG_DONTWAIT | MSG_NOSIGNAL);
    transfer_free(t, by_host ? FAREWELL_MS : UNHEARD_MS);
}

static const struct channel_ops transfer_ops = {transfer_pull, transfer_frame, transfer_lost};

/* ---- beginning */

/* The descriptor to a new worker, which is in the slot, or -1 with errno. */
static int hire(struct hired *slot, const struct frame *f)
{
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return -1;
    if (descriptors_are_scarce(pair[1])) {
        close(pair[0]);
        close(pair[1]);
        errno = EMFILE;
        return -1;
    }
    struct frame request = *f;
    pid_t pid = spawn_worker(pair[1], worker_main, &request);
    int err = errno;
    close(pair[1]);
    if (pid < 0) {
        close(pair[0]);
        errno = err;
        return -1;
    }
    slot->pid = pid;
    slot->turn++;
    return pair[0];
}

static int transfer_begin(struct conn *conn, struct hired *slot, const struct frame *f)
{
    struct transfer *t = calloc(1, sizeof(*t));
    if (t == NULL)
        return -1;
    buf_init(&t->to_worker, TO_WORKER_MAX);
    int fd = hire(slot, f);
    t->slot = slot;
    t->turn = slot->turn;
    if (fd >= 0 && watch_open(&t->watch, fd, EPOLLIN, transfer_event) == 0) {
        if (channel_open(&t->channel, conn, f->channel, &transfer_ops))
            return 0;
        watch_close(&t->watch);
        errno = EAGAIN;
    }
    int err = errno;
    if (fd >= 0)
        dismiss(slot, slot->turn, FAREWELL_MS);
    free(t);
    errno = err;
    return -1;
}

void files_request(struct conn *conn, const struct frame *f)
{
    struct hired *slot = free_slot();
    if (slot == NULL)
        reply_error(conn, f->channel, "busy", EAGAIN, "too many file requests at once");
    else if (transfer_begin(conn, slot, f) < 0)
        reply_error(conn, f->channel, "io-error", errno, "no worker");
}
