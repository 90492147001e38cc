/* SPDX-License-Identifier: Apache-2.0 */
#ifndef DSEC_NET_H
#define DSEC_NET_H

#include "fields.h"

/* Brings the loopback device up. 0 or -1 with errno. */
int net_loopback_up(void);
/*
 * Sends requests of rtnetlink(7), packed one behind the other, to the kernel, each with the index of the device put in.
 * 0 or -1 with errno; what follows the first that fails is not done.
 */
int net_configure(const char *device, struct span requests);

#endif
