/* SPDX-License-Identifier: Apache-2.0 */
/* Connections: framing, channels, the bounded write queue and who may fill it next. What requests mean is in requests.c. */
#ifndef DSEC_CONN_H
#define DSEC_CONN_H

#include "fields.h"
#include "loop.h"

struct conn;
struct channel;

struct channel_ops {
    /* Adds about one frame to the connection's queue; true: there is more. Called in turn with the other ready channels. */
    bool (*pull)(struct channel *c);
    /* A frame of the host for this channel; false: it broke the protocol. */
    bool (*frame)(struct channel *c, const struct frame *f);
    /* The host abandoned the channel (by_host) or the connection ended. The channel is closed already. */
    void (*lost)(struct channel *c, bool by_host);
};

/* Lives inside the thing it serves. */
struct channel {
    struct conn *conn; /* NULL: closed */
    uint32_t number;
    const struct channel_ops *ops;
    struct channel *hash_next;
    struct channel *ready_next, *ready_prev; /* NULL: not ready */
};

int conn_listen(int fd);
/* The one stream of a port, whose host has shown who it is: a connection from now on, and the one before it has ended.
 * false: closed, there is no memory. */
bool conn_adopt(int fd);
/* Once per round: fills and writes the queue of the connection in charge. */
void conn_service(void);
bool conn_is_idle(void); /* nothing left to write */

bool channel_open(struct channel *c, struct conn *conn, uint32_t number, const struct channel_ops *ops);
void channel_close(struct channel *c);
void channel_ready(struct channel *c); /* ops->pull has something to send */

/* The connection's queue, for building frames in. */
struct buf *conn_queue(struct conn *conn);
/* The n bytes just queued need not go out at once: what follows within two milliseconds saves the host a wake-up. */
void conn_let_wait(struct conn *conn, size_t n);
/* Gives up on the connection; it is freed at the end of the round. */
void conn_fail(struct conn *conn);
void reply_ok(struct conn *conn, uint32_t channel);
void reply_error(struct conn *conn, uint32_t channel, const char *code, int err, const char *message);

/* A request was accepted as HELLO: this connection is now in charge, the one before is closed. */
void conn_take_charge(struct conn *conn);

/* requests.c: one frame. False: malformed, close. */
bool request_hello(struct conn *conn, const struct frame *f);
bool request_dispatch(struct conn *conn, const struct frame *f);

#endif
