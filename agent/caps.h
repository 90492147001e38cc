/* SPDX-License-Identifier: Apache-2.0 */
/* What root may do inside a container sandbox. */
#ifndef DSEC_CAPS_H
#define DSEC_CAPS_H

/* Drops all but the exec set from the bounding set, and the ambient set. 0 or -1 with errno. */
int caps_bound(void);
/* Cuts permitted and effective down to the exec set; inheritable becomes empty. */
int caps_limit(void);

#endif
