/* SPDX-License-Identifier: Apache-2.0 */
#include "guest.h"

#include "conn.h"
#include "memory.h"
#include "port.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/vm_sockets.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES 4096
#define WORD_BYTES 128
#define LAYERS_MAX 16u
#define MODULES_MAX 128
#define DEVICE_WAIT_MS 10000
#define DEVICE_POLL_MS 2
#define RESERVE_BYTES ((uint64_t)32 << 20) /* of the machine's memory, for the agent and the kernel */

static char line[LINE_BYTES]; /* the kernel's command line */
static bool kept_resolv_conf;
static int disk_fd = -1;

_Noreturn void guest_end(void)
{
    sync();
    (void)reboot(RB_AUTOBOOT); /* monitors are told to end instead */
    for (;;)
        pause();
}

int guest_disk(void)
{
    return disk_fd;
}

/* Whatever is missing, there is no sandbox without it: the console's last line tells the daemon. */
_Noreturn static void give_up(const char *what, const char *name)
{
    dprintf(2, "dsec-agent: guest: %s %s: %s\n", what, name, strerror(errno));
    guest_end();
}

/* ---- the command line: dsec.NAME=VALUE */

static bool word(const char *name, char out[WORD_BYTES])
{
    size_t len = strlen(name);
    for (const char *at = line; (at = strstr(at, name)) != NULL; at += len) {
        if ((at != line && at[-1] != ' ') || at[len] != '=')
            continue;
        size_t n = strcspn(at + len + 1, " \n");
        if (n >= WORD_BYTES)
            return false;
        memcpy(out, at + len + 1, n);
        out[n] = 0;
        return true;
    }
    return false;
}

static uint64_t number(const char *name)
{
    char text[WORD_BYTES];
    return word(name, text) ? strtoull(text, NULL, 10) : 0;
}

static void read_line(void)
{
    int fd = open("/proc/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, line, sizeof(line) - 1);
    if (n < 0)
        give_up("read", "/proc/cmdline");
    close(fd);
    line[n] = 0;
}

/* ---- files and mounts */

static void make_dir(const char *path)
{
    if (mkdir(path, 0755) < 0 && errno != EEXIST)
        give_up("make", path);
}

static void mount_at(const char *source, const char *path, const char *type, unsigned long flags, const char *options)
{
    make_dir(path);
    if (mount(source, path, type, flags, options) < 0)
        give_up("mount", path);
}

static bool write_text(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool ok = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    close(fd);
    return ok;
}

static void open_console(void)
{
    int fd = open("/dev/console", O_RDWR | O_NOCTTY);
    for (int to = 0; fd >= 0 && to < 3; to++)
        if (fd != to)
            (void)dup2(fd, to);
    if (fd > 2)
        close(fd);
}

/* ---- modules of a kernel that has its drivers outside, in the order of their names */

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static void load_module(const char *name)
{
    char path[300];
    snprintf(path, sizeof(path), "/modules/%s", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST))
        give_up("load", path);
    close(fd);
    (void)unlink(path); /* the memory it takes is the sandbox's */
}

static void load_modules(void)
{
    char *names[MODULES_MAX];
    size_t count = 0;
    DIR *dir = opendir("/modules");
    if (dir == NULL)
        return; /* all built in */
    for (struct dirent *e; (e = readdir(dir)) != NULL && count < MODULES_MAX;)
        if (e->d_name[0] != '.' && (names[count] = strdup(e->d_name)) != NULL)
            count++;
    closedir(dir);
    qsort(names, count, sizeof(*names), by_name);
    for (size_t i = 0; i < count; i++) {
        load_module(names[i]);
        free(names[i]);
    }
}

/* ---- the sandbox's tree */

static void await_device(const char *path)
{
    const struct timespec poll = {.tv_nsec = DEVICE_POLL_MS * 1000000};
    for (int waited = 0; access(path, F_OK) < 0; waited += DEVICE_POLL_MS) {
        if (waited >= DEVICE_WAIT_MS)
            give_up("wait for", path);
        nanosleep(&poll, NULL);
    }
}

/* Layers are read where they lie in the host's page cache; "dax=always" fails where that cannot be. */
static void mount_layers(char lower[LAYERS_MAX * 8])
{
    uint64_t count = number("dsec.layers");
    if (count < 1 || count > LAYERS_MAX) {
        errno = EINVAL;
        give_up("read", "dsec.layers");
    }
    size_t at = 0;
    for (unsigned i = 0; i < count; i++) {
        char device[32], path[8];
        snprintf(device, sizeof(device), "/dev/pmem%u", i);
        snprintf(path, sizeof(path), "/l%u", i);
        await_device(device);
        mount_at(device, path, "erofs", MS_RDONLY | MS_NODEV, "dax=always");
        at += (size_t)snprintf(lower + at, 8, "%s%s", at ? ":" : "", path);
    }
}

static void mount_tree(void)
{
    char lower[LAYERS_MAX * 8], options[512];
    mount_layers(lower);
    await_device("/dev/vda");
    mount_at("/dev/vda", "/disk", "ext4", MS_NODEV | MS_NOATIME, "discard");
    disk_fd = open("/disk", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    make_dir("/disk/upper");
    make_dir("/disk/work");
    struct stat found;
    kept_resolv_conf = lstat("/disk/upper/etc/resolv.conf", &found) == 0;
    snprintf(options, sizeof(options), "lowerdir=%s,upperdir=/disk/upper,workdir=/disk/work,redirect_dir=on", lower);
    mount_at("dsec", "/root", "overlay", MS_NODEV | (number("dsec.readonly") ? MS_RDONLY : 0u), options);
}

/*
 * Over what the image has, which is of another machine. One that the sandbox has made or removed itself lies above it,
 * and stays.
 */
static void name_server(void)
{
    char server[WORD_BYTES], text[WORD_BYTES + 16];
    if (kept_resolv_conf || !word("dsec.dns", server))
        return;
    (void)unlink("/etc/resolv.conf");
    int fd = open("/etc/resolv.conf", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd < 0)
        return;
    (void)!write(fd, text, (size_t)snprintf(text, sizeof(text), "nameserver %s\n", server));
    close(fd);
}

static void mount_tmpfs(const char *path, const char *parameter, unsigned long flags)
{
    char options[64];
    uint64_t bytes = number(parameter);
    snprintf(options, sizeof(options), "mode=1777,size=%llu", (unsigned long long)(bytes ? bytes : (uint64_t)64 << 20));
    mount_at("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV | flags, options);
}

/* A read-only tree may lack the places to mount on: then what would be there is missing. */
static void move_into_tree(const char *path, const char *target)
{
    (void)mkdir(target, 0755);
    if (mount(path, target, NULL, MS_MOVE, NULL) < 0)
        give_up("move to", target);
}

static void enter_tree(void)
{
    move_into_tree("/dev", "/root/dev");
    move_into_tree("/proc", "/root/proc");
    move_into_tree("/sys", "/root/sys");
    (void)unlink("/init");
    if (chdir("/root") < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 || chdir("/") < 0)
        give_up("enter", "/root");
}

static void mount_the_rest(void)
{
    mount_at("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "ptmxmode=0666,mode=0620,gid=5");
    mount_at("mqueue", "/dev/mqueue", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    mount_tmpfs("/dev/shm", "dsec.shm", MS_NOEXEC);
    mount_tmpfs("/tmp", "dsec.tmp", 0);
    (void)symlink("/proc/self/fd", "/dev/fd");
    (void)symlink("/proc/self/fd/0", "/dev/stdin");
    (void)symlink("/proc/self/fd/1", "/dev/stdout");
    (void)symlink("/proc/self/fd/2", "/dev/stderr");
}

static void name_host(void)
{
    char name[WORD_BYTES], text[WORD_BYTES + 64];
    if (!word("dsec.hostname", name))
        return;
    (void)sethostname(name, strlen(name));
    int fd = open("/etc/hosts", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd < 0)
        return;
    int n = snprintf(text, sizeof(text), "127.0.0.1\tlocalhost\n::1\tlocalhost\n127.0.1.1\t%s\n", name);
    (void)!write(fd, text, (size_t)n);
    close(fd);
}

/* ---- cgroup */

static void limit(const char *attribute, uint64_t value)
{
    char text[32];
    snprintf(text, sizeof(text), "%llu", (unsigned long long)value);
    if (value > 0)
        (void)write_text(attribute, text);
}

/* Limits lie on `run`, where commands live, so that none of them can starve the agent beside it. */
static int make_cgroup(void)
{
    static const char *const controllers[] = {"+pids", "+memory", "+cpu"};
    mount_at("cgroup2", "/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    make_dir("/sys/fs/cgroup/run");
    for (size_t i = 0; i < sizeof(controllers) / sizeof(controllers[0]); i++) {
        (void)write_text("/sys/fs/cgroup/cgroup.subtree_control", controllers[i]);
        (void)write_text("/sys/fs/cgroup/run/cgroup.subtree_control", controllers[i]);
    }
    uint64_t memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    limit("/sys/fs/cgroup/run/memory.max", memory > 2 * RESERVE_BYTES ? memory - RESERVE_BYTES : 0);
    limit("/sys/fs/cgroup/run/memory.oom.group", number("dsec.oom_group"));
    limit("/sys/fs/cgroup/run/pids.max", number("dsec.pids"));
    int fd = open("/sys/fs/cgroup", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        give_up("open", "/sys/fs/cgroup");
    return fd;
}

/* What the kernel lacks of it is said on the console, and the sandbox does without. */
static void give_memory_back(void)
{
    const struct damon d = {number("dsec.damon_age"), number("dsec.damon_quota"), number("dsec.damon_sample")};
    uint64_t swap = number("dsec.zram");
    if (d.age_s > 0 && d.sample_us > 0 && memory_watch(&d) < 0)
        dprintf(2, "dsec-agent: guest: DAMON: %s\n", strerror(errno));
    if (swap > 0 && memory_swap(swap) < 0)
        dprintf(2, "dsec-agent: guest: zram: %s\n", strerror(errno));
}

int guest_enter(void)
{
    umask(0);
    mount_at("devtmpfs", "/dev", "devtmpfs", MS_NOSUID | MS_NOEXEC, "mode=0755");
    open_console();
    mount_at("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    mount_at("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    (void)write_text("/proc/self/oom_score_adj", "-1000");
    read_line();
    load_modules();
    mount_tree();
    enter_tree();
    umask(022);
    mount_the_rest();
    name_host();
    name_server();
    give_memory_back();
    return make_cgroup();
}

/* ---- being reached */

static int vsock_listen(unsigned port)
{
    struct sockaddr_vm address = {.svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = port};
    int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (const struct sockaddr *)&address, sizeof(address)) < 0 || listen(fd, 8) < 0)
        return -1;
    return conn_listen(fd);
}

int guest_listen(void)
{
    char name[WORD_BYTES];
    uint64_t vsock = number("dsec.vsock");
    if (vsock > 0)
        return vsock_listen((unsigned)vsock);
    if (!word("dsec.port", name)) {
        errno = ENODEV;
        return -1;
    }
    return port_open(name, DEVICE_WAIT_MS);
}
