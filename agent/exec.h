/* SPDX-License-Identifier: Apache-2.0 */
/* Execs: what one is, the table of all, how one starts and ends. Output is in output.c, stdin in input.c, readers in attach.c. */
#ifndef DSEC_EXEC_H
#define DSEC_EXEC_H

#include "conn.h"
#include "ring.h"
#include "spawn.h"

#include <sys/resource.h>
#include <sys/types.h>

#define INPUT_WINDOW ((size_t)256 << 10)

struct exec;

enum exec_state {
    EXEC_STARTING, /* forked, execve not done yet */
    EXEC_RUNNING,
    EXEC_DRAINING, /* the leader has ended; the pipes' rest is being read */
    EXEC_ENDED,
};

struct output {
    struct exec *exec;
    struct watch watch; /* fd -1: closed or handed to a drain */
    struct ring ring;
    uint64_t sent;    /* the reader's next byte */
    uint64_t seen;    /* highest offset any reader was sent */
    uint64_t dropped; /* bytes no reader ever got */
    uint64_t credit;  /* bytes the reader still lets us send */
    uint64_t window;  /* most it ever had outstanding: how far back it may come again */
    uint64_t drain_left; /* while draining: bytes to read still */
    bool done;        /* nothing more will be added to the ring */
    bool paused;      /* no room: the pipe is left alone */
};

struct input {
    struct watch watch; /* with a pty: its own duplicate of the master */
    struct buf pending;
    size_t owed;    /* taken off since the last CREDIT */
    bool accepts;   /* the exec has a stdin that is fed over the channel */
    bool eof;       /* close when pending is empty */
};

/* A channel on which the exec's end is told; with `output`, its output too. */
struct reader {
    struct channel channel;
    struct exec *exec;
    bool output;
    bool starter;  /* opened by START: STARTED goes here */
    bool err_next; /* whose turn it is: stdout's or stderr's */
};

struct exec {
    struct exec *next, *prev;   /* all, in order of start */
    struct exec *by_id, *by_pid; /* hash chains */
    uint64_t sequence;
    char id[ID_MAX + 1];
    enum exec_state state;
    pid_t pid;
    bool pty;
    bool held; /* the reader's connection broke; it may come back for its bytes */
    bool stillborn; /* its process never became the command */
    struct watch failure;
    struct spawn_failure failed;
    struct output out[2]; /* stdout (or the terminal), stderr */
    struct input in;
    struct reader reader, waiter;
    struct channel *stdin_owner;
    struct timer timeout, idle, hold, keep, retry;
    uint64_t timeout_ms, idle_ms, keep_ms, last_output_ms;
    uint64_t timeout_left_ms; /* while frozen */
    enum exit_reason reason;
    int status; /* as wait gives it */
    struct rusage usage;
    uint64_t oom_kills;
    uint64_t started_ns, finished_ns;
};

extern bool exec_shutting_down;

/* exec.c */
/* START with its complete field list; answers on the channel. */
void exec_start(struct conn *conn, uint32_t channel, const struct request *r);
struct exec *exec_find(const char *id);
struct exec *exec_after(uint64_t sequence); /* the next in order of start, or NULL */
void exec_forget(struct exec *ex);
/* True when pid was an exec's leader. */
bool exec_reaped(pid_t pid, int status, const struct rusage *usage);
int exec_kill(struct exec *ex, enum exit_reason reason);
/* Ends when both outputs are done. */
void exec_check_end(struct exec *ex);
void exec_reader_gone(struct exec *ex); /* starts the time it is kept */
uint64_t exec_count_running(void);
uint64_t exec_count_total(void);
unsigned exec_count_leaders(void); /* processes not reaped yet */
void exec_frozen(bool now); /* paused: the clocks of timeouts stand still */
void exec_signal_all(int sig);
void exec_kill_all(enum exit_reason reason);
/* Frees the output of ended execs until some memory was found; false when there was none. */
bool exec_shed_output(void);
void exec_put_record(struct buf *b, const struct exec *ex); /* the EXIT fields */

/* output.c */
int output_open(struct exec *ex, int stream, int fd, size_t max, bool polled);
void output_poll(struct output *out);     /* begin reading */
void output_drain(struct exec *ex, struct output *out); /* the leader has ended */
void output_resume(struct exec *ex);      /* room may have appeared */
void output_free(struct output *out);
bool output_stuck(const struct exec *ex); /* waiting for the reader, with bytes in the pipe */
/* One OUTPUT frame of at most max bytes from offset; the number of bytes put. */
size_t output_frame(struct buf *b, uint32_t channel, unsigned stream, const struct ring *ring, uint64_t offset, uint64_t max);

/* input.c */
int input_open(struct exec *ex, int fd);
void input_close(struct exec *ex);
bool input_frame(struct exec *ex, struct channel *from, const struct frame *f);
size_t input_credit(const struct exec *ex); /* bytes a new owner may send */

/* attach.c */
bool reader_open(struct exec *ex, struct conn *conn, uint32_t channel, bool output, uint64_t credit);
void reader_attach(struct exec *ex, struct conn *conn, uint32_t channel, const struct request *r);
void reader_ready(struct exec *ex); /* output, or the end, may be there to send */
bool reader_holds(const struct exec *ex);

#endif
