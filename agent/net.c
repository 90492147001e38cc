/* SPDX-License-Identifier: Apache-2.0 */
#include "net.h"

#include <errno.h>
#include <net/if.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

int net_loopback_up(void)
{
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    struct ifreq ifr;
    memset(&ifr, 0, sizeof(ifr));
    strcpy(ifr.ifr_name, "lo");
    int r = ioctl(fd, SIOCGIFFLAGS, &ifr);
    if (r == 0 && !(ifr.ifr_flags & IFF_UP)) {
        ifr.ifr_flags = (short)(ifr.ifr_flags | IFF_UP);
        r = ioctl(fd, SIOCSIFFLAGS, &ifr);
    }
    int err = errno;
    close(fd);
    errno = err;
    return r;
}
