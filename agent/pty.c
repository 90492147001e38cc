/* SPDX-License-Identifier: Apache-2.0 */
#include "pty.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

static int set_size(int fd, uint64_t rows, uint64_t cols)
{
    struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)cols};
    return ioctl(fd, TIOCSWINSZ, &size);
}

int pty_resize(int master, uint64_t rows, uint64_t cols)
{
    if (rows > 0xffff || cols > 0xffff) {
        errno = EINVAL;
        return -1;
    }
    return set_size(master, rows, cols);
}

int pty_open(uint64_t rows, uint64_t cols)
{
    int fd = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        fd = open("/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return -1;
    int unlocked = 0;
    /* Fails on anything else that was put in ptmx's place. */
    if (ioctl(fd, TIOCSPTLCK, &unlocked) == 0 && pty_resize(fd, rows, cols) == 0)
        return fd;
    int err = errno;
    close(fd);
    errno = err;
    return -1;
}

int pty_open_terminal(int master)
{
    return ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY);
}

int pty_take_terminal(uid_t uid)
{
    struct termios t;
    if (tcgetattr(0, &t) == 0) {
        t.c_iflag |= IUTF8;
        (void)tcsetattr(0, TCSANOW, &t);
    }
    if (fchown(0, uid, (gid_t)-1) < 0 || fchmod(0, 0620) < 0)
        return -1;
    return ioctl(0, TIOCSCTTY, 0);
}
