/* SPDX-License-Identifier: Apache-2.0 */
/* Readers: channels that follow an exec. */
#include "exec.h"

#include <errno.h>

#define HOLD_MS 10000

static struct reader *reader_of(struct channel *c)
{
    return container_of(c, struct reader, channel);
}

bool reader_holds(const struct exec *ex)
{
    return ex->reader.channel.conn != NULL || ex->held;
}

void reader_ready(struct exec *ex)
{
    channel_ready(&ex->reader.channel);
    channel_ready(&ex->waiter.channel);
}

/* ---- sending */

static bool send_output(struct reader *rd, int i)
{
    struct exec *ex = rd->exec;
    struct output *out = &ex->out[i];
    uint64_t n = out->ring.end - out->sent;
    if (n > out->credit)
        n = out->credit;
    if (n == 0)
        return false;
    n = output_frame(conn_queue(rd->channel.conn), rd->channel.number, STREAM_OUT + (unsigned)i, &out->ring, out->sent, n);
    out->sent += n;
    out->credit -= n;
    if (out->seen < out->sent)
        out->seen = out->sent;
    return n > 0;
}

static bool all_sent(const struct exec *ex)
{
    return ex->out[0].sent == ex->out[0].ring.end && ex->out[1].sent == ex->out[1].ring.end;
}

static void send_exit(struct reader *rd)
{
    struct exec *ex = rd->exec;
    struct buf *b = conn_queue(rd->channel.conn);
    size_t begun = frame_begin(b, T_EXIT, rd->channel.number);
    exec_put_record(b, ex);
    frame_end(b, begun);
    channel_close(&rd->channel);
    exec_reader_gone(ex);
}

static bool reader_pull(struct channel *c)
{
    struct reader *rd = reader_of(c);
    struct exec *ex = rd->exec;
    if (ex->state == EXEC_STARTING)
        return false;
    if (rd->output) {
        bool first = rd->err_next;
        rd->err_next = !first;
        if (send_output(rd, first) || send_output(rd, !first)) {
            output_resume(ex);
            return true;
        }
    }
    if (ex->state == EXEC_ENDED && (!rd->output || all_sent(ex)))
        send_exit(rd);
    return false;
}

/* ---- receiving */

static bool take_credit(struct exec *ex, const struct frame *f)
{
    struct request r;
    if (!request_decode(f->payload, f->len, &r) || !request_has(&r, F_BYTES))
        return false;
    uint64_t stream = request_num(&r, F_STREAM, 0), bytes = r.num[F_BYTES];
    if (stream != STREAM_OUT && stream != STREAM_ERR)
        return false;
    struct output *out = &ex->out[stream - STREAM_OUT];
    out->credit = bytes > UINT64_MAX - out->credit ? UINT64_MAX : out->credit + bytes;
    if (out->window < out->credit)
        out->window = out->credit;
    reader_ready(ex);
    return true;
}

static bool reader_frame(struct channel *c, const struct frame *f)
{
    struct reader *rd = reader_of(c);
    if (f->type == T_INPUT)
        return input_frame(rd->exec, c, f);
    return f->type == T_CREDIT && rd->output && take_credit(rd->exec, f);
}

/* ---- coming and going */

static void hold_over(struct timer *t)
{
    struct exec *ex = container_of(t, struct exec, hold);
    ex->held = false;
    output_resume(ex);
}

static void reader_lost(struct channel *c, bool by_host)
{
    struct reader *rd = reader_of(c);
    struct exec *ex = rd->exec;
    if (ex->stdin_owner == c)
        ex->stdin_owner = NULL;
    if (rd->output && !by_host && ex->state != EXEC_ENDED) {
        ex->held = true;
        timer_set(&ex->hold, HOLD_MS, hold_over);
    }
    exec_reader_gone(ex);
    if (rd->output && by_host)
        output_resume(ex);
}

static const struct channel_ops reader_ops = {reader_pull, reader_frame, reader_lost};

static struct channel *open_channel(struct reader *rd, struct exec *ex, struct conn *conn, uint32_t channel, bool output)
{
    if (rd->channel.conn != NULL) {
        reply_error(rd->channel.conn, rd->channel.number, "detached", 0, "another reader took over");
        channel_close(&rd->channel);
    }
    rd->exec = ex;
    rd->output = output;
    rd->starter = false;
    rd->err_next = false;
    return channel_open(&rd->channel, conn, channel, &reader_ops) ? &rd->channel : NULL;
}

static void begin_reading(struct output *out, uint64_t offset, uint64_t credit)
{
    if (offset < out->ring.start)
        offset = out->ring.start;
    out->sent = offset < out->ring.end ? offset : out->ring.end;
    out->credit = out->window = credit;
}

bool reader_open(struct exec *ex, struct conn *conn, uint32_t channel, bool output, uint64_t credit)
{
    struct channel *c = open_channel(output ? &ex->reader : &ex->waiter, ex, conn, channel, output);
    if (c == NULL)
        return false;
    (output ? &ex->reader : &ex->waiter)->starter = true;
    ex->stdin_owner = c;
    for (int i = 0; output && i < 2; i++)
        begin_reading(&ex->out[i], 0, credit);
    return true;
}

void reader_attach(struct exec *ex, struct conn *conn, uint32_t channel, const struct request *r)
{
    struct channel *c = open_channel(&ex->reader, ex, conn, channel, true);
    if (c == NULL) {
        reply_error(conn, channel, "busy", EAGAIN, "too many channels");
        output_resume(ex); /* nobody reads now */
        return;
    }
    timer_stop(&ex->hold);
    timer_stop(&ex->keep);
    ex->held = false;
    ex->stdin_owner = c;
    ex->in.owed = 0;
    begin_reading(&ex->out[0], request_num(r, F_OFFSET_OUT, 0), request_num(r, F_CREDIT, 0));
    begin_reading(&ex->out[1], request_num(r, F_OFFSET_ERR, 0), request_num(r, F_CREDIT, 0));
    struct buf *b = conn_queue(conn);
    size_t begun = frame_begin(b, T_ATTACHED, channel);
    put_u64(b, F_RUNNING, ex->state < EXEC_DRAINING);
    put_u64(b, F_OFFSET_OUT, ex->out[0].sent);
    put_u64(b, F_OFFSET_ERR, ex->out[1].sent);
    put_u64(b, F_CREDIT, input_credit(ex));
    frame_end(b, begun);
    output_resume(ex);
    reader_ready(ex);
}
