/* SPDX-License-Identifier: Apache-2.0 */
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <unistd.h>

#define KDAMOND "/sys/kernel/mm/damon/admin/kdamonds/0/"
#define CONTEXT KDAMOND "contexts/0/"
#define SCHEME CONTEXT "schemes/0/"
#define AGGREGATE 20u /* samples between two looks at their sum */
#define UPDATE_US 60000000u
#define RANGES_MAX 8u
#define SMALL ((uint64_t)16 << 20) /* ranges below are not worth watching */
#define PAGE 4096u

static int write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t n = write(fd, text, strlen(text));
    int err = errno;
    close(fd);
    errno = err;
    return n < 0 ? -1 : 0;
}

static int write_number(const char *path, uint64_t value)
{
    char text[24];
    snprintf(text, sizeof(text), "%llu", (unsigned long long)value);
    return write_file(path, text);
}

/* ---- DAMON: Documentation/admin-guide/mm/damon/usage.rst */

struct range {
    uint64_t start, end;
};

/* What the machine has as memory: on both sides of the hole for devices, when it is large. */
static unsigned memory_ranges(struct range out[RANGES_MAX])
{
    char line[128];
    unsigned count = 0;
    FILE *map = fopen("/proc/iomem", "re");
    while (map != NULL && count < RANGES_MAX && fgets(line, sizeof(line), map) != NULL) {
        unsigned long long start, end;
        if (strstr(line, ": System RAM") == NULL || sscanf(line, "%llx-%llx", &start, &end) != 2)
            continue;
        if (end - start >= SMALL)
            out[count++] = (struct range){start, end + 1};
    }
    if (map != NULL)
        fclose(map);
    return count;
}

static int set_targets(void)
{
    struct range ranges[RANGES_MAX];
    unsigned count = memory_ranges(ranges);
    char path[128];
    if (count == 0) {
        errno = ENODATA;
        return -1;
    }
    int bad = write_number(CONTEXT "targets/nr_targets", 1) | write_number(CONTEXT "targets/0/regions/nr_regions", count);
    for (unsigned i = 0; i < count && bad == 0; i++) {
        snprintf(path, sizeof(path), CONTEXT "targets/0/regions/%u/start", i);
        bad |= write_number(path, ranges[i].start);
        snprintf(path, sizeof(path), CONTEXT "targets/0/regions/%u/end", i);
        bad |= write_number(path, ranges[i].end);
    }
    return bad;
}

static int set_scheme(const struct damon *d, uint64_t aggregate_us)
{
    uint64_t age = d->age_s * 1000000u / aggregate_us;
    return write_number(CONTEXT "schemes/nr_schemes", 1) | write_file(SCHEME "action", "pageout") |
           write_number(SCHEME "access_pattern/sz/min", PAGE) | write_number(SCHEME "access_pattern/sz/max", UINT64_MAX) |
           write_number(SCHEME "access_pattern/nr_accesses/min", 0) | write_number(SCHEME "access_pattern/nr_accesses/max", 0) |
           write_number(SCHEME "access_pattern/age/min", age) | write_number(SCHEME "access_pattern/age/max", UINT32_MAX) |
           write_number(SCHEME "quotas/ms", 0) | write_number(SCHEME "quotas/bytes", d->quota) |
           write_number(SCHEME "quotas/reset_interval_ms", 1000) | write_file(SCHEME "watermarks/metric", "none");
}

int memory_watch(const struct damon *d)
{
    uint64_t aggregate_us = d->sample_us * AGGREGATE;
    if (write_number("/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds", 1) < 0)
        return -1;
    if (write_number(KDAMOND "contexts/nr_contexts", 1) < 0 || write_file(CONTEXT "operations", "paddr") < 0)
        return -1;
    int bad = write_number(CONTEXT "monitoring_attrs/intervals/sample_us", d->sample_us) |
              write_number(CONTEXT "monitoring_attrs/intervals/aggr_us", aggregate_us) |
              write_number(CONTEXT "monitoring_attrs/intervals/update_us", UPDATE_US) |
              write_number(CONTEXT "monitoring_attrs/nr_regions/min", 10) |
              write_number(CONTEXT "monitoring_attrs/nr_regions/max", 1000);
    if (bad != 0 || set_targets() != 0 || set_scheme(d, aggregate_us) != 0)
        return -1;
    return write_file(KDAMOND "state", "on");
}

/* ---- zram: Documentation/admin-guide/blockdev/zram.rst, mkswap(8) */

/* The first page of a swap area: its version and size at 1024, its name in the last ten bytes. include/linux/swap.h */
static int make_swap(const char *device, uint64_t bytes)
{
    static uint8_t page[PAGE];
    uint32_t header[2] = {1, (uint32_t)(bytes / PAGE - 1)};
    memcpy(page + 1024, header, sizeof(header));
    memcpy(page + PAGE - 10, "SWAPSPACE2", 10);
    int fd = open(device, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t n = write(fd, page, sizeof(page));
    close(fd);
    return n == (ssize_t)sizeof(page) ? 0 : -1;
}

int memory_swap(uint64_t bytes)
{
    if (write_number("/sys/block/zram0/disksize", bytes) < 0 || make_swap("/dev/zram0", bytes) < 0)
        return -1;
    return swapon("/dev/zram0", SWAP_FLAG_DISCARD);
}
