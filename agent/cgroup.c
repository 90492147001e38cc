/* SPDX-License-Identifier: Apache-2.0 */
#include "cgroup.h"

#include "loop.h"
#include "proto.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SWEEP_DELAY_MS 20
#define SWEEP_STEP 64

/* A cgroup that outlived its exec because processes were left behind in it. */
struct lingering {
    struct lingering *next;
    char id[ID_MAX + 1];
};

static int root_fd = -1;
static struct watch events; /* of run/cgroup.events */
static void (*tell_frozen)(bool now);
static struct lingering *oldest, **newest = &oldest;
static unsigned count, to_check;
static struct timer sweep_timer;
static uint64_t oom_seen; /* kills in run/ that ended execs have told, where each has no count of its own */

#define PATH_BYTES (ID_MAX + 40)

static void path_of(char out[PATH_BYTES], const char *id, const char *file)
{
    snprintf(out, PATH_BYTES, "run/%s%s", id, file);
}

static int write_file(const char *path, const char *text)
{
    int fd = openat(root_fd, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t n = write(fd, text, strlen(text));
    int err = errno;
    close(fd);
    errno = err;
    return n < 0 ? -1 : 0;
}

static int make_dir(const char *path)
{
    return mkdirat(root_fd, path, 0755) < 0 && errno != EEXIST ? -1 : 0;
}

static bool read_file(const char *path, char *out, size_t size)
{
    int fd = root_fd < 0 ? -1 : openat(root_fd, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, out, size - 1);
    close(fd);
    if (n < 0)
        return false;
    out[n] = 0;
    return true;
}

static void events_changed(struct watch *w, uint32_t what)
{
    (void)what;
    char text[256];
    ssize_t n = pread(w->fd, text, sizeof(text) - 1, 0); /* reading it also arms the next notification */
    if (n < 0)
        return;
    text[n] = 0;
    tell_frozen(strstr(text, "frozen 1") != NULL);
}

static int watch_events(void)
{
    int fd = openat(root_fd, "run/cgroup.events", O_RDONLY | O_CLOEXEC);
    return fd < 0 ? -1 : watch_open(&events, fd, EPOLLPRI, events_changed);
}

void cgroup_look_again(void)
{
    char byte;
    if (root_fd < 0 || pread(events.fd, &byte, 1, 0) > 0)
        return;
    watch_close(&events);
    oom_seen = 0;
    if (make_dir("run") < 0 || watch_events() < 0)
        dprintf(2, "dsec-agent: run: %s\n", strerror(errno)); /* told by each exec that needs it */
}

/*
 * Move the agent out of the way, into agent/. The kernel waits about 10 ms for that (a grace period of RCU), so a
 * child does it while the agent goes on; the reaper finds it like any orphan. Whoever gives controllers to the
 * cgroup's children, which demands that it is empty, waits for that.
 */
static int move_aside(void)
{
    char text[16];
    snprintf(text, sizeof(text), "%d", (int)getpid()); /* getppid() of a child that outlived us names another */
    pid_t child = fork();
    if (child < 0)
        return write_file("agent/cgroup.procs", "0");
    if (child > 0)
        return 0;
    _exit(write_file("agent/cgroup.procs", text) < 0);
}

int cgroup_init(int fd, void (*frozen)(bool now))
{
    root_fd = fd;
    tell_frozen = frozen;
    if (fd < 0)
        return 0;
    if (make_dir("agent") < 0 || make_dir("run") < 0 || move_aside() < 0)
        return -1;
    return watch_events();
}

bool cgroup_present(void)
{
    return root_fd >= 0;
}

int cgroup_make(const char *id)
{
    if (root_fd < 0)
        return -2;
    char path[PATH_BYTES];
    path_of(path, id, "");
    if (mkdirat(root_fd, path, 0755) < 0)
        return -1;
    int fd = openat(root_fd, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        int err = errno;
        unlinkat(root_fd, path, AT_REMOVEDIR);
        errno = err;
    }
    return fd;
}

/* ---- limits of one exec */

/* What a START may set, and nothing else of its cgroup. */
static const char *const attributes[] = {"memory.max", "memory.high", "memory.swap.max", "memory.oom.group", "cpu.weight",
                                         "cpu.max", "cpu.idle", "pids.max", "io.max", "io.weight"};

static bool is_attribute(const char *name)
{
    for (size_t i = 0; i < sizeof(attributes) / sizeof(attributes[0]); i++)
        if (strcmp(name, attributes[i]) == 0)
            return true;
    return false;
}

/* A level gives its children no controller until it is asked to; asking twice is fine. */
static int enable_controller(const char *attribute)
{
    char text[16];
    snprintf(text, sizeof(text), "+%.*s", (int)strcspn(attribute, "."), attribute);
    return write_file("run/cgroup.subtree_control", text);
}

int cgroup_limit(const char *id, struct span limit, char name[CGROUP_NAME])
{
    char text[128], path[PATH_BYTES + CGROUP_NAME];
    snprintf(name, CGROUP_NAME, "limit");
    if (root_fd < 0 || limit.len >= sizeof(text)) {
        errno = root_fd < 0 ? EOPNOTSUPP : EINVAL;
        return -1;
    }
    memcpy(text, limit.data, limit.len);
    text[limit.len] = 0;
    char *value = strchr(text, '=');
    if (value != NULL)
        *value++ = 0;
    if (value == NULL || !is_attribute(text)) {
        errno = EINVAL;
        return -1;
    }
    snprintf(name, CGROUP_NAME, "limit %.30s", text);
    if (enable_controller(text) < 0)
        return -1;
    snprintf(path, sizeof(path), "run/%s/%s", id, text);
    return write_file(path, value);
}

static bool remove_dir(const char *id)
{
    char path[PATH_BYTES];
    path_of(path, id, "");
    return unlinkat(root_fd, path, AT_REMOVEDIR) == 0 || errno == ENOENT;
}

/* ---- lingering cgroups */

static void append(struct lingering *l)
{
    l->next = NULL;
    *newest = l;
    newest = &l->next;
    count++;
}

static struct lingering *take_oldest(void)
{
    struct lingering *l = oldest;
    oldest = l->next;
    if (oldest == NULL)
        newest = &oldest;
    count--;
    return l;
}

/* A few at a time, so that a thousand background services cost no latency. */
static void sweep(struct timer *t)
{
    for (int i = 0; i < SWEEP_STEP && to_check > 0 && oldest != NULL; i++, to_check--) {
        struct lingering *l = take_oldest();
        if (remove_dir(l->id))
            free(l);
        else
            append(l);
    }
    if (to_check > 0 && oldest != NULL)
        timer_set(t, SWEEP_DELAY_MS, sweep);
}

void cgroup_release(const char *id)
{
    if (root_fd < 0 || remove_dir(id))
        return;
    struct lingering *l = malloc(sizeof(*l));
    if (l == NULL) /* an empty directory stays until the sandbox ends */
        return;
    snprintf(l->id, sizeof(l->id), "%s", id);
    append(l);
}

bool cgroup_lingers(const char *id)
{
    for (const struct lingering *l = oldest; l != NULL; l = l->next)
        if (strcmp(l->id, id) == 0)
            return true;
    return false;
}

void cgroup_remove_lingering(void)
{
    for (struct lingering *l = oldest; l != NULL; l = l->next)
        (void)remove_dir(l->id);
}

/* The last process of a lingering cgroup has no living parent but us, so looking after each orphan's end misses none. */
void cgroup_orphan_reaped(void)
{
    if (oldest == NULL)
        return;
    to_check = count;
    if (!timer_is_set(&sweep_timer))
        timer_set(&sweep_timer, SWEEP_DELAY_MS, sweep);
}

/* ---- signals */

static void signal_listed(FILE *procs, int sig)
{
    char line[32];
    while (fgets(line, sizeof(line), procs) != NULL) {
        long pid = strtol(line, NULL, 10);
        if (pid > 1 && pid != getpid()) /* 0: not visible from here */
            (void)kill((pid_t)pid, sig);
    }
}

static int signal_cgroup(const char *id, int sig)
{
    char path[PATH_BYTES];
    path_of(path, id, "/cgroup.procs");
    int fd = openat(root_fd, path, O_RDONLY | O_CLOEXEC);
    FILE *procs = fd < 0 ? NULL : fdopen(fd, "r");
    if (procs == NULL) {
        int err = errno;
        if (fd >= 0)
            close(fd);
        errno = err;
        return -1;
    }
    signal_listed(procs, sig);
    fclose(procs);
    return 0;
}

static bool in_session(const char *pid, pid_t session)
{
    char path[64], stat[512];
    snprintf(path, sizeof(path), "/proc/%.20s/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, stat, sizeof(stat) - 1);
    close(fd);
    if (n <= 0)
        return false;
    stat[n] = 0;
    const char *after = strrchr(stat, ')'); /* the command's name may hold anything */
    int sid;
    return after != NULL && sscanf(after + 1, " %*c %*d %*d %d", &sid) == 1 && sid == session;
}

static int signal_session(pid_t leader, int sig)
{
    if (leader <= 0) {
        errno = ESRCH;
        return -1;
    }
    DIR *proc = opendir("/proc");
    if (proc == NULL)
        return kill(-leader, sig);
    for (struct dirent *e; (e = readdir(proc)) != NULL;)
        if (isdigit((unsigned char)e->d_name[0]) && in_session(e->d_name, leader))
            (void)kill((pid_t)strtol(e->d_name, NULL, 10), sig);
    closedir(proc);
    return 0;
}

int cgroup_signal(const char *id, pid_t leader, int sig)
{
    return root_fd < 0 ? signal_session(leader, sig) : signal_cgroup(id, sig);
}

int cgroup_kill(const char *id, pid_t leader)
{
    if (root_fd < 0)
        return signal_session(leader, SIGKILL);
    char path[PATH_BYTES];
    path_of(path, id, "/cgroup.kill");
    return write_file(path, "1");
}

void cgroup_kill_all(void)
{
    if (root_fd >= 0)
        (void)write_file("run/cgroup.kill", "1");
}

void cgroup_signal_lingering(int sig)
{
    for (const struct lingering *l = oldest; l != NULL; l = l->next)
        (void)signal_cgroup(l->id, sig);
}

/* ---- the whole of run */

int cgroup_freeze(bool frozen)
{
    return write_file("run/cgroup.freeze", frozen ? "1" : "0");
}

bool cgroup_is_frozen(void)
{
    char text[256];
    return read_file("run/cgroup.events", text, sizeof(text)) && strstr(text, "frozen 1") != NULL;
}

int cgroup_limit_pids(uint64_t most)
{
    char text[24];
    snprintf(text, sizeof(text), "%llu", (unsigned long long)most);
    return write_file("run/pids.max", text);
}

/* ---- reading */

bool cgroup_run_empty(void)
{
    char text[256];
    return !read_file("run/cgroup.events", text, sizeof(text)) || strstr(text, "populated 0") != NULL;
}

static bool number_after(const char *text, const char *key, uint64_t *out)
{
    const char *at = strstr(text, key);
    if (at == NULL)
        return false;
    *out = strtoull(at + strlen(key), NULL, 10);
    return true;
}

bool cgroup_cpu_us(uint64_t *user, uint64_t *system)
{
    char text[1024];
    return read_file("cpu.stat", text, sizeof(text)) && number_after(text, "user_usec ", user) &&
           number_after(text, "system_usec ", system);
}

static bool oom_kills(const char *path, uint64_t *out)
{
    char text[512];
    return read_file(path, text, sizeof(text)) && number_after(text, "oom_kill ", out);
}

uint64_t cgroup_oom_kills(const char *id)
{
    char path[PATH_BYTES];
    uint64_t kills = 0;
    path_of(path, id, "/memory.events");
    (void)oom_kills(path, &kills);
    return kills;
}

/* Without a limit of memory only run/ as a whole is counted: whoever is killed first after a rise tells it. */
bool cgroup_oom_killed(const char *id)
{
    char path[PATH_BYTES];
    uint64_t kills;
    path_of(path, id, "/memory.events");
    if (oom_kills(path, &kills))
        return kills > 0;
    if (!oom_kills("run/memory.events", &kills) || kills <= oom_seen)
        return false;
    oom_seen = kills;
    return true;
}
