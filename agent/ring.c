/* SPDX-License-Identifier: Apache-2.0 */
#include "ring.h"

#include <string.h>
#include <sys/mman.h>

#define FIRST_CAP ((size_t)16 << 10)
#define NEARLY_FULL ((size_t)4 << 10)

static size_t taken; /* of RING_BUDGET */
static bool starved;

void ring_init(struct ring *r, size_t max)
{
    memset(r, 0, sizeof(*r));
    r->max = max;
}

bool ring_starved(void)
{
    bool was = starved;
    starved = false;
    return was;
}

/* MADV_DONTFORK: a fork neither copies page tables for output nor shows one exec's output to another's child. */
static uint8_t *take(size_t cap)
{
    if (cap > RING_BUDGET - taken)
        return NULL;
    void *p = mmap(NULL, cap, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    if (madvise(p, cap, MADV_DONTFORK) < 0) {
        munmap(p, cap);
        return NULL;
    }
    taken += cap;
    return p;
}

static void give(uint8_t *data, size_t cap)
{
    if (data == NULL)
        return;
    munmap(data, cap);
    taken -= cap;
}

void ring_free(struct ring *r)
{
    give(r->data, r->cap);
    r->data = NULL;
    r->cap = 0;
    r->start = r->end;
}

static bool resize(struct ring *r, size_t cap)
{
    uint8_t *data = take(cap);
    if (data == NULL) {
        starved = true;
        return false;
    }
    uint64_t start = r->start;
    size_t held = (size_t)(r->end - start);
    /* The new place of offset o is o % cap, so the copy may wrap at both ends. */
    while (held > 0) {
        size_t at = (size_t)(start % cap);
        size_t n = ring_copy(r, start, data + at, held < cap - at ? held : cap - at);
        start += n;
        held -= n;
    }
    give(r->data, r->cap);
    r->data = data;
    r->cap = cap;
    return true;
}

static bool grow(struct ring *r)
{
    size_t cap = r->cap ? r->cap * 4 : FIRST_CAP;
    return resize(r, cap > r->max ? r->max : cap);
}

/* Nothing is overwritten, read or not, while the ring may still grow: whoever attaches late wants all of it. */
static void make_room(struct ring *r, size_t n)
{
    while (r->cap < r->max && r->cap - (size_t)(r->end - r->start) < n)
        if (!grow(r))
            return;
}

size_t ring_space(struct ring *r, uint64_t floor)
{
    /* Nothing came yet: room is taken with the first byte, since many commands print none. */
    if (r->cap == 0 && r->max >= FIRST_CAP && FIRST_CAP <= RING_BUDGET - taken)
        return FIRST_CAP;
    if (r->cap < r->max && r->cap - (size_t)(r->end - r->start) < NEARLY_FULL)
        (void)grow(r);
    if (floor < r->start)
        floor = r->start;
    if (floor > r->end)
        floor = r->end;
    return r->cap - (size_t)(r->end - floor);
}

void ring_add(struct ring *r, const uint8_t *data, size_t n)
{
    make_room(r, n);
    if (n > r->cap) { /* more than it holds: only the tail counts (nothing at all without memory) */
        size_t skip = n - r->cap;
        r->end += skip;
        r->start = r->end;
        data += skip;
        n = r->cap;
    }
    if (n == 0)
        return;
    size_t at = (size_t)(r->end % r->cap);
    size_t first = n < r->cap - at ? n : r->cap - at;
    memcpy(r->data + at, data, first);
    memcpy(r->data, data + first, n - first);
    r->end += n;
    if (r->end - r->start > r->cap)
        r->start = r->end - r->cap;
}

size_t ring_copy(const struct ring *r, uint64_t offset, uint8_t *out, size_t n)
{
    if (offset < r->start || offset >= r->end || r->cap == 0)
        return 0;
    if (n > r->end - offset)
        n = (size_t)(r->end - offset);
    size_t at = (size_t)(offset % r->cap);
    size_t first = n < r->cap - at ? n : r->cap - at;
    memcpy(out, r->data + at, first);
    memcpy(out + first, r->data, n - first);
    return n;
}

void ring_trim(struct ring *r)
{
    size_t held = (size_t)(r->end - r->start);
    if (held == 0) {
        ring_free(r);
        return;
    }
    size_t cap = (held + 4095) & ~(size_t)4095;
    if (cap <= r->cap / 2 && !resize(r, cap))
        starved = false; /* a bigger one than needed stays: no harm */
}
