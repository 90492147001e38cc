/* SPDX-License-Identifier: Apache-2.0 */
/* FILE_GET, FILE_STAT, FILE_LIST. */
#include "worker.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#define DATA_BYTES ((size_t)60 << 10)
#define DATA_OFFSET 8u
#define LIST_DEFAULT 1000u
#define LIST_MAX 10000u
#define BATCH_BYTES ((size_t)32 << 10)

/* ---- FILE_GET */

static uint64_t credit;

static void take_credit(const struct frame *f)
{
    struct request r;
    if (f->type == T_CLOSE)
        worker_abandon();
    if (f->type != T_CREDIT || !request_decode(f->payload, f->len, &r))
        worker_fail("invalid", 0, "only CREDIT is expected here");
    uint64_t more = request_num(&r, F_BYTES, 0);
    credit = more > UINT64_MAX - credit ? UINT64_MAX : credit + more;
}

static void wait_for_credit(void)
{
    struct frame f;
    while (worker_receive(&f, credit == 0))
        take_credit(&f);
}

/* One DATA frame from the file's present position; the bytes sent, 0 at the end of the file. */
static size_t send_piece(int fd, uint64_t offset, uint64_t max)
{
    wait_for_credit();
    size_t want = max < DATA_BYTES ? (size_t)max : DATA_BYTES;
    if (want > credit)
        want = (size_t)credit;
    size_t begun = frame_begin(&worker.out, T_DATA, 0);
    uint8_t *p = buf_reserve(&worker.out, DATA_OFFSET + want);
    if (p == NULL)
        worker_abandon();
    store_u64(p, offset);
    ssize_t n = pread(fd, p + DATA_OFFSET, want, (off_t)offset);
    if (n <= 0) {
        int err = errno;
        buf_truncate(&worker.out, begun);
        errno = err;
        if (n < 0)
            worker_fail_errno("read");
        return 0;
    }
    buf_commit(&worker.out, DATA_OFFSET + (size_t)n);
    frame_end(&worker.out, begun);
    worker_flush();
    credit -= (uint64_t)n;
    return (size_t)n;
}

static uint64_t send_range(int fd, uint64_t from, uint64_t to)
{
    while (from < to) {
        size_t n = send_piece(fd, from, to - from);
        if (n == 0)
            break;
        from += n;
    }
    return from;
}

/* Data extents only. A file system that knows nothing of holes is all data. */
static uint64_t send_extents(int fd, uint64_t from, uint64_t to)
{
    while (from < to) {
        off_t data = lseek(fd, (off_t)from, SEEK_DATA);
        if (data < 0 && errno == ENXIO) /* nothing but a hole up to the end */
            return to;
        off_t hole = data < 0 ? -1 : lseek(fd, data, SEEK_HOLE);
        if (data < 0)
            data = (off_t)from;
        uint64_t stop = hole < 0 || (uint64_t)hole > to ? to : (uint64_t)hole;
        if ((uint64_t)data >= to)
            return to;
        from = send_range(fd, (uint64_t)data, stop);
        if (from < stop) /* it was cut while we read */
            break;
    }
    return from;
}

static int open_regular(struct stat *st)
{
    /* Asked first: merely opening a device can have effects. */
    if (stat(worker.path, st) < 0)
        worker_fail_errno("stat");
    if (S_ISDIR(st->st_mode))
        worker_fail("is-directory", EISDIR, "read");
    if (!S_ISREG(st->st_mode))
        worker_fail("not-regular", 0, "not a regular file");
    int fd = open(worker.path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, st) < 0)
        worker_fail_errno("open");
    if (!S_ISREG(st->st_mode))
        worker_fail("not-regular", 0, "not a regular file");
    return fd;
}

void file_get(void)
{
    struct stat st;
    int fd = open_regular(&st);
    uint64_t offset = request_num(worker.request, F_OFFSET, 0), bytes = request_num(worker.request, F_BYTES, 0);
    uint64_t size = (uint64_t)st.st_size;
    credit = request_num(worker.request, F_CREDIT, 0);
    if (offset > INT64_MAX)
        worker_fail("invalid", EINVAL, "OFFSET");
    size_t begun = frame_begin(&worker.out, T_INFO, 0);
    put_stat(&worker.out, &st, NULL);
    frame_end(&worker.out, begun);
    worker_flush();
    /* The kernel's own files (/proc) have a size of 0 and are read until they end. */
    uint64_t end = size == 0 ? INT64_MAX : size;
    if (bytes > 0 && bytes < end - (offset < end ? offset : end))
        end = offset + bytes;
    end = size == 0 ? send_range(fd, offset, end) : send_extents(fd, offset, end);
    begun = frame_begin(&worker.out, T_OK, 0);
    put_u64(&worker.out, F_END, end);
    frame_end(&worker.out, begun);
    worker_flush();
    _exit(0);
}

/* ---- FILE_STAT, FILE_LIST */

static const char *link_target(int dir, const char *name, const struct stat *st, char out[PATH_MAX])
{
    if (!S_ISLNK(st->st_mode))
        return NULL;
    ssize_t n = readlinkat(dir, name, out, PATH_MAX - 1);
    out[n < 0 ? 0 : n] = 0;
    return out;
}

void file_stat(void)
{
    struct stat st;
    char target[PATH_MAX];
    bool follow = request_num(worker.request, F_FLAGS, 0) & STAT_FOLLOW;
    if (fstatat(AT_FDCWD, worker.path, &st, follow ? 0 : AT_SYMLINK_NOFOLLOW) < 0)
        worker_fail_errno("stat");
    size_t begun = frame_begin(&worker.out, T_INFO, 0);
    put_stat(&worker.out, &st, link_target(AT_FDCWD, worker.path, &st, target));
    frame_end(&worker.out, begun);
    worker_ok();
}

static void put_entry(int dir, const char *name)
{
    struct stat st;
    char target[PATH_MAX];
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0) {
        if (errno == ENOENT) /* gone since the directory was read */
            return;
        /* It is there, but this file system does not tell more. */
        memset(&st, 0, sizeof(st));
    }
    size_t begun = frame_begin(&worker.out, T_INFO, 0);
    put_text(&worker.out, F_NAME, name);
    put_stat(&worker.out, &st, link_target(dir, name, &st, target));
    frame_end(&worker.out, begun);
    if (worker.out.len >= BATCH_BYTES)
        worker_flush();
}

static DIR *open_at_cursor(uint64_t cursor)
{
    int fd = open(worker.path, O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        worker_fail_errno("open directory");
    if (cursor > INT64_MAX || (cursor > 0 && lseek(fd, (off_t)cursor, SEEK_SET) < 0))
        worker_fail("invalid", EINVAL, "CURSOR");
    DIR *dir = fdopendir(fd);
    if (dir == NULL)
        worker_fail_errno("open directory");
    return dir;
}

/* The cursor is the kernel's own position behind an entry: no page costs more than another. */
void file_list(void)
{
    uint64_t limit = request_num(worker.request, F_LIMIT, LIST_DEFAULT);
    uint64_t cursor = request_num(worker.request, F_CURSOR, 0);
    limit = limit < 1 ? LIST_DEFAULT : limit > LIST_MAX ? LIST_MAX : limit;
    DIR *dir = open_at_cursor(cursor);
    struct dirent *e;
    errno = 0;
    while ((e = readdir(dir)) != NULL) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        if (limit-- == 0)
            break;
        put_entry(dirfd(dir), e->d_name);
        cursor = (uint64_t)e->d_off;
        errno = 0;
    }
    if (e == NULL && errno != 0)
        worker_fail_errno("read directory");
    size_t begun = frame_begin(&worker.out, T_OK, 0);
    put_u64(&worker.out, F_CURSOR, e == NULL ? 0 : cursor);
    frame_end(&worker.out, begun);
    worker_flush();
    _exit(0);
}
