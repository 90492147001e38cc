/* SPDX-License-Identifier: Apache-2.0 */
#include "machine.h"

#include "cgroup.h"
#include "guest.h"
#include "net.h"
#include "spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fs.h>
#include <linux/random.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define ENTROPY_MIN 32u
#define ENTROPY_MAX 256u

#define CHECK_MS 2
#define FREEZE_MS 8000
#define SETTLE_MS 20000
#define FREEZE_STOP 1u
#define FREEZE_SETTLE 2u

static bool refused(struct conn *conn, uint32_t channel)
{
    if (!spawn_config.container && cgroup_present())
        return false;
    reply_error(conn, channel, "invalid", EPERM, "for virtual machines only");
    return true;
}

static void reply_failed(struct conn *conn, uint32_t channel, int err)
{
    reply_error(conn, channel, "io-error", err, strerror(err));
}

/* A FREEZE that is answered when all commands stand still, or run; and, if asked for, the disk is as they left it. */
struct freeze {
    struct channel channel;
    struct timer timer;
    bool wanted, settle;
    int settling; /* its other end closes when the disk has settled; -1 before and without */
    uint64_t deadline_ms;
};

/*
 * What was written goes to the disk, and what was deleted is given back, so that a copy of the disk holds the former
 * and not the latter. It may take long, so a child does it; the reaper finds it like any orphan. fstrim(8)
 */
static int settle_disk(void)
{
    int ends[2];
    if (guest_disk() < 0 || pipe2(ends, O_CLOEXEC | O_NONBLOCK) < 0)
        return -1;
    pid_t child = fork();
    if (child == 0) {
        struct fstrim_range all = {.len = UINT64_MAX};
        (void)syncfs(guest_disk());
        (void)syscall(SYS_ioctl, guest_disk(), FITRIM, &all); /* which musl's ioctl() takes for no int */
        _exit(0);
    }
    close(ends[1]);
    if (child > 0)
        return ends[0];
    close(ends[0]);
    return -1;
}

static void freeze_free(struct freeze *z)
{
    if (z->settling >= 0)
        close(z->settling);
    free(z);
}

static bool freeze_pull(struct channel *c)
{
    (void)c;
    return false;
}

static bool freeze_frame(struct channel *c, const struct frame *f)
{
    (void)c;
    (void)f;
    return false;
}

static void freeze_lost(struct channel *c, bool by_host)
{
    (void)by_host;
    struct freeze *z = container_of(c, struct freeze, channel);
    timer_stop(&z->timer);
    freeze_free(z);
}

static const struct channel_ops freeze_ops = {freeze_pull, freeze_frame, freeze_lost};

static void freeze_check(struct timer *t)
{
    struct freeze *z = container_of(t, struct freeze, timer);
    bool reached = cgroup_is_frozen() == z->wanted;
    if (reached && z->settle) {
        z->settle = false;
        z->settling = settle_disk();
        z->deadline_ms = now_ms() + SETTLE_MS;
    }
    char none;
    bool settled = z->settling < 0 || read(z->settling, &none, 1) == 0;
    if ((!reached || !settled) && now_ms() < z->deadline_ms) {
        timer_set(t, CHECK_MS, freeze_check);
        return;
    }
    struct conn *conn = z->channel.conn;
    uint32_t number = z->channel.number;
    channel_close(&z->channel);
    freeze_free(z);
    if (reached)
        reply_ok(conn, number);
    else
        reply_failed(conn, number, ETIMEDOUT);
}

void machine_freeze(struct conn *conn, uint32_t channel, const struct request *r)
{
    if (refused(conn, channel))
        return;
    uint64_t flags = request_num(r, F_FLAGS, 0);
    bool wanted = flags & FREEZE_STOP;
    if (cgroup_freeze(wanted) < 0) {
        reply_failed(conn, channel, errno);
        return;
    }
    struct freeze *z = calloc(1, sizeof(*z));
    if (z == NULL || !channel_open(&z->channel, conn, channel, &freeze_ops)) {
        free(z);
        reply_error(conn, channel, "busy", EAGAIN, "too many requests at once");
        return;
    }
    z->wanted = wanted;
    z->settle = wanted && (flags & FREEZE_SETTLE);
    z->settling = -1;
    z->deadline_ms = now_ms() + FREEZE_MS;
    freeze_check(&z->timer);
}

/* ---- RENEW */

/* Until then two copies draw the same random numbers. random(4) */
int machine_stir(struct span entropy)
{
    union {
        struct rand_pool_info info;
        uint8_t bytes[sizeof(struct rand_pool_info) + ENTROPY_MAX];
    } pool;
    size_t n = entropy.len < ENTROPY_MAX ? entropy.len : ENTROPY_MAX;
    pool.info.entropy_count = (int)(8 * n);
    pool.info.buf_size = (int)n;
    memcpy(pool.info.buf, entropy.data, n);
    int fd = open("/dev/urandom", O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return -1;
    int r = ioctl(fd, RNDADDENTROPY, &pool.info) < 0 || ioctl(fd, RNDRESEEDCRNG) < 0 ? -1 : 0;
    close(fd);
    return r;
}

/* machine-id(5). Where there is none nothing depends on one. */
static void renew_machine_id(void)
{
    uint8_t raw[16];
    char text[sizeof(raw) * 2 + 2];
    int fd = open("/etc/machine-id", O_WRONLY | O_TRUNC | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0 || getrandom(raw, sizeof(raw), 0) != (ssize_t)sizeof(raw)) {
        if (fd >= 0)
            close(fd);
        return;
    }
    for (size_t i = 0; i < sizeof(raw); i++)
        snprintf(text + 2 * i, 3, "%02x", raw[i]);
    text[sizeof(text) - 2] = '\n';
    (void)!write(fd, text, sizeof(text) - 1);
    close(fd);
}

void machine_renew(struct conn *conn, uint32_t channel, const struct request *r)
{
    char name[HOST_NAME_MAX + 1];
    if (refused(conn, channel))
        return;
    uint64_t ns = request_num(r, F_TIME_NS, 0);
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    if (!request_has(r, F_TARGET) || r->span[F_TARGET].len < ENTROPY_MIN || ns == 0 ||
        !request_string(r, F_NAME, name, sizeof(name))) {
        reply_error(conn, channel, "invalid", EINVAL, "TARGET (entropy), TIME_NS and NAME are needed");
        return;
    }
    if (machine_stir(r->span[F_TARGET]) < 0 || clock_settime(CLOCK_REALTIME, &t) < 0 || sethostname(name, strlen(name)) < 0) {
        reply_failed(conn, channel, errno);
        return;
    }
    renew_machine_id();
    reply_ok(conn, channel);
}

void machine_network(struct conn *conn, uint32_t channel, const struct request *r)
{
    char device[IFNAMSIZ];
    if (refused(conn, channel))
        return;
    if (!request_string(r, F_NAME, device, sizeof(device)) || !request_has(r, F_TARGET))
        reply_error(conn, channel, "invalid", EINVAL, "NAME and TARGET are needed");
    else if (net_configure(device, r->span[F_TARGET]) < 0)
        reply_failed(conn, channel, errno);
    else
        reply_ok(conn, channel);
}

void machine_limit(struct conn *conn, uint32_t channel, const struct request *r)
{
    if (refused(conn, channel))
        return;
    if (cgroup_limit_pids(request_num(r, F_PID_COUNT, 0)) < 0)
        reply_failed(conn, channel, errno);
    else
        reply_ok(conn, channel);
}
