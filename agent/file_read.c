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
#define MANY_BYTES ((size_t)64 << 10) /* larger files go alone */

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

static void send_info(const struct stat *st)
{
    size_t begun = frame_begin(&worker.out, T_INFO, 0);
    put_stat(&worker.out, st, NULL);
    frame_end(&worker.out, begun);
    worker_flush();
}

_Noreturn static void end_at(uint64_t offset)
{
    size_t begun = frame_begin(&worker.out, T_OK, 0);
    put_u64(&worker.out, F_END, offset);
    frame_end(&worker.out, begun);
    worker_flush();
    _exit(0);
}

/* ---- many files, as records: a header, the contents */

static struct {
    uint8_t data[DATA_BYTES]; /* of the records, what was not sent yet */
    size_t len;
    uint64_t sent;
} many;

static void send_records(void)
{
    for (size_t done = 0, n; done < many.len; done += n) {
        wait_for_credit();
        n = many.len - done;
        if (n > credit)
            n = (size_t)credit;
        uint8_t offset[DATA_OFFSET];
        store_u64(offset, many.sent);
        size_t begun = frame_begin(&worker.out, T_DATA, 0);
        buf_add(&worker.out, offset, sizeof(offset));
        buf_add(&worker.out, many.data + done, n);
        frame_end(&worker.out, begun);
        worker_flush();
        many.sent += n;
        credit -= n;
    }
    many.len = 0;
}

static void add_to_records(const uint8_t *data, size_t len)
{
    while (len > 0) {
        size_t n = sizeof(many.data) - many.len < len ? sizeof(many.data) - many.len : len;
        memcpy(many.data + many.len, data, n);
        many.len += n;
        data += n;
        len -= n;
        if (many.len == sizeof(many.data))
            send_records();
    }
}

/* All of a regular file of at most `max` bytes without a hole; -1 for whatever is not that, or is not any more. */
static ssize_t read_small(int fd, struct stat *st, size_t max, uint8_t out[MANY_BYTES + 1])
{
    if (fstat(fd, st) < 0 || !S_ISREG(st->st_mode) || (uint64_t)st->st_size > max)
        return -1;
    size_t size = (size_t)st->st_size, have = 0;
    if (size > 0 && lseek(fd, 0, SEEK_HOLE) != st->st_size)
        return -1;
    for (ssize_t n; have <= size; have += (size_t)n) { /* one byte more, for a file that grew or tells no size */
        n = pread(fd, out + have, size + 1 - have, (off_t)have);
        if (n < 0)
            return -1;
        if (n == 0)
            break;
    }
    return have == size ? (ssize_t)size : -1;
}

static void add_file(int top, const char *name, size_t max)
{
    static uint8_t contents[MANY_BYTES + 1];
    uint8_t head[RECORD_HEADER] = {0}; /* mode 0: it has to be asked for alone */
    struct stat st;
    ssize_t size = -1;
    /* Asked first, as in open_regular. */
    if (fstatat(top, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode)) {
        int fd = openat(top, name, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW | O_CLOEXEC);
        if (fd >= 0) {
            size = read_small(fd, &st, max, contents);
            close(fd);
        }
    }
    if (size >= 0) {
        store_u32(head, st.st_mode);
        store_u64(head + 4, mtime_ns(&st));
        store_u32(head + 16, (uint32_t)size);
    }
    add_to_records(head, sizeof(head));
    if (size > 0)
        add_to_records(contents, (size_t)size);
}

_Noreturn static void get_many(const struct span *names)
{
    struct stat st;
    uint64_t bytes = request_num(worker.request, F_BYTES, 0);
    size_t max = bytes < MANY_BYTES ? (size_t)bytes : MANY_BYTES;
    int top = open(worker.path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (top < 0 || fstat(top, &st) < 0)
        worker_fail_errno("open directory");
    if (names->len == 0 || names->data[names->len - 1] != 0)
        worker_fail("invalid", EINVAL, "each NAME must be ended by a zero byte");
    send_info(&st);
    const char *name = (const char *)names->data, *end = name + names->len;
    for (; name < end; name += strlen(name) + 1)
        add_file(top, name, max);
    send_records();
    end_at(many.sent);
}

void file_get(void)
{
    struct stat st;
    credit = request_num(worker.request, F_CREDIT, 0);
    if (request_has(worker.request, F_NAME))
        get_many(&worker.request->span[F_NAME]);
    int fd = open_regular(&st);
    uint64_t offset = request_num(worker.request, F_OFFSET, 0), bytes = request_num(worker.request, F_BYTES, 0);
    uint64_t size = (uint64_t)st.st_size;
    if (offset > INT64_MAX)
        worker_fail("invalid", EINVAL, "OFFSET");
    send_info(&st);
    /* The kernel's own files (/proc) have a size of 0 and are read until they end. */
    uint64_t end = size == 0 ? INT64_MAX : size;
    if (bytes > 0 && bytes < end - (offset < end ? offset : end))
        end = offset + bytes;
    end_at(size == 0 ? send_range(fd, offset, end) : send_extents(fd, offset, end));
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
