/* SPDX-License-Identifier: Apache-2.0 */
/* FILE_PUT: a temporary file beside the target, renamed over it when it is whole; one file, or one after the other. */
#include "worker.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WINDOW ((uint64_t)256 << 10)
#define LINKS_MAX 40

/* What a file is given when it is whole. */
struct attributes {
    bool has_mode, has_time;
    mode_t mode;
    int64_t mtime_ns;
};

static struct {
    int dir;             /* the target's directory */
    char name[NAME_MAX + 1];
    char temp[NAME_MAX + 1];
    int fd;              /* of the temporary file */
    bool existed;
    struct stat before;  /* the file being replaced */
    bool keep;           /* the part stays when the connection is lost */
    uint64_t owed;       /* credit */
} put = {.dir = -1, .fd = -1};

static void remove_temp(void)
{
    if (put.temp[0])
        (void)unlinkat(put.dir, put.temp, 0);
}

static void connection_lost(void)
{
    if (!put.keep)
        remove_temp();
}

/* ---- where to */

/* Opens the directory of `path` (below `from`, or absolute) and takes its last component as the name. */
static void locate(int from, char *path)
{
    char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    if (*name == 0 || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        worker_fail("is-directory", EISDIR, "the path names a directory");
    if (strlen(name) > NAME_MAX)
        worker_fail("too-large", ENAMETOOLONG, "file name");
    snprintf(put.name, sizeof(put.name), "%s", name);
    const char *parent = ".";
    if (slash == path)
        parent = "/";
    else if (slash != NULL) {
        *slash = 0;
        parent = path;
    }
    int dir = openat(from, parent, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0)
        worker_fail_errno("open parent directory");
    if (put.dir >= 0)
        close(put.dir);
    put.dir = dir;
}

/* A symlink at the end is written through, as open would: the file it leads to is replaced, the link stays. */
static void follow_links(void)
{
    char target[PATH_MAX];
    for (int i = 0; i < LINKS_MAX; i++) {
        ssize_t n = readlinkat(put.dir, put.name, target, sizeof(target) - 1);
        if (n < 0)
            return; /* no link, or nothing there */
        target[n] = 0;
        locate(put.dir, target);
    }
    worker_fail("invalid", ELOOP, "too many symbolic links");
}

static void examine(uint64_t flags)
{
    if (!(flags & PUT_EXCLUSIVE))
        follow_links();
    put.existed = fstatat(put.dir, put.name, &put.before, AT_SYMLINK_NOFOLLOW) == 0;
    if (!put.existed) {
        if (errno != ENOENT)
            worker_fail_errno("stat");
        return;
    }
    if (flags & PUT_EXCLUSIVE)
        worker_fail("exists", EEXIST, "put");
    if (S_ISDIR(put.before.st_mode))
        worker_fail("is-directory", EISDIR, "put");
    if (!S_ISREG(put.before.st_mode))
        worker_fail("not-regular", 0, "not a regular file");
    /* Replacing needs the directory only; who may not write the file shall not get around that. */
    if (faccessat(put.dir, put.name, W_OK, 0) < 0)
        worker_fail_errno("write");
}

/* ---- the temporary file */

static int open_part(void)
{
    int fd = openat(put.dir, put.temp, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0600);
    struct stat st;
    if (fd < 0 && errno != ELOOP && errno != EISDIR)
        return -1;
    if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid() && st.st_nlink == 1)
        return fd;
    if (fd >= 0)
        close(fd);
    /* Something else lies there under this name. */
    return unlinkat(put.dir, put.temp, 0) < 0
               ? -1
               : openat(put.dir, put.temp, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
}

static void open_temp(void)
{
    char part[ID_MAX + 1];
    if (request_has(worker.request, F_PART)) {
        if (!request_name(worker.request, F_PART, part))
            worker_fail("invalid", EINVAL, "PART");
        snprintf(put.temp, sizeof(put.temp), ".dsec-%s.part", part);
        put.fd = open_part();
    } else {
        uint64_t random = 0;
        (void)!getrandom(&random, sizeof(random), 0);
        snprintf(put.temp, sizeof(put.temp), ".dsec-%016llx.tmp", (unsigned long long)random);
        put.fd = openat(put.dir, put.temp, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    }
    if (put.fd < 0) {
        put.temp[0] = 0;
        worker_fail_errno("make temporary file");
    }
    if (flock(put.fd, LOCK_EX | LOCK_NB) < 0) {
        put.temp[0] = 0; /* another upload's */
        worker_fail("busy", EBUSY, "this PART is being written");
    }
}

/* ---- content */

static void grant(uint64_t bytes)
{
    put.owed += bytes;
    if (put.owed < WINDOW / 4)
        return; /* the host has the other three quarters meanwhile */
    size_t begun = frame_begin(&worker.out, T_CREDIT, 0);
    put_u64(&worker.out, F_STREAM, 0);
    put_u64(&worker.out, F_BYTES, put.owed);
    frame_end(&worker.out, begun);
    worker_flush();
    put.owed = 0;
}

_Noreturn static void fail_removing(const char *code, int err, const char *what)
{
    remove_temp();
    put.keep = true; /* there is nothing left to clean up */
    worker_fail(code, err, what);
}

_Noreturn static void fail_errno_removing(const char *what)
{
    int err = errno;
    remove_temp();
    put.keep = true;
    errno = err;
    worker_fail_errno(what);
}

static void write_at(const uint8_t *data, size_t left, uint64_t offset)
{
    while (left > 0) {
        ssize_t n = pwrite(put.fd, data, left, (off_t)offset);
        if (n < 0)
            fail_errno_removing("write");
        data += n;
        offset += (uint64_t)n;
        left -= (size_t)n;
    }
}

/* The offset of a DATA frame, whose bytes come behind it. */
static uint64_t data_offset(const struct frame *f)
{
    if (f->len < 8 || load_u64(f->payload) > INT64_MAX - f->len)
        fail_removing("invalid", EINVAL, "DATA offset");
    return load_u64(f->payload);
}

static void write_piece(const struct frame *f)
{
    uint64_t offset = data_offset(f);
    write_at(f->payload + 8, f->len - 8, offset);
    grant(f->len - 8);
}

/* ---- commit */

static void set_attributes(const struct attributes *a)
{
    mode_t mode = a->mode;
    if (put.existed) {
        /* Only root can; for others a replaced file becomes theirs. */
        (void)!fchown(put.fd, put.before.st_uid, put.before.st_gid);
        if (!a->has_mode)
            mode = put.before.st_mode & 07777;
    }
    if (fchmod(put.fd, mode) < 0)
        fail_errno_removing("chmod");
    if (!a->has_time)
        return;
    int64_t part = a->mtime_ns % 1000000000;
    if (part < 0)
        part += 1000000000;
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT},
                                {.tv_sec = (time_t)((a->mtime_ns - part) / 1000000000), .tv_nsec = (long)part}};
    if (futimens(put.fd, times) < 0)
        fail_errno_removing("set time");
}

static int publish(bool exclusive)
{
    if (!exclusive)
        return renameat(put.dir, put.temp, put.dir, put.name);
    int r = (int)syscall(SYS_renameat2, put.dir, put.temp, put.dir, put.name, 1u /* RENAME_NOREPLACE */);
    if (r == 0 || errno != EINVAL)
        return r;
    /* This file system does not know the flag; link never replaces either. */
    if (linkat(put.dir, put.temp, put.dir, put.name, 0) < 0)
        return -1;
    return unlinkat(put.dir, put.temp, 0);
}

static void finish(uint64_t size, const struct attributes *a, bool exclusive)
{
    if (ftruncate(put.fd, (off_t)size) < 0)
        fail_errno_removing("set size");
    set_attributes(a);
    if (publish(exclusive) < 0)
        fail_errno_removing("rename into place");
    put.temp[0] = 0; /* it has its name: nothing is to be removed any more */
}

static uint64_t committed_size(const struct frame *f)
{
    struct request r;
    if (!request_decode(f->payload, f->len, &r) || !request_has(&r, F_SIZE) || r.num[F_SIZE] > INT64_MAX)
        fail_removing("invalid", EINVAL, "COMMIT without a SIZE");
    return r.num[F_SIZE];
}

_Noreturn static void commit(const struct frame *f, uint64_t flags)
{
    const struct request *r = worker.request;
    mode_t mask = (mode_t)request_num(r, F_UMASK, 022) & 0777;
    struct attributes a = {request_has(r, F_MODE), request_has(r, F_MTIME_NS),
                           (mode_t)request_num(r, F_MODE, 0666) & 07777 & ~mask, (int64_t)r->num[F_MTIME_NS]};
    finish(committed_size(f), &a, flags & PUT_EXCLUSIVE);
    struct stat st;
    size_t begun = frame_begin(&worker.out, T_OK, 0);
    if (fstat(put.fd, &st) == 0)
        put_stat(&worker.out, &st, NULL);
    frame_end(&worker.out, begun);
    worker_flush();
    _exit(0);
}

/* ---- many files, as records: a header, the name below PATH, the contents */

static struct {
    int top;
    uint64_t stream;                        /* bytes of records so far */
    uint8_t head[RECORD_HEADER + PATH_MAX]; /* header and name, as far as they have come, and a zero byte */
    size_t have;
    struct attributes attributes;
    uint64_t size, left;                    /* of the file being written */
} many = {.top = -1};

static void make_directory(const char *name, mode_t mode)
{
    struct stat st;
    if (mkdirat(many.top, name, mode) == 0)
        return;
    int err = errno;
    if (err == EEXIST && fstatat(many.top, name, &st, 0) == 0 && S_ISDIR(st.st_mode))
        return;
    errno = err;
    worker_fail_errno("make directory");
}

static void end_file(void)
{
    finish(many.size, &many.attributes, false);
    close(put.fd);
    put.fd = -1;
}

/* Header and name are there. */
static void begin_record(void)
{
    mode_t mode = load_u32(many.head);
    char *name = (char *)many.head + RECORD_HEADER;
    size_t len = many.have - RECORD_HEADER;
    name[len] = 0;
    many.attributes = (struct attributes){true, true, mode & 07777, (int64_t)load_u64(many.head + 4)};
    many.size = many.left = load_u32(many.head + 16);
    many.have = 0;
    if (strlen(name) != len || name[0] == '/')
        worker_fail("invalid", EINVAL, "the name must be relative, without zero bytes");
    if (S_ISDIR(mode) && many.size == 0) {
        make_directory(name, mode & 07777);
        return;
    }
    if (!S_ISREG(mode))
        worker_fail("invalid", EINVAL, "neither a regular file nor a directory");
    locate(many.top, name);
    examine(0);
    open_temp();
    if (many.left == 0)
        end_file();
}

/* Header or name; how many of the bytes were theirs. */
static size_t take_head(const uint8_t *data, size_t len)
{
    size_t need = RECORD_HEADER;
    if (many.have >= RECORD_HEADER)
        need += load_u32(many.head + 12);
    size_t n = need - many.have < len ? need - many.have : len;
    if (many.have == 0)
        worker.record++;
    memcpy(many.head + many.have, data, n);
    many.have += n;
    if (many.have == RECORD_HEADER) {
        uint32_t name = load_u32(many.head + 12);
        if (name == 0 || name >= PATH_MAX)
            worker_fail("invalid", EINVAL, "the name must have 1 to 4,095 bytes");
    } else if (many.have == need)
        begin_record();
    return n;
}

static size_t take_contents(const uint8_t *data, size_t len)
{
    size_t n = many.left < len ? (size_t)many.left : len;
    write_at(data, n, many.size - many.left);
    many.left -= n;
    if (many.left == 0)
        end_file();
    return n;
}

static void take_records(const struct frame *f)
{
    if (data_offset(f) != many.stream)
        fail_removing("invalid", EINVAL, "DATA offset");
    const uint8_t *data = f->payload + 8;
    for (size_t left = f->len - 8, n; left > 0; data += n, left -= n)
        n = many.left > 0 ? take_contents(data, left) : take_head(data, left);
    many.stream += f->len - 8;
    grant(f->len - 8);
}

_Noreturn static void commit_records(const struct frame *f)
{
    if (many.have > 0 || many.left > 0 || committed_size(f) != many.stream)
        fail_removing("invalid", EINVAL, "the last record is cut short");
    worker_ok();
}

/* ---- the request */

static void be_ready(uint64_t offset)
{
    worker.clean_up = connection_lost;
    size_t begun = frame_begin(&worker.out, T_READY, 0);
    put_u64(&worker.out, F_OFFSET, offset);
    put_u64(&worker.out, F_CREDIT, WINDOW);
    frame_end(&worker.out, begun);
    worker_flush();
}

static void begin_one(uint64_t flags)
{
    struct stat st;
    if (flags & PUT_PARENTS)
        make_parents(worker.path);
    locate(AT_FDCWD, worker.path);
    examine(flags);
    open_temp();
    put.keep = (flags & PUT_KEEP_PART) && request_has(worker.request, F_PART);
    worker.clean_up = connection_lost;
    if (fstat(put.fd, &st) < 0)
        worker_fail_errno("stat");
    be_ready((uint64_t)st.st_size);
}

static void begin_many(void)
{
    many.top = open(worker.path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (many.top < 0)
        worker_fail_errno("open directory");
    be_ready(0);
}

void file_put(void)
{
    uint64_t flags = request_num(worker.request, F_FLAGS, 0);
    bool several = flags & PUT_MANY;
    if (several)
        begin_many();
    else
        begin_one(flags);
    for (struct frame f; worker_receive(&f, true);) {
        if (f.type == T_DATA && several)
            take_records(&f);
        else if (f.type == T_DATA)
            write_piece(&f);
        else if (f.type == T_COMMIT && several)
            commit_records(&f);
        else if (f.type == T_COMMIT)
            commit(&f, flags);
        else if (f.type == T_CLOSE) {
            put.keep = false;
            worker_abandon();
        } else
            fail_removing("invalid", EINVAL, "only DATA and COMMIT are expected here");
    }
    worker_abandon();
}
