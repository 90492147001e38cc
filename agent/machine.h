/* SPDX-License-Identifier: Apache-2.0 */
/* Requests about the whole machine, which only an agent that owns one takes: a container's host does these itself. */
#ifndef DSEC_MACHINE_H
#define DSEC_MACHINE_H

#include "conn.h"

void machine_freeze(struct conn *conn, uint32_t channel, const struct request *r);
/* Random bytes of the host's go into the kernel's pool. */
int machine_stir(struct span entropy);
/* A copy of a machine becomes one of its own: entropy, clock, host name, machine id. */
void machine_renew(struct conn *conn, uint32_t channel, const struct request *r);
/* Requests of rtnetlink(7) for one device. */
void machine_network(struct conn *conn, uint32_t channel, const struct request *r);
void machine_limit(struct conn *conn, uint32_t channel, const struct request *r);

#endif
