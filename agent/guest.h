/* SPDX-License-Identifier: Apache-2.0 */
/* The agent as process 1 of a virtual machine's initramfs: mounts, devices, and what the kernel's command line asks for. */
#ifndef DSEC_GUEST_H
#define DSEC_GUEST_H

/* Makes the sandbox's tree and enters it; a descriptor of the cgroup for it, or it powers the machine off and says why. */
int guest_enter(void);
/* Begins to listen where the command line says: a virtio-serial port or vsock. 0 or -1 with errno. */
int guest_listen(void);
/* The file system of what is written, from within the tree: a descriptor, -1 where there is none. */
int guest_disk(void);
/* Ends the machine. */
_Noreturn void guest_end(void);

#endif
