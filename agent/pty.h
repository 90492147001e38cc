/* SPDX-License-Identifier: Apache-2.0 */
/* Pseudo-terminals. */
#ifndef DSEC_PTY_H
#define DSEC_PTY_H

#include <stdint.h>
#include <sys/types.h>

#define PTY_EOF 4 /* what ends input on a terminal: control-D */

/* A new master, close-on-exec and non-blocking, or -1 with errno. */
int pty_open(uint64_t rows, uint64_t cols);
int pty_resize(int master, uint64_t rows, uint64_t cols);
/* In the child: the other side, without looking at any path; -1 with errno. */
int pty_open_terminal(int master);
/* In the child, a session leader: file 0 becomes its controlling terminal and the user's property. */
int pty_take_terminal(uid_t uid);

#endif
