/* SPDX-License-Identifier: Apache-2.0 */
#include "spawn.h"

#include "pty.h"
#include "seccomp.h"
#include "users.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#define FAILURE_FD 3
#define RESERVED_DESCRIPTORS 16u

struct spawn_config spawn_config = {.null_fd = -1};

bool descriptors_are_scarce(int newest)
{
    struct rlimit limit;
    return getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
           (uint64_t)newest + RESERVED_DESCRIPTORS >= limit.rlim_cur;
}

static pid_t clone_into(int cgroup)
{
    struct clone_args args;
    memset(&args, 0, sizeof(args));
    args.exit_signal = SIGCHLD;
    if (cgroup >= 0) {
        args.flags = CLONE_INTO_CGROUP;
        args.cgroup = (__u64)cgroup;
    }
    return (pid_t)syscall(SYS_clone3, &args, sizeof(args));
}

/* ---- in the child */

_Noreturn static void fail(const char *code, const char *what)
{
    struct spawn_failure f;
    memset(&f, 0, sizeof(f));
    f.err = errno;
    snprintf(f.code, sizeof(f.code), "%s", code);
    snprintf(f.what, sizeof(f.what), "%s", what);
    (void)!write(FAILURE_FD, &f, sizeof(f));
    _exit(127);
}

static void *must_alloc(size_t n)
{
    void *p = calloc(1, n);
    if (p == NULL)
        fail("spawn-failed", "memory");
    return p;
}

/* The agent has no handlers, and ignores one signal; what it was started with it took back itself (main.c). */
static void reset_signals(void)
{
    (void)signal(SIGPIPE, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

static void close_from(unsigned first)
{
    if (syscall(SYS_close_range, first, ~0u, 0) == 0)
        return;
    for (int fd = (int)first; fd < (int)spawn_config.nofile_hard && fd < 65536; fd++)
        close(fd);
}

static void arrange_files(const struct spawn *s, int terminal)
{
    if (terminal >= 0) {
        for (int fd = 0; fd < 3; fd++)
            dup2(terminal, fd);
    } else {
        dup2(s->in, 0);
        dup2(s->out, 1);
        dup2(s->err, 2);
    }
    /* Every descriptor of the agent's is 3 or more, so none of the three was overwritten before it was used. */
    if (s->failure != FAILURE_FD)
        dup2(s->failure, FAILURE_FD);
    (void)fcntl(FAILURE_FD, F_SETFD, FD_CLOEXEC);
    close_from(FAILURE_FD + 1);
}

static void set_limits(const struct request *r)
{
    struct rlimit files = {spawn_config.nofile_soft, spawn_config.nofile_hard};
    (void)setrlimit(RLIMIT_NOFILE, &files);
    struct span limit;
    for (size_t at = 0; request_next(r, F_RLIMIT, &at, &limit);) {
        struct rlimit value = {load_u64(limit.data + 4), load_u64(limit.data + 12)};
        if (setrlimit((int)load_u32(limit.data), &value) < 0)
            fail("spawn-failed", "setrlimit");
    }
}

static char **string_list(const struct request *r, enum tag tag, size_t spare)
{
    size_t count = 0, at = 0, bytes = 0;
    struct span s;
    while (request_next(r, tag, &at, &s)) {
        count++;
        bytes += s.len + 1;
    }
    char **list = must_alloc((count + spare + 1) * sizeof(*list));
    char *text = must_alloc(bytes + 1);
    count = at = 0;
    while (request_next(r, tag, &at, &s)) {
        memcpy(text, s.data, s.len);
        list[count++] = text;
        text += s.len + 1;
    }
    return list;
}

static const char *env_find(char **env, const char *name)
{
    size_t len = strlen(name);
    const char *found = NULL;
    for (; *env != NULL; env++)
        if (strncmp(*env, name, len) == 0 && (*env)[len] == '=')
            found = *env + len + 1;
    return found;
}

static void env_default(char **env, const char *name, const char *value)
{
    if (env_find(env, name) != NULL)
        return;
    while (*env != NULL)
        env++;
    size_t size = strlen(name) + strlen(value) + 2;
    *env = must_alloc(size);
    snprintf(*env, size, "%s=%s", name, value);
}

static char **make_env(const struct spawn *s, const struct identity *who)
{
    char **env = string_list(s->request, F_ENV, 3);
    env_default(env, "PATH", DEFAULT_PATH);
    env_default(env, "HOME", who->home);
    if (s->pty >= 0)
        env_default(env, "TERM", "xterm");
    return env;
}

static void enter_directory(const struct request *r, const struct identity *who)
{
    char cwd[PATH_MAX];
    if (!request_has(r, F_CWD) || r->span[F_CWD].len == 0) {
        if (chdir(who->home) < 0 && chdir("/") < 0)
            fail("bad-cwd", "/");
        return;
    }
    if (!request_string(r, F_CWD, cwd, sizeof(cwd))) {
        errno = ENAMETOOLONG;
        fail("bad-cwd", "too long");
    }
    if (chdir(cwd) < 0)
        fail("bad-cwd", cwd);
}

/*
 * While the privileges are still the agent's: the moment of being traceable is then none for anybody inside, who would
 * need all of our capabilities for that. Afterwards a process of the same user could read this copy of the agent's
 * memory, with the output of everybody's commands.
 */
static void reset_oom_score(void)
{
    if (!spawn_config.reset_oom)
        return;
    (void)prctl(PR_SET_DUMPABLE, 1, 0, 0, 0); /* else /proc/self belongs to an unmapped user */
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    (void)prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    if (fd >= 0) {
        (void)!write(fd, "0", 1);
        close(fd);
    }
}

static void try_execve(const char *path, char **argv, char **env, int *worst)
{
    execve(path, argv, env);
    /* As execvp does it: a file that is there but may not be run says more than one that is missing. */
    if (errno != ENOENT && errno != ENOTDIR)
        *worst = errno;
}

_Noreturn static void run_command(char **argv, char **env)
{
    char path[PATH_MAX];
    int worst = ENOENT;
    const char *name = argv[0], *dir = env_find(env, "PATH");
    if (strchr(name, '/') != NULL || *name == 0) {
        try_execve(name, argv, env, &worst);
        dir = NULL;
    }
    while (dir != NULL) {
        size_t len = strcspn(dir, ":");
        int n = snprintf(path, sizeof(path), "%.*s%s%s", (int)len, dir, len ? "/" : "", name);
        /* Asking first: an execve that fails has set up half a process by then. */
        if (n > 0 && (size_t)n < sizeof(path) && (access(path, F_OK) == 0 || (errno != ENOENT && errno != ENOTDIR)))
            try_execve(path, argv, env, &worst);
        dir = dir[len] ? dir + len + 1 : NULL;
    }
    errno = worst;
    if (worst == E2BIG || worst == ENOMEM || worst == EAGAIN || worst == EMFILE || worst == ENFILE)
        fail("spawn-failed", "execve");
    fail(worst == ENOENT ? "not-found" : "not-executable", name);
}

_Noreturn static void child(const struct spawn *s)
{
    static struct identity who; /* big; the child's own copy */
    const struct request *r = s->request;
    setsid();
    reset_signals();
    int terminal = s->pty < 0 ? -1 : pty_open_terminal(s->pty);
    int terminal_error = errno;
    arrange_files(s, terminal);
    errno = terminal_error;
    if (s->pty >= 0 && terminal < 0)
        fail("spawn-failed", "terminal");
    if (identity_find((const char *)r->span[F_USER].data, r->span[F_USER].len, &who) < 0) {
        errno = ENOENT;
        fail("no-such-user", "user or group");
    }
    if (s->pty >= 0 && pty_take_terminal(who.uid) < 0)
        fail("spawn-failed", "controlling terminal");
    char **argv = string_list(r, F_ARGV, 0);
    char **env = make_env(s, &who);
    set_limits(r);
    umask((mode_t)request_num(r, F_UMASK, 022) & 0777);
    reset_oom_score();
    if (identity_take(&who, spawn_config.container) < 0)
        fail("spawn-failed", identity_fault());
    enter_directory(r, &who);
    if (spawn_config.container && seccomp_hide_clone3() < 0)
        fail("spawn-failed", "seccomp");
    run_command(argv, env);
}

pid_t spawn(const struct spawn *s)
{
    pid_t pid = clone_into(s->cgroup);
    if (pid == 0)
        child(s);
    return pid;
}

pid_t spawn_worker(int fd, void (*main)(int fd, void *argument), void *argument)
{
    pid_t pid = clone_into(-1);
    if (pid != 0)
        return pid;
    reset_signals();
    signal(SIGPIPE, SIG_IGN);
    if (fd != FAILURE_FD)
        dup2(fd, FAILURE_FD);
    (void)fcntl(FAILURE_FD, F_SETFD, FD_CLOEXEC);
    close_from(FAILURE_FD + 1);
    main(FAILURE_FD, argument);
    _exit(0);
}
