/* SPDX-License-Identifier: Apache-2.0 */
#include "net.h"

#include <errno.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define MESSAGE_BYTES 256u

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

/* Where a request holds the index of its device: behind struct nlmsghdr, in a route's first attribute. */
static size_t index_at(const struct nlmsghdr *h)
{
    return h->nlmsg_type == RTM_NEWROUTE ? sizeof(*h) + sizeof(struct rtmsg) + sizeof(struct rtattr) : sizeof(*h) + 4;
}

/* One request; the next one's place behind it. An address that is to be taken away may be gone. */
static int ask_kernel(int fd, uint32_t index, struct span *requests)
{
    union {
        struct nlmsghdr head;
        uint8_t bytes[MESSAGE_BYTES];
    } one;
    struct {
        struct nlmsghdr head;
        struct nlmsgerr error;
        uint8_t more[MESSAGE_BYTES];
    } answer;
    errno = EINVAL;
    if (requests->len < sizeof(one.head))
        return -1;
    memcpy(&one.head, requests->data, sizeof(one.head));
    size_t n = one.head.nlmsg_len, at = index_at(&one.head);
    if (n > requests->len || n > sizeof(one) || at + sizeof(index) > n)
        return -1;
    memcpy(one.bytes, requests->data, n);
    memcpy(one.bytes + at, &index, sizeof(index));
    requests->data += n;
    requests->len -= n;
    if (send(fd, one.bytes, n, 0) < 0)
        return -1;
    ssize_t got = recv(fd, &answer, sizeof(answer), 0);
    if (got < (ssize_t)(sizeof(answer.head) + sizeof(answer.error)) || answer.head.nlmsg_type != NLMSG_ERROR)
        return -1;
    errno = -answer.error.error;
    return errno == 0 || (errno == EADDRNOTAVAIL && one.head.nlmsg_type == RTM_DELADDR) ? 0 : -1;
}

int net_configure(const char *device, struct span requests)
{
    uint32_t index = if_nametoindex(device);
    if (index == 0)
        return -1;
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE), r = fd < 0 ? -1 : 0;
    while (r == 0 && requests.len > 0)
        r = ask_kernel(fd, index, &requests);
    int err = errno;
    if (fd >= 0)
        close(fd);
    errno = err;
    return r;
}
