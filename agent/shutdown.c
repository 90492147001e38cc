/* SPDX-License-Identifier: Apache-2.0 */
#include "shutdown.h"

#include "cgroup.h"
#include "exec.h"
#include "files.h"

#include <signal.h>

#define FAREWELL_MS 2000 /* for the killed to be reaped and their EXIT frames to be written */

bool agent_stop;

enum phase { LIVING, TERMINATING, KILLING };
static enum phase phase;
static struct timer timer;

static void give_up(struct timer *t)
{
    (void)t;
    agent_stop = true;
}

static void kill_all(struct timer *t)
{
    phase = KILLING;
    exec_kill_all(REASON_SHUTDOWN);
    files_kill_all();
    timer_set(t, FAREWELL_MS, give_up);
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
    if (phase == LIVING)
        return;
    if (phase == TERMINATING && exec_count_leaders() == 0 && cgroup_run_empty())
        kill_all(&timer); /* nobody left: no need for the rest of the grace */
    if (phase == KILLING && exec_count_leaders() == 0 && conn_is_idle())
        agent_stop = true;
}
