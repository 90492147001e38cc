/* SPDX-License-Identifier: Apache-2.0 */
#include "shutdown.h"

#include "cgroup.h"
#include "exec.h"
#include "files.h"

#include <signal.h>

#define CHECK_MS 10
#define FAREWELL_MS 2000 /* for the killed to be reaped and their EXIT frames to be written */

bool agent_stop;

enum phase { LIVING, TERMINATING, KILLING };
static enum phase phase;
static struct timer timer;
static uint64_t deadline_ms;

static bool all_gone(void)
{
    return exec_count_leaders() == 0 && cgroup_run_empty();
}

/* Looked at again and again: a cgroup may count its last process a little longer than we do. */
static void wait_for_the_killed(struct timer *t)
{
    if ((all_gone() && conn_is_idle()) || now_ms() >= deadline_ms) {
        cgroup_remove_lingering();
        agent_stop = true;
        return;
    }
    timer_set(t, CHECK_MS, wait_for_the_killed);
}

static void kill_all(struct timer *t)
{
    phase = KILLING;
    deadline_ms = now_ms() + FAREWELL_MS;
    exec_kill_all(REASON_SHUTDOWN);
    files_kill_all();
    timer_set(t, 0, wait_for_the_killed);
}

void shutdown_begin(uint64_t grace_ms)
{
    if (phase == KILLING || (phase == TERMINATING && timer.at_ms <= now_ms() + grace_ms))
        return; /* a second request may only make it quicker */
    if (phase == LIVING) {
        exec_shutting_down = true;
        exec_signal_all(SIGTERM);
        exec_signal_all(SIGCONT); /* a stopped process would not see the other one */
    }
    phase = TERMINATING;
    timer_set(&timer, grace_ms, kill_all);
}

void shutdown_progress(void)
{
    if (phase == TERMINATING && all_gone())
        kill_all(&timer); /* nobody left: no need for the rest of the grace */
}
