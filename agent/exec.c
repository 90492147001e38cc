/* SPDX-License-Identifier: Apache-2.0 */
/* The table of execs; how one starts and how it ends. */
#include "exec.h"

#include "cgroup.h"
#include "pty.h"
#include "spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define BUCKETS 1024u
#define RUNNING_MAX 4096u
#define ENDED_MAX 1024u
#define BUFFER_DEFAULT ((uint64_t)1 << 20)
#define BUFFER_MIN ((uint64_t)4 << 10)
#define BUFFER_MAX ((uint64_t)64 << 20)
#define KEEP_DEFAULT_MS 600000u
#define ROWS_DEFAULT 24u
#define COLS_DEFAULT 80u

bool exec_shutting_down;

static struct exec *first, *last;
static struct exec *ids[BUCKETS], *pids[BUCKETS];
static uint64_t sequence;
static bool frozen; /* the sandbox is paused */
static unsigned alive, ended; /* alive: not EXEC_ENDED */
static unsigned leaders;      /* not reaped yet */

/* ---- table */

static unsigned hash_id(const char *id)
{
    unsigned h = 2166136261u;
    for (; *id; id++)
        h = (h ^ (unsigned char)*id) * 16777619u;
    return h % BUCKETS;
}

struct exec *exec_find(const char *id)
{
    struct exec *ex = ids[hash_id(id)];
    while (ex != NULL && strcmp(ex->id, id) != 0)
        ex = ex->by_id;
    return ex;
}

struct exec *exec_after(uint64_t after)
{
    struct exec *ex = first;
    while (ex != NULL && ex->sequence <= after)
        ex = ex->next;
    return ex;
}

static void enter_table(struct exec *ex)
{
    struct exec **slot = &ids[hash_id(ex->id)];
    ex->by_id = *slot;
    *slot = ex;
    ex->sequence = ++sequence;
    ex->prev = last;
    *(last ? &last->next : &first) = ex;
    last = ex;
    alive++;
}

static void enter_pid(struct exec *ex)
{
    struct exec **slot = &pids[(unsigned)ex->pid % BUCKETS];
    ex->by_pid = *slot;
    *slot = ex;
    leaders++;
}

static struct exec *take_pid(pid_t pid)
{
    struct exec **at = &pids[(unsigned)pid % BUCKETS];
    while (*at != NULL && (*at)->pid != pid)
        at = &(*at)->by_pid;
    struct exec *ex = *at;
    if (ex == NULL)
        return NULL;
    *at = ex->by_pid;
    leaders--;
    return ex;
}

static void leave_table(struct exec *ex)
{
    struct exec **at = &ids[hash_id(ex->id)];
    while (*at != ex)
        at = &(*at)->by_id;
    *at = ex->by_id;
    *(ex->prev ? &ex->prev->next : &first) = ex->next;
    *(ex->next ? &ex->next->prev : &last) = ex->prev;
    if (ex->state == EXEC_ENDED)
        ended--;
    else
        alive--;
}

uint64_t exec_count_running(void)
{
    return alive;
}

unsigned exec_count_leaders(void)
{
    return leaders;
}

uint64_t exec_count_total(void)
{
    return sequence;
}

/* ---- making and freeing */

static struct exec *new_exec(const char *id)
{
    struct exec *ex = calloc(1, sizeof(*ex));
    if (ex == NULL)
        return NULL;
    snprintf(ex->id, sizeof(ex->id), "%s", id);
    ex->failure.fd = ex->in.watch.fd = ex->out[0].watch.fd = ex->out[1].watch.fd = -1;
    ex->out[0].exec = ex->out[1].exec = ex;
    return ex;
}

static void stop_timers(struct exec *ex)
{
    timer_stop(&ex->timeout);
    timer_stop(&ex->idle);
    timer_stop(&ex->hold);
    timer_stop(&ex->keep);
    timer_stop(&ex->retry);
}

static void free_exec(struct exec *ex)
{
    stop_timers(ex);
    watch_close(&ex->failure);
    ex->stdin_owner = NULL;
    input_close(ex);
    output_free(&ex->out[0]);
    output_free(&ex->out[1]);
    free(ex);
}

static void tell_and_close(struct reader *rd, const char *code, int err, const char *message)
{
    if (rd->channel.conn == NULL)
        return;
    reply_error(rd->channel.conn, rd->channel.number, code, err, message);
    channel_close(&rd->channel);
}

void exec_forget(struct exec *ex)
{
    tell_and_close(&ex->reader, "not-found", 0, "the exec was forgotten");
    tell_and_close(&ex->waiter, "not-found", 0, "the exec was forgotten");
    leave_table(ex);
    free_exec(ex);
}

/* ---- how it failed to start */

static bool is_known_code(const char *code)
{
    static const char *const known[] = {"no-such-user", "bad-cwd", "not-found", "not-executable", "spawn-failed"};
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (strcmp(code, known[i]) == 0)
            return true;
    return false;
}

static void report_failure(struct exec *ex)
{
    struct spawn_failure *f = &ex->failed;
    char message[160];
    f->code[sizeof(f->code) - 1] = 0;
    f->what[sizeof(f->what) - 1] = 0;
    if (f->err < 0 || f->err > 4095)
        f->err = 0;
    const char *code = is_known_code(f->code) ? f->code : "spawn-failed";
    snprintf(message, sizeof(message), "start: %s: %s", f->what, strerror(f->err));
    tell_and_close(&ex->reader, code, f->err, message);
    tell_and_close(&ex->waiter, code, f->err, message);
}

static void send_started(struct exec *ex)
{
    struct channel *c = ex->waiter.starter ? &ex->waiter.channel : &ex->reader.channel;
    if (c->conn == NULL || !(ex->waiter.starter || ex->reader.starter))
        return; /* the one that asked for the start has gone; an ATTACH was answered already */
    struct buf *b = conn_queue(c->conn);
    size_t begun = frame_begin(b, T_STARTED, c->number);
    put_u64(b, F_PID, (uint64_t)ex->pid);
    put_u64(b, F_CREDIT, input_credit(ex));
    frame_end(b, begun);
    /* Many commands end at once, and then STARTED, output and EXIT are one write. Not where somebody waits to type. */
    if (ex->reader.starter && !ex->pty && !ex->in.accepts)
        conn_let_wait(c->conn, b->len - begun);
}

static void mark_started(struct exec *ex)
{
    ex->state = EXEC_RUNNING;
    send_started(ex);
    if (ex->pty)
        output_poll(&ex->out[0]);
    reader_ready(ex);
}

/* Asks the failure pipe: end of file means that execve succeeded (close-on-exec). */
static void read_failure(struct exec *ex)
{
    ssize_t n = read(ex->failure.fd, &ex->failed, sizeof(ex->failed));
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    watch_close(&ex->failure);
    if (n == (ssize_t)sizeof(ex->failed))
        ex->stillborn = true; /* told when its process is reaped: then the ID is free again */
    else
        mark_started(ex);
}

static void failure_event(struct watch *w, uint32_t events)
{
    (void)events;
    read_failure(container_of(w, struct exec, failure));
}

/* ---- timeouts */

int exec_kill(struct exec *ex, enum exit_reason reason)
{
    if (ex->state > EXEC_RUNNING)
        return cgroup_kill(ex->id, -1);
    if (ex->reason == REASON_ITSELF)
        ex->reason = reason;
    int r = cgroup_kill(ex->id, ex->pid);
    int err = errno;
    (void)kill(ex->pid, SIGKILL); /* not reaped yet, so it is still this process */
    errno = err;
    return r;
}

static void timeout_fire(struct timer *t)
{
    (void)exec_kill(container_of(t, struct exec, timeout), REASON_TIMEOUT);
}

static void idle_fire(struct timer *t)
{
    struct exec *ex = container_of(t, struct exec, idle);
    uint64_t now = now_ms(), due = ex->last_output_ms + ex->idle_ms;
    if (output_stuck(ex)) { /* it does write; nobody lets us read */
        ex->last_output_ms = now;
        due = now + ex->idle_ms;
    }
    if (due > now)
        timer_set(t, due - now, idle_fire);
    else
        (void)exec_kill(ex, REASON_IDLE);
}

static void run_clocks(struct exec *ex)
{
    ex->last_output_ms = now_ms();
    if (ex->timeout_ms)
        timer_set(&ex->timeout, ex->timeout_left_ms, timeout_fire);
    if (ex->idle_ms)
        timer_set(&ex->idle, ex->idle_ms, idle_fire);
}

static void stop_clocks(struct exec *ex)
{
    uint64_t now = now_ms();
    if (timer_is_set(&ex->timeout))
        ex->timeout_left_ms = ex->timeout.at_ms > now ? ex->timeout.at_ms - now : 0;
    timer_stop(&ex->timeout);
    timer_stop(&ex->idle);
}

void exec_frozen(bool now)
{
    if (now == frozen)
        return;
    frozen = now;
    for (struct exec *ex = first; ex != NULL; ex = ex->next) {
        if (ex->state > EXEC_RUNNING)
            continue;
        if (now)
            stop_clocks(ex);
        else
            run_clocks(ex);
    }
}

static void start_timers(struct exec *ex)
{
    ex->timeout_left_ms = ex->timeout_ms;
    if (!frozen)
        run_clocks(ex);
}

/* ---- starting */

/* Descriptors of a start: ours stay with the exec's watches, theirs are closed when the child has them. */
struct files {
    int in[2], out[2], err[2], failure[2]; /* [0] read, [1] write */
    int master, master_in;
    int cgroup;
};

static void close_all(int *fds, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (fds[i] >= 0)
            close(fds[i]);
        fds[i] = -1;
    }
}

static int take(int *fd)
{
    int taken = *fd;
    *fd = -1;
    return taken;
}

static int open_pipe(int pipe[2], int ours)
{
    if (pipe2(pipe, O_CLOEXEC) < 0) {
        pipe[0] = pipe[1] = -1;
        return -1;
    }
    return fcntl(pipe[ours], F_SETFL, O_NONBLOCK);
}

static int open_files(struct files *f, const struct request *r, uint64_t flags)
{
    if (open_pipe(f->failure, 0) < 0)
        return -1;
    if (descriptors_are_scarce(f->failure[1])) {
        errno = EMFILE;
        return -1;
    }
    if (flags & START_PTY) {
        f->master = pty_open(request_num(r, F_ROWS, ROWS_DEFAULT), request_num(r, F_COLS, COLS_DEFAULT));
        if (f->master < 0)
            return -1;
        f->master_in = fcntl(f->master, F_DUPFD_CLOEXEC, 3);
        return f->master_in < 0 ? -1 : 0;
    }
    if (open_pipe(f->out, 0) < 0 || open_pipe(f->err, 0) < 0)
        return -1;
    return (flags & START_STDIN) && open_pipe(f->in, 1) < 0 ? -1 : 0;
}

/* The exec takes its ends; each is gone from *f even when this fails midway. */
static int adopt_files(struct exec *ex, struct files *f, size_t ring_max)
{
    if (ex->pty) {
        ex->out[1].done = true;
        /* Polled from STARTED on: before the child has opened its side, the master only reports a hang-up. */
        return output_open(ex, 0, take(&f->master), ring_max, false) < 0 ? -1 : input_open(ex, take(&f->master_in));
    }
    if (output_open(ex, 0, take(&f->out[0]), ring_max, true) < 0 || output_open(ex, 1, take(&f->err[0]), ring_max, true) < 0)
        return -1;
    return f->in[1] >= 0 ? input_open(ex, take(&f->in[1])) : 0;
}

static int launch(struct exec *ex, struct files *f, const struct request *r)
{
    struct spawn s = {.request = r,
                      .pty = ex->pty ? ex->out[0].watch.fd : -1,
                      .in = f->in[0] >= 0 ? f->in[0] : spawn_config.null_fd,
                      .out = f->out[1],
                      .err = f->err[1],
                      .failure = f->failure[1],
                      .cgroup = f->cgroup};
    ex->pid = spawn(&s);
    if (ex->pid < 0)
        return -1;
    ex->started_ns = wall_ns();
    close(take(&f->failure[1]));
    return watch_open(&ex->failure, take(&f->failure[0]), EPOLLIN, failure_event);
}

static void configure(struct exec *ex, const struct request *r)
{
    ex->pty = request_num(r, F_FLAGS, 0) & START_PTY;
    ex->timeout_ms = request_num(r, F_TIMEOUT_MS, 0);
    ex->idle_ms = request_num(r, F_IDLE_TIMEOUT_MS, 0);
    ex->keep_ms = request_num(r, F_KEEP_MS, KEEP_DEFAULT_MS);
}

static size_t ring_bytes(const struct request *r)
{
    uint64_t n = request_num(r, F_BUFFER_BYTES, BUFFER_DEFAULT);
    n = n < BUFFER_MIN ? BUFFER_MIN : n > BUFFER_MAX ? BUFFER_MAX : n;
    return (size_t)((n + 4095) & ~(uint64_t)4095);
}

static int set_limits(const struct exec *ex, const struct request *r, char doing[CGROUP_NAME])
{
    struct span limit;
    for (size_t at = 0; request_next(r, F_CGROUP, &at, &limit);)
        if (cgroup_limit(ex->id, limit, doing) < 0)
            return -1;
    snprintf(doing, CGROUP_NAME, "start");
    return 0;
}

/* `doing` is what failed, for the message. */
static int begin(struct exec *ex, struct files *f, const struct request *r, char doing[CGROUP_NAME])
{
    if (open_files(f, r, request_num(r, F_FLAGS, 0)) < 0 || adopt_files(ex, f, ring_bytes(r)) < 0)
        return -1;
    f->cgroup = cgroup_make(ex->id);
    if (f->cgroup == -1)
        return -1;
    if (set_limits(ex, r, doing) == 0 && launch(ex, f, r) == 0)
        return 0;
    int err = errno;
    if (ex->pid > 0) /* born, but we cannot follow it: its end is an orphan's */
        (void)kill(ex->pid, SIGKILL);
    cgroup_release(ex->id);
    errno = err;
    return -1;
}

static bool has_nul(struct span s)
{
    return s.len > 0 && memchr(s.data, 0, s.len) != NULL;
}

static const char *fault_in(const struct request *r)
{
    size_t at = 0, args = 0;
    struct span s;
    for (; request_next(r, F_ARGV, &at, &s); args++)
        if (has_nul(s))
            return "ARGV with a zero byte";
    if (args == 0)
        return "no ARGV";
    for (at = 0; request_next(r, F_ENV, &at, &s);)
        if (has_nul(s) || s.len == 0 || s.data[0] == '=' || memchr(s.data, '=', s.len) == NULL)
            return "ENV is not NAME=VALUE";
    for (at = 0; request_next(r, F_RLIMIT, &at, &s);)
        if (s.len != 20)
            return "RLIMIT is not 20 bytes";
    if (has_nul(r->span[F_CWD]) || has_nul(r->span[F_USER]))
        return "CWD or USER with a zero byte";
    return NULL;
}

/* The exec in the table, or NULL with the refusal sent. */
static struct exec *admit(struct conn *conn, uint32_t channel, const struct request *r)
{
    char id[ID_MAX + 1];
    const char *fault = request_name(r, F_ID, id) ? fault_in(r) : "bad ID";
    struct exec *ex = NULL;
    if (fault != NULL)
        reply_error(conn, channel, "invalid", EINVAL, fault);
    else if (exec_find(id) != NULL)
        reply_error(conn, channel, "exists", EEXIST, "an exec with this ID is kept");
    else if (exec_shutting_down)
        reply_error(conn, channel, "spawn-failed", ESHUTDOWN, "the sandbox is shutting down");
    else if (alive >= RUNNING_MAX)
        reply_error(conn, channel, "spawn-failed", EAGAIN, "too many execs at once");
    else if ((ex = new_exec(id)) == NULL)
        reply_error(conn, channel, "spawn-failed", ENOMEM, "out of memory");
    return ex;
}

static bool open_reader(struct exec *ex, struct conn *conn, uint32_t channel, const struct request *r)
{
    bool output = request_num(r, F_FLAGS, 0) & START_ATTACH;
    if (reader_open(ex, conn, channel, output, request_num(r, F_CREDIT, 0)))
        return true;
    reply_error(conn, channel, "spawn-failed", EAGAIN, "too many channels");
    return false;
}

void exec_start(struct conn *conn, uint32_t channel, const struct request *r)
{
    struct exec *ex = admit(conn, channel, r);
    if (ex == NULL)
        return;
    configure(ex, r);
    struct files f;
    char doing[CGROUP_NAME] = "start";
    memset(&f, 0xff, sizeof(f)); /* every descriptor -1 */
    int failed = begin(ex, &f, r, doing), err = errno;
    close_all((int *)&f, sizeof(f) / sizeof(int));
    if (failed) {
        const char *code = err == EEXIST ? "exists" : "spawn-failed";
        char message[128];
        snprintf(message, sizeof(message), "%s: %s", doing, err == EEXIST ? "processes of an earlier exec with this ID live on" : strerror(err));
        reply_error(conn, channel, code, err, message);
        free_exec(ex);
        return;
    }
    enter_table(ex);
    enter_pid(ex);
    start_timers(ex);
    if (!open_reader(ex, conn, channel, r))
        (void)exec_kill(ex, REASON_KILLED);
}

/* ---- ending */

static void keep_over(struct timer *t)
{
    exec_forget(container_of(t, struct exec, keep));
}

static bool has_reader(const struct exec *ex)
{
    return ex->reader.channel.conn != NULL || ex->waiter.channel.conn != NULL;
}

void exec_reader_gone(struct exec *ex)
{
    if (ex->state == EXEC_ENDED && !has_reader(ex))
        timer_set(&ex->keep, ex->keep_ms, keep_over);
}

static void evict_oldest(void)
{
    struct exec *ex = first;
    while (ex != NULL && (ex->state != EXEC_ENDED || has_reader(ex)))
        ex = ex->next;
    if (ex != NULL)
        exec_forget(ex);
}

bool exec_shed_output(void)
{
    for (struct exec *ex = first; ex != NULL; ex = ex->next) {
        if (ex->state != EXEC_ENDED || has_reader(ex) || ex->out[0].ring.cap + ex->out[1].ring.cap == 0)
            continue;
        for (int i = 0; i < 2; i++) {
            struct output *out = &ex->out[i];
            out->dropped += out->ring.end - (out->seen > out->ring.start ? out->seen : out->ring.start);
            ring_free(&out->ring);
            out->sent = out->ring.end;
        }
        return true;
    }
    return false;
}

void exec_check_end(struct exec *ex)
{
    if (ex->state != EXEC_DRAINING || !ex->out[0].done || !ex->out[1].done)
        return;
    ex->state = EXEC_ENDED;
    alive--;
    ended++;
    timer_stop(&ex->hold);
    timer_stop(&ex->retry);
    ex->held = false;
    ring_trim(&ex->out[0].ring);
    ring_trim(&ex->out[1].ring);
    reader_ready(ex);
    exec_reader_gone(ex);
    if (ended > ENDED_MAX)
        evict_oldest();
}

static void leader_ended(struct exec *ex, int status, const struct rusage *usage)
{
    ex->state = EXEC_DRAINING;
    ex->status = status;
    ex->usage = *usage;
    ex->finished_ns = wall_ns();
    timer_stop(&ex->timeout);
    timer_stop(&ex->idle);
    ex->oom_kills = cgroup_oom_kills(ex->id);
    if (ex->reason == REASON_ITSELF && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && cgroup_oom_killed(ex->id))
        ex->reason = REASON_OOM;
    cgroup_release(ex->id);
    input_close(ex);
    output_drain(ex, &ex->out[0]);
    output_drain(ex, &ex->out[1]);
    exec_check_end(ex);
}

bool exec_reaped(pid_t pid, int status, const struct rusage *usage)
{
    struct exec *ex = take_pid(pid);
    if (ex == NULL)
        return false;
    if (ex->state == EXEC_STARTING && !ex->stillborn)
        read_failure(ex); /* the child is gone: the pipe holds all it will ever hold */
    if (ex->stillborn) {
        report_failure(ex);
        cgroup_release(ex->id);
        leave_table(ex);
        free_exec(ex);
        return true;
    }
    leader_ended(ex, status, usage);
    return true;
}

/* ---- all of them */

void exec_signal_all(int sig)
{
    for (struct exec *ex = first; ex != NULL; ex = ex->next)
        if (ex->state <= EXEC_RUNNING)
            (void)cgroup_signal(ex->id, ex->pid, sig);
    cgroup_signal_lingering(sig);
}

void exec_kill_all(enum exit_reason reason)
{
    for (struct exec *ex = first; ex != NULL; ex = ex->next) {
        if (ex->state > EXEC_RUNNING)
            continue;
        if (ex->reason == REASON_ITSELF)
            ex->reason = reason;
        if (!cgroup_present())
            (void)cgroup_kill(ex->id, ex->pid);
    }
    cgroup_kill_all();
}

static uint64_t microseconds(struct timeval t)
{
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_usec;
}

void exec_put_record(struct buf *b, const struct exec *ex)
{
    bool over = ex->state >= EXEC_DRAINING, signalled = WIFSIGNALED(ex->status);
    put_text(b, F_ID, ex->id);
    put_u64(b, F_KIND, over ? (signalled ? KIND_SIGNALLED : KIND_EXITED) : 0);
    put_u64(b, F_STATUS, over ? (uint64_t)(signalled ? WTERMSIG(ex->status) : WEXITSTATUS(ex->status)) : 0);
    put_u64(b, F_REASON, over ? (uint64_t)ex->reason : 0);
    put_u64(b, F_TOTAL_OUT, ex->out[0].ring.end);
    put_u64(b, F_TOTAL_ERR, ex->out[1].ring.end);
    put_u64(b, F_DROPPED_OUT, ex->out[0].dropped);
    put_u64(b, F_DROPPED_ERR, ex->out[1].dropped);
    put_u64(b, F_CPU_USER_US, microseconds(ex->usage.ru_utime));
    put_u64(b, F_CPU_SYSTEM_US, microseconds(ex->usage.ru_stime));
    put_u64(b, F_MAX_RSS_KIB, (uint64_t)ex->usage.ru_maxrss);
    put_u64(b, F_STARTED_NS, ex->started_ns);
    put_u64(b, F_FINISHED_NS, ex->finished_ns);
    put_u64(b, F_OOM_KILLS, ex->oom_kills);
}
