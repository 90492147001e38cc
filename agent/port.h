/* SPDX-License-Identifier: Apache-2.0 */
/* A virtio-serial port as a sequence of connections, which it has no notion of itself. */
#ifndef DSEC_PORT_H
#define DSEC_PORT_H

/* Serves the port that is open as fd, which does not block, from now on. 0 or -1 with errno. */
int port_serve(int fd);
/* Serves the port of that name from now on, waiting for it to appear. 0 or -1 with errno. */
int port_open(const char *name, int wait_ms);

#endif
