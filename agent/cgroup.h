/* SPDX-License-Identifier: Apache-2.0 */
/* The sandbox's cgroup: `agent` for us, `run/<id>` for each exec. Without one (plain tests) sessions stand in. */
#ifndef DSEC_CGROUP_H
#define DSEC_CGROUP_H

#include "fields.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* fd: the sandbox's cgroup directory, or -1. Moves this process to agent/. `frozen` is told when the execs are paused and resumed. */
int cgroup_init(int fd, void (*frozen)(bool now));
bool cgroup_present(void);
/* A new daemon is there: whoever ran before it may have removed run/ while no exec was in it. */
void cgroup_look_again(void);
/* Makes run/<id>; returns a descriptor to clone into, -1 with errno (EEXIST: an earlier exec's processes still live there), or -2
 * when there are no cgroups. */
int cgroup_make(const char *id);
#define CGROUP_NAME 40
/* Writes `attribute=value` in run/<id>; name says which for the message. 0 or -1 with errno. */
int cgroup_limit(const char *id, struct span limit, char name[CGROUP_NAME]);
/* Processes of the exec that the kernel ended for want of memory, where they are counted; ask before the release. */
uint64_t cgroup_oom_kills(const char *id);
/* Whether want of memory is why the exec's leader got a SIGKILL that nobody asked for. */
bool cgroup_oom_killed(const char *id);
/* Removes run/<id>, now or when its last process has gone. */
void cgroup_release(const char *id);
void cgroup_remove_lingering(void); /* those that are empty, all at once: at the end */
bool cgroup_lingers(const char *id);
/* An orphan was reaped: a lingering cgroup may have become empty. */
void cgroup_orphan_reaped(void);
/* Signals everything in run/<id>; leader names the session when there are no cgroups. 0 or -1 with errno. */
int cgroup_signal(const char *id, pid_t leader, int sig);
/* cgroup.kill on run/<id>. */
int cgroup_kill(const char *id, pid_t leader);
/* On everything under run. */
void cgroup_kill_all(void);
void cgroup_signal_lingering(int sig);
bool cgroup_run_empty(void);
/* Stops everything under run, or lets it go on; that takes effect a moment later. 0 or -1 with errno, as for the limit. */
int cgroup_freeze(bool frozen);
bool cgroup_is_frozen(void);
int cgroup_limit_pids(uint64_t most);
/* user and system time of the whole sandbox, from cpu.stat; false when unknown. */
bool cgroup_cpu_us(uint64_t *user, uint64_t *system);

#endif
