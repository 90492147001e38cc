/* SPDX-License-Identifier: Apache-2.0 */
/* Who a USER field means, by the sandbox's own passwd and group files (hostile: bounded, regular files only). */
#ifndef DSEC_USERS_H
#define DSEC_USERS_H

#include <limits.h>
#include <stddef.h>
#include <sys/types.h>

#define GROUPS_MAX 256

struct identity {
    uid_t uid;
    gid_t gid;
    gid_t groups[GROUPS_MAX];
    size_t group_count;
    char home[PATH_MAX]; /* from passwd, else "/" */
};

/* 0, or -1: unknown user or group. Allocates; meant for a child process. */
int identity_find(const char *user, size_t len, struct identity *out);
/* Takes the identity for good: groups, gid, uid, and with `container` the reduced capabilities. 0 or -1 with errno. */
int identity_take(const struct identity *who, int container);
/* What to say when it failed, by errno. */
const char *identity_fault(void);

#endif
