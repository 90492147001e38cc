/* SPDX-License-Identifier: Apache-2.0 */
/* Starting a process for an exec: the fork, and everything the child does until execve. */
#ifndef DSEC_SPAWN_H
#define DSEC_SPAWN_H

#include "fields.h"

#include <sys/types.h>

/* What the child says when it cannot become the command. Anybody may have written it: check before use. */
struct spawn_failure {
    char code[16];
    int err;
    char what[64];
};

struct spawn {
    const struct request *request;
    int pty;        /* the master, or -1 */
    int in, out, err; /* the child's ends; unused with a pty */
    int failure;    /* write end of the failure pipe */
    int cgroup;     /* directory to be born in, or -1 */
};

/* Things the agent was given that its children need. */
struct spawn_config {
    bool container;
    int null_fd;
    bool reset_oom;             /* the agent is better protected than an exec should be */
    uint64_t nofile_soft, nofile_hard; /* as the agent found them */
};
extern struct spawn_config spawn_config;

/* True when only the last few descriptors are left: they are for connections, and for those who look after the rest. */
bool descriptors_are_scarce(int newest);
/* The child's pid, or -1 with errno. */
pid_t spawn(const struct spawn *s);
/* A plain child in the agent's own cgroup, ready to run `main`, which must not return. Only fd stays open, as 3. */
pid_t spawn_worker(int fd, void (*main)(int fd, void *argument), void *argument);

#endif
