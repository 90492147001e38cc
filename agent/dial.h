/* SPDX-License-Identifier: Apache-2.0 */
/* DIAL: connections to ports on the loopback of a virtual machine. A container's host enters its network itself. */
#ifndef DSEC_DIAL_H
#define DSEC_DIAL_H

#include "conn.h"

void dial_begin(struct conn *conn, uint32_t channel, const struct request *r);

#endif
