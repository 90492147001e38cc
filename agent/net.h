/* SPDX-License-Identifier: Apache-2.0 */
#ifndef DSEC_NET_H
#define DSEC_NET_H

/* Brings the loopback device up. 0 or -1 with errno. */
int net_loopback_up(void);

#endif
