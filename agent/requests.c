/* SPDX-License-Identifier: Apache-2.0 */
/* What each request means. */
#include "cgroup.h"
#include "conn.h"
#include "dial.h"
#include "exec.h"
#include "files.h"
#include "machine.h"
#include "shutdown.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "pty.h"

#define JOBS_MAX 64u
#define LIST_STEP 32
#define PARTIAL_MAX ((size_t)8 << 20) /* unfinished STARTs together */
#define GRACE_DEFAULT_MS 5000u

static uint64_t generation;
bool requests_set_clock; /* the agent owns the machine's clock (a virtual machine) */

/* ---- HELLO */

static uint64_t count_processes(void)
{
    DIR *proc = opendir("/proc");
    if (proc == NULL)
        return 0;
    uint64_t n = 0;
    for (struct dirent *e; (e = readdir(proc)) != NULL;)
        n += isdigit((unsigned char)e->d_name[0]) ? 1 : 0;
    closedir(proc);
    return n;
}

static void set_clock(uint64_t ns)
{
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    uint64_t now = wall_ns(), off = now > ns ? now - ns : ns - now;
    if (requests_set_clock && ns > 0 && off > 100000000u)
        (void)clock_settime(CLOCK_REALTIME, &t);
}

bool request_hello(struct conn *conn, const struct frame *f)
{
    struct request r;
    if (f->flags != 0 || !request_decode(f->payload, f->len, &r) || !request_has(&r, F_GENERATION))
        return false;
    if (request_num(&r, F_PROTOCOL, 0) != PROTOCOL_VERSION) {
        reply_error(conn, f->channel, "invalid", EPROTONOSUPPORT, "protocol version");
        return false;
    }
    if (r.num[F_GENERATION] < generation) {
        reply_error(conn, f->channel, "stale-generation", 0, "a newer daemon has been here");
        return false;
    }
    generation = r.num[F_GENERATION];
    set_clock(request_num(&r, F_TIME_NS, 0));
    conn_take_charge(conn);
    cgroup_look_again();
    struct buf *b = conn_queue(conn);
    size_t begun = frame_begin(b, T_HELLO_OK, f->channel);
    put_u64(b, F_PROTOCOL, PROTOCOL_VERSION);
    put_text(b, F_VERSION, AGENT_VERSION);
    put_u64(b, F_GENERATION, generation);
    put_u64(b, F_PID_COUNT, count_processes());
    frame_end(b, begun);
    return true;
}

/* ---- requests split over frames */

struct partial {
    struct channel channel;
    struct buf fields;
};

static size_t partial_bytes;

static void partial_free(struct partial *p)
{
    partial_bytes -= p->fields.len;
    buf_free(&p->fields);
    free(p);
}

static void partial_lost(struct channel *c, bool by_host)
{
    (void)by_host;
    partial_free(container_of(c, struct partial, channel));
}

static bool partial_pull(struct channel *c)
{
    (void)c;
    return false;
}

static bool start_decoded(struct conn *conn, uint32_t channel, const uint8_t *data, size_t len)
{
    struct request r;
    if (!request_decode(data, len, &r))
        return false;
    exec_start(conn, channel, &r);
    return true;
}

static bool partial_frame(struct channel *c, const struct frame *f)
{
    struct partial *p = container_of(c, struct partial, channel);
    if (f->type != T_START || (f->flags & ~FLAG_MORE) || partial_bytes + f->len > PARTIAL_MAX)
        return false;
    if (!buf_add(&p->fields, f->payload, f->len))
        return false;
    partial_bytes += f->len;
    if (f->flags & FLAG_MORE)
        return true;
    struct conn *conn = c->conn;
    uint32_t number = c->number;
    channel_close(c);
    bool ok = start_decoded(conn, number, buf_head(&p->fields), p->fields.len);
    partial_free(p);
    return ok;
}

static const struct channel_ops partial_ops = {partial_pull, partial_frame, partial_lost};

static bool request_start(struct conn *conn, const struct frame *f)
{
    if (f->flags & ~FLAG_MORE)
        return false;
    if (!(f->flags & FLAG_MORE))
        return start_decoded(conn, f->channel, f->payload, f->len);
    struct partial *p = calloc(1, sizeof(*p));
    if (p == NULL)
        return false;
    buf_init(&p->fields, REQUEST_MAX);
    if (channel_open(&p->channel, conn, f->channel, &partial_ops) && partial_bytes + f->len <= PARTIAL_MAX &&
        buf_add(&p->fields, f->payload, f->len)) {
        partial_bytes += f->len;
        return true;
    }
    channel_close(&p->channel);
    partial_free(p);
    return false;
}

/* ---- LIST and PEEK: answers of many frames, given as the queue has room */

struct job {
    struct channel channel;
    bool peek;
    uint64_t after; /* LIST: sequence of the last one told */
    char id[ID_MAX + 1];
    unsigned stream;
    uint64_t offset, left; /* PEEK */
};

static unsigned jobs;

static void job_end(struct job *j)
{
    jobs--;
    free(j);
}

static void job_lost(struct channel *c, bool by_host)
{
    (void)by_host;
    job_end(container_of(c, struct job, channel));
}

static void put_info(struct buf *b, uint32_t channel, const struct exec *ex)
{
    size_t begun = frame_begin(b, T_INFO, channel);
    put_u64(b, F_RUNNING, ex->state < EXEC_DRAINING);
    put_u64(b, F_PID, (uint64_t)ex->pid);
    put_u64(b, F_OFFSET_OUT, ex->out[0].ring.end);
    put_u64(b, F_OFFSET_ERR, ex->out[1].ring.end);
    exec_put_record(b, ex);
    frame_end(b, begun);
}

static bool list_step(struct job *j, struct buf *b)
{
    struct exec *ex = exec_after(j->after);
    for (int i = 0; i < LIST_STEP && ex != NULL; i++, ex = ex->next) {
        put_info(b, j->channel.number, ex);
        j->after = ex->sequence;
    }
    if (ex != NULL)
        return true;
    frame_end(b, frame_begin(b, T_OK, j->channel.number));
    return false;
}

static bool peek_step(struct job *j, struct buf *b)
{
    const struct exec *ex = exec_find(j->id);
    if (ex == NULL) {
        put_error(b, j->channel.number, "not-found", 0, "the exec was forgotten");
        return false;
    }
    const struct ring *ring = &ex->out[j->stream - STREAM_OUT].ring;
    if (j->offset < ring->start)
        j->offset = ring->start;
    uint64_t n = j->offset < ring->end && j->left > 0
                     ? output_frame(b, j->channel.number, j->stream, ring, j->offset, j->left)
                     : 0;
    j->offset += n;
    j->left -= n;
    if (n > 0)
        return true;
    size_t begun = frame_begin(b, T_OK, j->channel.number);
    put_u64(b, F_START, ring->start);
    put_u64(b, F_END, ring->end);
    frame_end(b, begun);
    return false;
}

static bool job_pull(struct channel *c)
{
    struct job *j = container_of(c, struct job, channel);
    struct buf *b = conn_queue(c->conn);
    if (j->peek ? peek_step(j, b) : list_step(j, b))
        return true;
    channel_close(c);
    job_end(j);
    return false;
}

static bool job_frame(struct channel *c, const struct frame *f)
{
    (void)c;
    (void)f;
    return false;
}

static const struct channel_ops job_ops = {job_pull, job_frame, job_lost};

static struct job *job_begin(struct conn *conn, uint32_t channel)
{
    struct job *j = jobs < JOBS_MAX ? calloc(1, sizeof(*j)) : NULL;
    if (j != NULL && !channel_open(&j->channel, conn, channel, &job_ops)) {
        free(j);
        j = NULL;
    }
    if (j == NULL) {
        reply_error(conn, channel, "busy", EAGAIN, "too many requests at once");
        return NULL;
    }
    jobs++;
    channel_ready(&j->channel);
    return j;
}

/* ---- simple requests */

static struct exec *named_exec(struct conn *conn, uint32_t channel, const struct request *r)
{
    char id[ID_MAX + 1];
    struct exec *ex = request_name(r, F_ID, id) ? exec_find(id) : NULL;
    if (ex == NULL)
        reply_error(conn, channel, "not-found", 0, "no such exec");
    return ex;
}

static void reply_errno(struct conn *conn, uint32_t channel, const char *code)
{
    int err = errno;
    reply_error(conn, channel, code, err, strerror(err));
}

static void do_list(struct conn *conn, uint32_t channel, const struct request *r)
{
    if (!request_has(r, F_ID)) {
        (void)job_begin(conn, channel);
        return;
    }
    const struct exec *ex = named_exec(conn, channel, r);
    if (ex == NULL)
        return;
    put_info(conn_queue(conn), channel, ex);
    reply_ok(conn, channel);
}

static void do_peek(struct conn *conn, uint32_t channel, const struct request *r)
{
    const struct exec *ex = named_exec(conn, channel, r);
    uint64_t stream = request_num(r, F_STREAM, STREAM_OUT);
    if (ex == NULL)
        return;
    if (stream != STREAM_OUT && stream != STREAM_ERR) {
        reply_error(conn, channel, "invalid", EINVAL, "STREAM is 1 or 2");
        return;
    }
    struct job *j = job_begin(conn, channel);
    if (j == NULL)
        return;
    j->peek = true;
    memcpy(j->id, ex->id, sizeof(j->id));
    j->stream = (unsigned)stream;
    j->offset = request_num(r, F_OFFSET, 0);
    j->left = request_num(r, F_BYTES, UINT64_MAX);
}

static void do_attach(struct conn *conn, uint32_t channel, const struct request *r)
{
    struct exec *ex = named_exec(conn, channel, r);
    if (ex != NULL)
        reader_attach(ex, conn, channel, r);
}

static void do_resize(struct conn *conn, uint32_t channel, const struct request *r)
{
    struct exec *ex = named_exec(conn, channel, r);
    if (ex == NULL)
        return;
    if (!ex->pty || ex->out[0].watch.fd < 0)
        reply_error(conn, channel, "invalid", ENOTTY, "no terminal");
    else if (pty_resize(ex->out[0].watch.fd, request_num(r, F_ROWS, 0), request_num(r, F_COLS, 0)) < 0)
        reply_errno(conn, channel, "invalid");
    else
        reply_ok(conn, channel);
}

static int send_signal(struct exec *ex, int sig, bool everything)
{
    if (everything && sig == SIGKILL)
        return exec_kill(ex, REASON_KILLED);
    if (everything)
        return cgroup_signal(ex->id, ex->pid, sig);
    if (ex->state > EXEC_RUNNING) {
        errno = ESRCH;
        return -1;
    }
    return kill(-ex->pid, sig);
}

/* An exec may be forgotten while processes it left behind live on. */
static bool signal_leftover(const struct request *r, int sig, bool everything)
{
    char id[ID_MAX + 1];
    if (!everything || !request_name(r, F_ID, id) || exec_find(id) != NULL || !cgroup_lingers(id))
        return false;
    return (sig == SIGKILL ? cgroup_kill(id, -1) : cgroup_signal(id, -1, sig)) == 0;
}

static void do_signal(struct conn *conn, uint32_t channel, const struct request *r)
{
    uint64_t sig = request_num(r, F_SIGNAL, 0), scope = request_num(r, F_SCOPE, 0);
    if (sig < 1 || sig > 64 || scope > 1) {
        reply_error(conn, channel, "invalid", EINVAL, "SIGNAL or SCOPE");
        return;
    }
    if (signal_leftover(r, (int)sig, scope == 1)) {
        reply_ok(conn, channel);
        return;
    }
    struct exec *ex = named_exec(conn, channel, r);
    if (ex == NULL)
        return;
    if (send_signal(ex, (int)sig, scope == 1) == 0)
        reply_ok(conn, channel);
    else
        reply_errno(conn, channel, errno == ESRCH || errno == ENOENT ? "not-found" : "io-error");
}

static void do_forget(struct conn *conn, uint32_t channel, const struct request *r)
{
    struct exec *ex = named_exec(conn, channel, r);
    if (ex == NULL)
        return;
    if (ex->state < EXEC_DRAINING) {
        reply_error(conn, channel, "busy", EBUSY, "the exec is running");
        return;
    }
    exec_forget(ex);
    reply_ok(conn, channel);
}

static void do_usage(struct conn *conn, uint32_t channel, const struct request *r)
{
    (void)r;
    struct buf *b = conn_queue(conn);
    uint64_t user = 0, system = 0;
    size_t begun = frame_begin(b, T_INFO, channel);
    put_u64(b, F_PID_COUNT, count_processes());
    put_u64(b, F_EXECS_RUNNING, exec_count_running());
    put_u64(b, F_EXECS_TOTAL, exec_count_total());
    if (cgroup_cpu_us(&user, &system)) {
        put_u64(b, F_CPU_USER_US, user);
        put_u64(b, F_CPU_SYSTEM_US, system);
    }
    struct rusage ended;
    if (getrusage(RUSAGE_CHILDREN, &ended) == 0)
        put_u64(b, F_MAX_RSS_KIB, (uint64_t)ended.ru_maxrss);
    frame_end(b, begun);
    reply_ok(conn, channel);
}

static void do_ping(struct conn *conn, uint32_t channel, const struct request *r)
{
    (void)r;
    reply_ok(conn, channel);
}

static void do_shutdown(struct conn *conn, uint32_t channel, const struct request *r)
{
    reply_ok(conn, channel);
    shutdown_begin(request_num(r, F_GRACE_MS, GRACE_DEFAULT_MS));
}

typedef void request_handler(struct conn *conn, uint32_t channel, const struct request *r);

static request_handler *handler_of(uint8_t type)
{
    switch (type) {
    case T_ATTACH:
        return do_attach;
    case T_RESIZE:
        return do_resize;
    case T_SIGNAL:
        return do_signal;
    case T_LIST:
        return do_list;
    case T_FORGET:
        return do_forget;
    case T_USAGE:
        return do_usage;
    case T_PING:
        return do_ping;
    case T_SHUTDOWN:
        return do_shutdown;
    case T_PEEK:
        return do_peek;
    case T_FREEZE:
        return machine_freeze;
    case T_LIMIT:
        return machine_limit;
    case T_RENEW:
        return machine_renew;
    case T_DIAL:
        return dial_begin;
    case T_NETWORK:
        return machine_network;
    default:
        return NULL;
    }
}

bool request_dispatch(struct conn *conn, const struct frame *f)
{
    struct request r;
    if (f->channel == 0 && f->type != T_PING)
        return false;
    if (f->type == T_START)
        return request_start(conn, f);
    if (f->flags != 0)
        return false;
    if (f->type >= T_FILE_GET && f->type <= T_FILE_RENAME) {
        files_request(conn, f);
        return true;
    }
    request_handler *handle = handler_of(f->type);
    if (handle == NULL || !request_decode(f->payload, f->len, &r))
        return false;
    handle(conn, f->channel, &r);
    return true;
}
