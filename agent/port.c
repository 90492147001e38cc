/* SPDX-License-Identifier: Apache-2.0 */
#include "port.h"

#include "buf.h"
#include "conn.h"
#include "fields.h"
#include "loop.h"
#include "machine.h"
#include "proto.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/*
 * A port is one stream in each direction for the machine's whole life. A host that comes anew cannot know where in a
 * frame the one before it stopped, and nobody may notice that it came: the machine may have stood still meanwhile. So a
 * connection begins with a prelude, wherever it stands in the stream: MAGIC, the key, a nonce. The key is what the
 * first one brought; later preludes have to have the same, so that no file that is uploaded can hold one. We answer
 * with the same bytes, and what the host reads before them belongs to others. Behind the preludes each connection is a
 * socket pair, of which conn.c has the other end.
 */
#define MAGIC "\177dsec-connect-1\n"
#define MAGIC_BYTES (sizeof(MAGIC) - 1)
#define KEY_BYTES 16u
#define PRELUDE_BYTES (MAGIC_BYTES + 2 * KEY_BYTES)
#define QUEUE_BYTES ((size_t)128 << 10)
#define READ_BYTES ((size_t)32 << 10) /* the driver takes no more in one call */
#define HOLD_MS 5                     /* for the rest of what may be a prelude */
#define GONE_MS 5000                  /* without a host or a byte of it, until the connection counts as ended */

static struct watch port, inner; /* inner.fd is -1 between connections */
static struct buf inbound, outbound;
static struct timer hold, gone;
static bool let_through; /* what looked like a prelude's beginning was none */
static uint8_t key[KEY_BYTES];
static bool have_key;
static uint8_t frame_size[4]; /* of the frame that is on its way to the host */
static size_t frame_at;       /* how much of it has come; 0 between frames */
static bool owns_machine; /* the kernel below is ours alone */

static void pump(void);

static void end_inner(void)
{
    watch_close(&inner);
    buf_free(&outbound);
}

/* No host for long: nobody reads, and the execs' readers are to know. What waits for room goes nowhere now. */
static void gone_ends(struct timer *t)
{
    struct pollfd state = {.fd = port.fd};
    (void)t;
    if (poll(&state, 1, 0) == 1 && (state.revents & POLLHUP) != 0)
        end_inner();
    pump();
}

static void inner_ready(struct watch *w, uint32_t events)
{
    (void)w;
    (void)events;
    pump();
}

static void begin(const uint8_t *prelude)
{
    int pair[2];
    end_inner();
    timer_stop(&gone);
    frame_at = 0;
    memcpy(key, prelude + MAGIC_BYTES, KEY_BYTES);
    have_key = true;
    /* The host drew both, and nobody else has seen them: what a machine has instead of a device for random numbers. */
    if (owns_machine)
        (void)machine_stir((struct span){prelude + MAGIC_BYTES, 2 * KEY_BYTES});
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0)
        return; /* the host hears nothing, and tries again */
    if (!conn_adopt(pair[1])) {
        close(pair[0]);
        return;
    }
    if (watch_open(&inner, pair[0], EPOLLIN, inner_ready) < 0)
        return;
    (void)buf_add(&outbound, prelude, PRELUDE_BYTES);
}

/* How many bytes from the start are certainly no part of a prelude. */
static size_t plain_bytes(void)
{
    const uint8_t *data = buf_head(&inbound);
    for (size_t i = 0; i < inbound.len; i++) {
        size_t left = inbound.len - i, n = left < MAGIC_BYTES ? left : MAGIC_BYTES;
        if (data[i] == (uint8_t)MAGIC[0] && memcmp(data + i, MAGIC, n) == 0 &&
            (left < MAGIC_BYTES + KEY_BYTES || !have_key || memcmp(data + i + MAGIC_BYTES, key, KEY_BYTES) == 0))
            return i;
    }
    return inbound.len;
}

static void hold_ends(struct timer *t)
{
    (void)t;
    let_through = true;
    pump();
}

static bool deliver(size_t n)
{
    if (inner.fd < 0) {
        buf_take(&inbound, n);
        return true;
    }
    ssize_t sent = send(inner.fd, buf_head(&inbound), n, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) { /* conn.c gave it up: its last words are still to come */
        buf_take(&inbound, n);
        return true;
    }
    if (sent > 0)
        buf_take(&inbound, (size_t)sent);
    return sent == (ssize_t)n;
}

/* Everything that may go on to the connection, or begins another; false: no room there now. */
static bool sort_inbound(void)
{
    while (inbound.len > 0) {
        size_t n = plain_bytes();
        if (n == 0 && inbound.len >= PRELUDE_BYTES) {
            begin(buf_head(&inbound));
            buf_take(&inbound, PRELUDE_BYTES);
            continue;
        }
        if (n == 0 && !let_through) {
            if (!timer_is_set(&hold))
                timer_set(&hold, HOLD_MS, hold_ends);
            return true;
        }
        let_through = false;
        if (!deliver(n ? n : 1))
            return false;
    }
    return true;
}

/* Into a queue from a descriptor; false: nothing more now. `ended`: it has no other side. */
static bool fill(int fd, struct buf *queue, bool *ended)
{
    if (queue->len + READ_BYTES > QUEUE_BYTES)
        return false;
    uint8_t *at = buf_reserve(queue, READ_BYTES);
    if (at == NULL) {
        queue->failed = false;
        return false;
    }
    ssize_t n = read(fd, at, READ_BYTES);
    *ended = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
    if (n <= 0)
        return false;
    buf_commit(queue, (size_t)n);
    return true;
}

static bool drain_outbound(void)
{
    while (outbound.len > 0) {
        size_t n = outbound.len < READ_BYTES ? outbound.len : READ_BYTES;
        ssize_t written = write(port.fd, buf_head(&outbound), n);
        if (written <= 0)
            return false;
        buf_take(&outbound, (size_t)written);
    }
    return true;
}

/* Where in a frame the host is with what goes to it. */
static void follow(const uint8_t *p, size_t n)
{
    while (n > 0) {
        if (frame_at < sizeof(frame_size)) {
            frame_size[frame_at++] = *p++;
            n--;
            continue;
        }
        size_t whole = FRAME_HEADER + load_u32(frame_size), take = whole - frame_at;
        take = take < n ? take : n;
        p += take;
        n -= take;
        frame_at = frame_at + take == whole ? 0 : frame_at + take;
    }
}

static bool fill_outbound(bool *ended)
{
    size_t before = outbound.len;
    bool more = fill(inner.fd, &outbound, ended);
    follow(buf_head(&outbound) + before, outbound.len - before);
    return more;
}

/*
 * conn.c gave the connection up, which nothing but a frame can tell the host. In the middle of another one there is no
 * place for it: then the host finds out by asking.
 */
static void tell_end(void)
{
    watch_close(&inner);
    if (frame_at == 0)
        put_error(&outbound, 0, "ended", 0, "the agent gave the connection up");
    (void)drain_outbound();
}

static void pump(void)
{
    bool ended = false, room = sort_inbound();
    while (room && fill(port.fd, &inbound, &ended)) {
        timer_stop(&hold);
        timer_stop(&gone);
        room = sort_inbound();
    }
    /*
     * That the host left or came is told beside the stream, and later than what it wrote: a connection may have begun
     * since, and its answer may still wait here. So the end of the stream ends none at once.
     */
    if (ended && inner.fd >= 0 && !timer_is_set(&gone))
        timer_set(&gone, GONE_MS, gone_ends);
    ended = false;
    bool flowing = drain_outbound();
    while (inner.fd >= 0 && flowing && fill_outbound(&ended))
        flowing = drain_outbound();
    if (ended)
        tell_end();
    if (inner.fd < 0)
        return;
    uint32_t in = outbound.len + READ_BYTES > QUEUE_BYTES || !flowing ? 0u : (uint32_t)EPOLLIN;
    uint32_t out = room ? 0u : (uint32_t)EPOLLOUT;
    watch_set(&inner, (in | out) ? (in | out) : WATCH_PAUSED);
}

static void port_ready(struct watch *w, uint32_t events)
{
    (void)w;
    (void)events;
    pump();
}

/* ---- finding it */

static bool has_name(const char *device, const char *name)
{
    char path[300], text[128];
    snprintf(path, sizeof(path), "/sys/class/virtio-ports/%s/name", device);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, text, sizeof(text) - 1);
    close(fd);
    size_t len = strlen(name);
    return n == (ssize_t)len + 1 && memcmp(text, name, len) == 0;
}

static int find(const char *name)
{
    char path[300];
    int fd = -1;
    DIR *dir = opendir("/sys/class/virtio-ports");
    if (dir == NULL)
        return -1;
    for (struct dirent *e; fd < 0 && (e = readdir(dir)) != NULL;) {
        if (e->d_name[0] == '.' || !has_name(e->d_name, name))
            continue;
        snprintf(path, sizeof(path), "/dev/%s", e->d_name);
        fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
    }
    closedir(dir);
    return fd;
}

int port_serve(int fd)
{
    inner.fd = -1;
    buf_init(&inbound, QUEUE_BYTES);
    buf_init(&outbound, QUEUE_BYTES);
    /* By edges: while no host is there it hangs up for ever. The driver wakes us for every change. */
    return watch_open(&port, fd, EPOLLIN | EPOLLOUT | (uint32_t)EPOLLET, port_ready);
}

int port_open(const char *name, int wait_ms)
{
    const struct timespec poll = {.tv_nsec = 2000000};
    int fd;
    for (; (fd = find(name)) < 0 && wait_ms > 0; wait_ms -= 2)
        nanosleep(&poll, NULL);
    if (fd < 0) {
        errno = ENODEV;
        return -1;
    }
    owns_machine = true;
    return port_serve(fd);
}
