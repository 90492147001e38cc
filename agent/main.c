/* SPDX-License-Identifier: Apache-2.0 */
/* The agent: process 1 of a sandbox. Start-up, signals, reaping. */
#include "caps.h"
#include "cgroup.h"
#include "conn.h"
#include "exec.h"
#include "files.h"
#include "guest.h"
#include "net.h"
#include "port.h"
#include "shutdown.h"
#include "spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define REAP_BATCH 256 /* per round: a storm of orphans must not stall the rest */
#define TERM_GRACE_MS 2000

extern bool requests_set_clock;

static struct watch signals;
static bool more_to_reap;

_Noreturn static void die(const char *what)
{
    dprintf(2, "dsec-agent: %s: %s\n", what, strerror(errno));
    _exit(1);
}

/* ---- reaping: the only place that waits */

static void reap(void)
{
    more_to_reap = false;
    bool orphans = false;
    for (int i = 0; i < REAP_BATCH; i++) {
        int status;
        struct rusage usage;
        pid_t pid = wait4(-1, &status, WNOHANG, &usage);
        if (pid <= 0)
            break;
        if (!exec_reaped(pid, status, &usage) && !files_reaped(pid))
            orphans = true;
        more_to_reap = i == REAP_BATCH - 1;
    }
    if (orphans)
        cgroup_orphan_reaped();
    if (more_to_reap)
        loop_again();
}

static void signal_event(struct watch *w, uint32_t events)
{
    (void)events;
    struct signalfd_siginfo info;
    while (read(w->fd, &info, sizeof(info)) == (ssize_t)sizeof(info)) {
        if (info.ssi_signo == SIGCHLD)
            more_to_reap = true;
        else
            shutdown_begin(TERM_GRACE_MS);
    }
    reap();
}

/* Everything is blocked but what a fault of our own raises; as process 1 only SIGCHLD is ever looked at. */
static void take_signals(void)
{
    sigset_t all, wanted;
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS};
    sigfillset(&all);
    for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++)
        sigdelset(&all, faults[i]);
    sigprocmask(SIG_SETMASK, &all, NULL);
    /* Whoever started us may have ignored some: commands inherit that, and an ignored SIGCHLD reaps behind our back. */
    for (int sig = 1; sig < _NSIG; sig++) {
        struct sigaction now;
        if (sigaction(sig, NULL, &now) == 0 && now.sa_handler == SIG_IGN)
            signal(sig, SIG_DFL);
    }
    signal(SIGPIPE, SIG_IGN);
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGCHLD);
    if (getpid() != 1) {
        sigaddset(&wanted, SIGTERM);
        sigaddset(&wanted, SIGINT);
    }
    int fd = signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd < 0 || watch_open(&signals, fd, EPOLLIN, signal_event) < 0)
        die("signalfd");
}

static void after_round(void)
{
    if (more_to_reap)
        reap();
    conn_service();
    shutdown_progress();
}

/* ---- start-up */

struct arguments {
    int listen_fd, cgroup_fd;
    bool container, guest, port;
};

static int fd_argument(const char *text)
{
    char *end;
    long fd = strtol(text, &end, 10);
    if (*text == 0 || *end != 0 || fd < 0 || fd > 65535 || fcntl((int)fd, F_SETFD, FD_CLOEXEC) < 0) {
        errno = EBADF;
        die("descriptor argument");
    }
    return (int)fd;
}

static struct arguments parse(int argc, char **argv)
{
    /* As an initramfs's first program; words on the kernel's command line that it does not know become arguments. */
    struct arguments a = {-1, -1, false, getpid() == 1 && strcmp(argv[0], "/init") == 0, false};
    if (a.guest)
        return a;
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--listen-fd=", 12) == 0)
            a.listen_fd = fd_argument(argv[i] + 12);
        else if (strncmp(argv[i], "--cgroup-fd=", 12) == 0)
            a.cgroup_fd = fd_argument(argv[i] + 12);
        else if (strcmp(argv[i], "--container") == 0)
            a.container = true;
        else if (strcmp(argv[i], "--port") == 0)
            a.port = true;
        else {
            errno = EINVAL;
            die(argv[i]);
        }
    }
    if (a.listen_fd < 0) {
        errno = EINVAL;
        die("--listen-fd is missing");
    }
    return a;
}

/* 0, 1 and 2 are taken from here on, so every descriptor of ours is 3 or more. */
static void open_null(void)
{
    int fd;
    do
        fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    while (fd >= 0 && fd < 3);
    if (fd < 0)
        die("/dev/null");
    spawn_config.null_fd = fd;
}

/* Whatever else was handed over (the program's own file, say) is not ours to keep. */
static void close_strays(const struct arguments *a)
{
    unsigned low = (unsigned)(a->listen_fd < a->cgroup_fd ? a->listen_fd : a->cgroup_fd);
    unsigned high = (unsigned)(a->listen_fd < a->cgroup_fd ? a->cgroup_fd : a->listen_fd);
    if (a->cgroup_fd < 0)
        low = high;
    if (low > 3)
        (void)syscall(SYS_close_range, 3u, low - 1, 0);
    if (high > low + 1)
        (void)syscall(SYS_close_range, low + 1, high - 1, 0);
    (void)syscall(SYS_close_range, high + 1, ~0u, 0);
}

static void raise_file_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
        return;
    spawn_config.nofile_soft = limit.rlim_cur;
    spawn_config.nofile_hard = limit.rlim_max;
    limit.rlim_cur = limit.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &limit);
}

static bool better_protected(void)
{
    char text[16] = {0};
    int fd = open("/proc/self/oom_score_adj", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, text, sizeof(text) - 1);
    close(fd);
    return n > 0 && text[0] == '-';
}

static void set_up(int argc, char **argv)
{
    struct arguments a = parse(argc, argv);
    if (a.guest)
        a.cgroup_fd = guest_enter();
    spawn_config.reset_oom = better_protected(); /* readable only while dumpable; nothing of ours is open yet */
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
        die("PR_SET_DUMPABLE");
    (void)prctl(PR_SET_NAME, "dsec-agent", 0, 0, 0); /* started by a descriptor, it would be called by its number */
    if (!a.guest)
        close_strays(&a);
    open_null();
    raise_file_limit();
    spawn_config.container = a.container;
    requests_set_clock = !a.container && getpid() == 1;
    if (getpid() != 1 && prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) < 0)
        die("PR_SET_CHILD_SUBREAPER");
    if (loop_init() < 0)
        die("epoll");
    if (cgroup_init(a.cgroup_fd, exec_frozen) < 0)
        die("cgroup");
    /* For what commands may gain by execve; once, here, since each of them inherits it. */
    if (a.container && caps_bound() < 0)
        die("capability bounding set");
    if ((a.container || a.guest) && net_loopback_up() < 0)
        dprintf(2, "dsec-agent: loopback: %s\n", strerror(errno)); /* a sandbox without it is still of use */
    take_signals();
    if (a.guest ? guest_listen() < 0
                : fcntl(a.listen_fd, F_SETFL, O_NONBLOCK) < 0 ||
                      (a.port ? port_serve(a.listen_fd) : conn_listen(a.listen_fd)) < 0)
        die("listen");
}

int main(int argc, char **argv)
{
    set_up(argc, argv);
    loop_run(&agent_stop, after_round);
    if (getpid() == 1 && !spawn_config.container)
        guest_end();
    _exit(0);
}
