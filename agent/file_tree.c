/* SPDX-License-Identifier: Apache-2.0 */
/* FILE_REMOVE, FILE_MKDIR, FILE_RENAME. */
#include "worker.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define DEPTH_MAX 100 /* open directories at once; what lies deeper is first moved up */

/* ---- FILE_REMOVE */

static int top = -1;          /* the directory being removed */
static unsigned long long moved; /* directories moved up to it so far */

static void empty(int dir, int depth);

static void remove_directory(int dir, const char *name, int depth)
{
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        worker_fail_errno("open directory");
    empty(fd, depth); /* takes fd over */
    if (unlinkat(dir, name, AT_REMOVEDIR) < 0 && errno != ENOENT)
        worker_fail_errno("remove directory");
}

static void remove_deep(int dir, const char *name)
{
    char up[40];
    snprintf(up, sizeof(up), ".dsec-remove-%llu", moved++);
    if (renameat(dir, name, top, up) < 0)
        worker_fail_errno("move directory");
}

static void remove_entry(int dir, const char *name, int depth)
{
    if (unlinkat(dir, name, 0) == 0 || errno == ENOENT)
        return;
    if (errno != EISDIR && errno != EPERM) /* the kernel says EISDIR, POSIX EPERM */
        worker_fail_errno("remove");
    struct stat st;
    int err = errno;
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISDIR(st.st_mode)) {
        errno = err;
        worker_fail_errno("remove");
    }
    if (depth >= DEPTH_MAX)
        remove_deep(dir, name);
    else
        remove_directory(dir, name, depth + 1);
}

static void empty(int dir, int depth)
{
    DIR *d = fdopendir(dir);
    if (d == NULL)
        worker_fail_errno("open directory");
    for (struct dirent *e; (errno = 0, e = readdir(d)) != NULL;)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            remove_entry(dirfd(d), e->d_name, depth);
    if (errno != 0)
        worker_fail_errno("read directory");
    closedir(d);
}

static void remove_tree(void)
{
    top = open(worker.path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (top < 0)
        worker_fail_errno("open directory");
    unsigned long long before;
    do { /* again while something was moved up, which the reading may have missed */
        before = moved;
        int dir = openat(top, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (dir < 0)
            worker_fail_errno("open directory");
        empty(dir, 0);
    } while (moved != before);
}

void file_remove(void)
{
    struct stat st;
    if (lstat(worker.path, &st) < 0)
        worker_fail_errno("remove");
    if (!S_ISDIR(st.st_mode)) {
        if (unlink(worker.path) < 0)
            worker_fail_errno("remove");
        worker_ok();
    }
    if (request_num(worker.request, F_FLAGS, 0) & REMOVE_RECURSIVE)
        remove_tree();
    if (rmdir(worker.path) < 0)
        worker_fail_errno("remove directory");
    worker_ok();
}

/* ---- FILE_MKDIR, FILE_RENAME */

void file_mkdir(void)
{
    bool parents = request_num(worker.request, F_FLAGS, 0) & MKDIR_PARENTS;
    mode_t mode = (mode_t)request_num(worker.request, F_MODE, 0777) & 07777;
    size_t len = strlen(worker.path);
    struct stat st;
    while (len > 1 && worker.path[len - 1] == '/')
        worker.path[--len] = 0;
    if (parents)
        make_parents(worker.path);
    if (mkdir(worker.path, mode) == 0)
        worker_ok();
    int err = errno;
    if (parents && err == EEXIST && stat(worker.path, &st) == 0 && S_ISDIR(st.st_mode))
        worker_ok();
    errno = err;
    worker_fail_errno("make directory");
}

void file_rename(void)
{
    char target[PATH_MAX];
    if (!request_string(worker.request, F_TARGET, target, sizeof(target)) || target[0] != '/')
        worker_fail("invalid", EINVAL, "TARGET must be absolute");
    if (rename(worker.path, target) < 0)
        worker_fail_errno("rename");
    worker_ok();
}
