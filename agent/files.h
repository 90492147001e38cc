/* SPDX-License-Identifier: Apache-2.0 */
/* File requests, the agent's side: a worker process for each, relayed by channel. */
#ifndef DSEC_FILES_H
#define DSEC_FILES_H

#include "conn.h"

#include <sys/types.h>

void files_request(struct conn *conn, const struct frame *f);
/* True when pid was a worker. */
bool files_reaped(pid_t pid);
void files_kill_all(void);

#endif
