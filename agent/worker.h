/* SPDX-License-Identifier: Apache-2.0 */
/* Inside a worker process: it serves one file request as the request's USER, then exits. It may block, and it may die. */
#ifndef DSEC_WORKER_H
#define DSEC_WORKER_H

#include "fields.h"

#include <limits.h>
#include <sys/stat.h>

/* argument: the request's struct frame. */
void worker_main(int fd, void *argument);

struct worker {
    int fd; /* to the agent, a message socket */
    const struct request *request;
    struct buf out;
    char path[PATH_MAX];
    unsigned record;        /* which of many files is at hand, from 1; a failure names it */
    void (*clean_up)(void); /* before exiting on any failure; may be NULL */
};

extern struct worker worker;

/* Sends what was put into worker.out. A lost agent ends the process (after clean_up). */
void worker_flush(void);
/* The next frame from the host, valid until the next call; false when there will be none (or, without wait, is none now). */
bool worker_receive(struct frame *f, bool wait);
_Noreturn void worker_ok(void);
_Noreturn void worker_fail(const char *code, int err, const char *what);
_Noreturn void worker_fail_errno(const char *what); /* the code follows from errno */
_Noreturn void worker_abandon(void);                /* nobody listens any more */

/* The protocol's fields of one file; target is a symlink's, or NULL. */
void put_stat(struct buf *b, const struct stat *st, const char *target);
uint64_t mtime_ns(const struct stat *st);
void make_parents(char *path);

/* file_read.c */
_Noreturn void file_get(void);
_Noreturn void file_stat(void);
_Noreturn void file_list(void);
/* file_put.c */
_Noreturn void file_put(void);
/* file_tree.c */
_Noreturn void file_remove(void);
_Noreturn void file_mkdir(void);
_Noreturn void file_rename(void);

#endif
