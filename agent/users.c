/* SPDX-License-Identifier: Apache-2.0 */
#include "users.h"

#include "caps.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_MAX ((size_t)1 << 20)
#define NAME_MAX_BYTES 256
#define COLUMNS 7

/* The file's text, NUL-terminated, or NULL. O_NONBLOCK: a FIFO planted here must not stop us. */
static char *read_table(const char *path)
{
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    struct stat st;
    char *text = NULL;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size >= 0 && (size_t)st.st_size <= FILE_MAX)
        text = malloc((size_t)st.st_size + 1);
    size_t len = 0;
    while (text != NULL && len < (size_t)st.st_size) {
        ssize_t n = read(fd, text + len, (size_t)st.st_size - len);
        if (n <= 0)
            break;
        len += (size_t)n;
    }
    close(fd);
    if (text != NULL)
        text[len] = 0;
    return text;
}

/* Splits the line at *text in place; moves *text behind it. Returns the number of columns, 0 at the end. */
static size_t next_line(char **text, char *column[COLUMNS])
{
    char *line = *text;
    if (*line == 0)
        return 0;
    char *end = line + strcspn(line, "\n");
    *text = *end ? end + 1 : end;
    *end = 0;
    size_t n = 0;
    while (n < COLUMNS) {
        column[n++] = line;
        line = strchr(line, ':');
        if (line == NULL)
            break;
        *line++ = 0;
    }
    return n;
}

static bool parse_id(const char *text, unsigned *out)
{
    if (*text < '0' || *text > '9')
        return false;
    char *end;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    if (errno != 0 || *end != 0 || v >= 0xffffffffu) /* the last one means "no change" to the kernel */
        return false;
    *out = (unsigned)v;
    return true;
}

/* Looks for a name, or (name NULL) for a uid; fills uid, gid, home and the entry's name. */
static bool find_passwd(const char *name, uid_t uid, struct identity *out, char entry[NAME_MAX_BYTES])
{
    char *table = read_table("/etc/passwd"), *at = table;
    char *c[COLUMNS];
    bool found = false;
    for (size_t n; !found && at != NULL && (n = next_line(&at, c)) > 0;) {
        unsigned u, g;
        if (n < 6 || !parse_id(c[2], &u) || !parse_id(c[3], &g))
            continue;
        if (name != NULL ? strcmp(c[0], name) != 0 : u != uid)
            continue;
        found = true;
        out->uid = u;
        out->gid = g;
        if (c[5][0] == '/')
            snprintf(out->home, sizeof(out->home), "%s", c[5]);
        snprintf(entry, NAME_MAX_BYTES, "%s", c[0]);
    }
    free(table);
    return found;
}

static bool find_group(const char *name, gid_t *out)
{
    char *table = read_table("/etc/group"), *at = table;
    char *c[COLUMNS];
    bool found = false;
    for (size_t n; !found && at != NULL && (n = next_line(&at, c)) > 0;)
        found = n >= 3 && strcmp(c[0], name) == 0 && parse_id(c[2], out);
    free(table);
    return found;
}

static bool lists_member(char *members, const char *name)
{
    for (char *m = strtok(members, ","); m != NULL; m = strtok(NULL, ","))
        if (strcmp(m, name) == 0)
            return true;
    return false;
}

static void add_group(struct identity *out, gid_t gid)
{
    for (size_t i = 0; i < out->group_count; i++)
        if (out->groups[i] == gid)
            return;
    if (out->group_count < GROUPS_MAX)
        out->groups[out->group_count++] = gid;
}

static void find_memberships(const char *name, struct identity *out)
{
    char *table = read_table("/etc/group"), *at = table;
    char *c[COLUMNS];
    add_group(out, out->gid);
    for (size_t n; at != NULL && (n = next_line(&at, c)) > 0;) {
        unsigned gid;
        if (n >= 4 && parse_id(c[2], &gid) && lists_member(c[3], name))
            add_group(out, gid);
    }
    free(table);
}

/* A number is a uid even when no entry has it: gid 0 then, no other groups. */
static bool find_user(const char *name, struct identity *out, char entry[NAME_MAX_BYTES])
{
    unsigned uid;
    entry[0] = 0;
    if (!parse_id(name, &uid))
        return find_passwd(name, 0, out, entry);
    out->uid = uid;
    (void)find_passwd(NULL, uid, out, entry);
    return true;
}

int identity_find(const char *user, size_t len, struct identity *out)
{
    char spec[2 * NAME_MAX_BYTES], entry[NAME_MAX_BYTES];
    memset(out, 0, sizeof(*out));
    strcpy(out->home, "/");
    if (len >= sizeof(spec) || (len > 0 && memchr(user, 0, len) != NULL))
        return -1;
    if (len > 0)
        memcpy(spec, user, len);
    spec[len] = 0;
    char *group = strchr(spec, ':');
    if (group != NULL)
        *group++ = 0;
    if (!find_user(spec[0] ? spec : "0", out, entry))
        return -1;
    if (group == NULL) {
        if (entry[0])
            find_memberships(entry, out);
        return 0;
    }
    /* A group named explicitly is the only one. */
    return parse_id(group, &out->gid) || find_group(group, &out->gid) ? 0 : -1;
}

const char *identity_fault(void)
{
    return errno == EINVAL ? "its ids are outside the sandbox's range" : "take user's identity";
}

int identity_take(const struct identity *who, int container)
{
    if (setgroups(who->group_count, who->groups) < 0 || setresgid(who->gid, who->gid, who->gid) < 0)
        return -1;
    if (setresuid(who->uid, who->uid, who->uid) < 0)
        return -1;
    return container && who->uid == 0 ? caps_limit() : 0;
}
