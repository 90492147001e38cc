/* SPDX-License-Identifier: Apache-2.0 */
#include "caps.h"

#include <errno.h>
#include <linux/capability.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define BIT(cap) ((uint64_t)1 << (cap))

/* Never SYS_PTRACE, SYS_ADMIN or NET_ADMIN: with the first two the agent itself could be read and driven from inside. */
static const uint64_t exec_set = BIT(CAP_CHOWN) | BIT(CAP_DAC_OVERRIDE) | BIT(CAP_FSETID) | BIT(CAP_FOWNER) | BIT(CAP_MKNOD) |
                                 BIT(CAP_NET_RAW) | BIT(CAP_SETGID) | BIT(CAP_SETUID) | BIT(CAP_SETFCAP) | BIT(CAP_SETPCAP) |
                                 BIT(CAP_NET_BIND_SERVICE) | BIT(CAP_SYS_CHROOT) | BIT(CAP_KILL) | BIT(CAP_AUDIT_WRITE);

int caps_bound(void)
{
    for (unsigned long cap = 0; cap < 64; cap++) {
        if (exec_set & BIT(cap))
            continue;
        if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0) {
            if (errno == EINVAL) /* beyond the kernel's last capability */
                break;
            return -1;
        }
    }
    return prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
}

int caps_limit(void)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2];
    memset(data, 0, sizeof(data));
    if (syscall(SYS_capget, &header, data) < 0)
        return -1;
    for (int i = 0; i < 2; i++) {
        data[i].permitted &= (uint32_t)(exec_set >> (32 * i));
        data[i].effective = data[i].permitted;
        data[i].inheritable = 0;
    }
    return (int)syscall(SYS_capset, &header, data);
}
