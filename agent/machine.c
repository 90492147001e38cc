/* SPDX-License-Identifier: Apache-2.0 */
#include "machine.h"

#include "cgroup.h"
#include "spawn.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define CHECK_MS 2
#define FREEZE_MS 8000

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

/* A FREEZE that is answered when all commands stand still, or run. */
struct freeze {
    struct channel channel;
    struct timer timer;
    bool wanted;
    uint64_t deadline_ms;
};

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
    free(z);
}

static const struct channel_ops freeze_ops = {freeze_pull, freeze_frame, freeze_lost};

static void freeze_check(struct timer *t)
{
    struct freeze *z = container_of(t, struct freeze, timer);
    bool reached = cgroup_is_frozen() == z->wanted;
    if (!reached && now_ms() < z->deadline_ms) {
        timer_set(t, CHECK_MS, freeze_check);
        return;
    }
    struct conn *conn = z->channel.conn;
    uint32_t number = z->channel.number;
    channel_close(&z->channel);
    free(z);
    if (reached)
        reply_ok(conn, number);
    else
        reply_failed(conn, number, ETIMEDOUT);
}

void machine_freeze(struct conn *conn, uint32_t channel, const struct request *r)
{
    if (refused(conn, channel))
        return;
    bool wanted = request_num(r, F_FLAGS, 0) & 1;
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
    z->deadline_ms = now_ms() + FREEZE_MS;
    freeze_check(&z->timer);
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
