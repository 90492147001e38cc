/* SPDX-License-Identifier: Apache-2.0 */
#include "worker.h"

#include "spawn.h"
#include "users.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

struct worker worker;

void worker_abandon(void)
{
    if (worker.clean_up != NULL)
        worker.clean_up();
    _exit(0);
}

void worker_flush(void)
{
    if (worker.out.failed) /* no memory for an answer: the agent reports that we died */
        worker_abandon();
    if (worker.out.len == 0)
        return;
    if (send(worker.fd, buf_head(&worker.out), worker.out.len, MSG_NOSIGNAL) < 0)
        worker_abandon();
    buf_take(&worker.out, worker.out.len);
}

bool worker_receive(struct frame *f, bool wait)
{
    static uint8_t message[FRAME_MAX];
    ssize_t n;
    do
        n = recv(worker.fd, message, sizeof(message), wait ? 0 : MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n < 0 && errno == EAGAIN)
        return false;
    if (n <= 0 || frame_decode(message, (size_t)n, f) != n)
        worker_abandon();
    return true;
}

void worker_ok(void)
{
    frame_end(&worker.out, frame_begin(&worker.out, T_OK, 0));
    worker_flush();
    _exit(0);
}

void worker_fail(const char *code, int err, const char *what)
{
    char message[256], which[32] = "";
    if (worker.record > 0)
        snprintf(which, sizeof(which), "file %u: ", worker.record);
    snprintf(message, sizeof(message), "%s%s%s%s", which, what, err ? ": " : "", err ? strerror(err) : "");
    put_error(&worker.out, 0, code, err, message);
    worker_flush();
    worker_abandon();
}

static const char *code_of(int err)
{
    switch (err) {
    case ENOENT:
        return "not-found";
    case EEXIST:
    case ENOTEMPTY:
        return "exists";
    case EACCES:
    case EPERM:
    case EROFS:
        return "denied";
    case ENOTDIR:
        return "not-directory";
    case EISDIR:
        return "is-directory";
    case ENOSPC:
    case EDQUOT:
        return "no-space";
    case EFBIG:
    case ENAMETOOLONG:
        return "too-large";
    case EINVAL:
    case ELOOP:
    case EXDEV:
        return "invalid";
    case EBUSY:
    case ETXTBSY:
    case EAGAIN:
        return "busy";
    default:
        return "io-error";
    }
}

void worker_fail_errno(const char *what)
{
    int err = errno;
    worker_fail(code_of(err), err, what);
}

uint64_t mtime_ns(const struct stat *st)
{
    return (uint64_t)st->st_mtim.tv_sec * 1000000000u + (uint64_t)st->st_mtim.tv_nsec;
}

void put_stat(struct buf *b, const struct stat *st, const char *target)
{
    put_u64(b, F_MODE, st->st_mode);
    put_u64(b, F_UID, st->st_uid);
    put_u64(b, F_GID, st->st_gid);
    put_u64(b, F_SIZE, (uint64_t)st->st_size);
    put_u64(b, F_MTIME_NS, mtime_ns(st));
    put_u64(b, F_NLINK, st->st_nlink);
    put_u64(b, F_INO, st->st_ino);
    if (target != NULL)
        put_text(b, F_TARGET, target);
}

void make_parents(char *path)
{
    for (char *at = path + 1; (at = strchr(at, '/')) != NULL; at++) {
        *at = 0;
        int r = mkdir(path, 0777);
        int err = errno;
        *at = '/';
        errno = err;
        if (r < 0 && errno != EEXIST)
            worker_fail_errno("make parent directory");
    }
}

static void become(const struct request *r)
{
    static struct identity who;
    if (identity_find((const char *)r->span[F_USER].data, r->span[F_USER].len, &who) < 0)
        worker_fail("no-such-user", 0, "user or group");
    if (identity_take(&who, spawn_config.container) < 0)
        worker_fail_errno(identity_fault());
    (void)prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    umask((mode_t)request_num(r, F_UMASK, 022) & 0777);
    (void)!chdir("/");
}

_Noreturn static void serve(uint8_t type)
{
    switch (type) {
    case T_FILE_GET:
        file_get();
    case T_FILE_PUT:
        file_put();
    case T_FILE_STAT:
        file_stat();
    case T_FILE_LIST:
        file_list();
    case T_FILE_REMOVE:
        file_remove();
    case T_FILE_MKDIR:
        file_mkdir();
    case T_FILE_RENAME:
        file_rename();
    default:
        worker_fail("invalid", 0, "request type");
    }
}

void worker_main(int fd, void *argument)
{
    static struct request request;
    const struct frame *f = argument;
    worker.fd = fd;
    buf_init(&worker.out, FRAME_MAX);
    if (!request_decode(f->payload, f->len, &request))
        worker_fail("invalid", 0, "malformed fields");
    worker.request = &request;
    if (!request_string(&request, F_PATH, worker.path, sizeof(worker.path)) || worker.path[0] != '/')
        worker_fail("invalid", 0, "PATH must be absolute, without zero bytes, at most 4,095 bytes");
    become(&request);
    serve(f->type);
}
