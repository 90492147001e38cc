/* SPDX-License-Identifier: Apache-2.0 */
/* The ordered end of the sandbox. */
#ifndef DSEC_SHUTDOWN_H
#define DSEC_SHUTDOWN_H

#include <stdbool.h>
#include <stdint.h>

extern bool agent_stop; /* the loop ends */

void shutdown_begin(uint64_t grace_ms);
/* Once per round: perhaps there is nothing left to wait for. */
void shutdown_progress(void);

#endif
