/* SPDX-License-Identifier: Apache-2.0 */
#include "buf.h"

#include <stdlib.h>
#include <string.h>

/* A queue that ran empty gives memory above this back. */
#define KEEP_CAP (128u << 10)

void buf_init(struct buf *b, size_t max)
{
    memset(b, 0, sizeof(*b));
    b->max = max;
}

void buf_free(struct buf *b)
{
    free(b->data);
    b->data = NULL;
    b->head = b->len = b->cap = 0;
}

static bool grow(struct buf *b, size_t need)
{
    size_t cap = b->cap ? b->cap : 256;
    while (cap < need)
        cap *= 2;
    uint8_t *data = realloc(b->data, cap);
    if (data == NULL)
        return false;
    b->data = data;
    b->cap = cap;
    return true;
}

uint8_t *buf_reserve(struct buf *b, size_t n)
{
    if (n > b->max || b->len > b->max - n) {
        b->failed = true;
        return NULL;
    }
    if (b->head + b->len + n > b->cap && b->head > 0) {
        memmove(b->data, b->data + b->head, b->len);
        b->head = 0;
    }
    if (b->len + n > b->cap && !grow(b, b->len + n)) {
        b->failed = true;
        return NULL;
    }
    return b->data + b->head + b->len;
}

void buf_commit(struct buf *b, size_t n)
{
    b->len += n;
}

bool buf_add(struct buf *b, const void *data, size_t n)
{
    if (n == 0)
        return true;
    uint8_t *at = buf_reserve(b, n);
    if (at == NULL)
        return false;
    memcpy(at, data, n);
    buf_commit(b, n);
    return true;
}

void buf_take(struct buf *b, size_t n)
{
    b->head += n;
    b->len -= n;
    if (b->len > 0)
        return;
    b->head = 0;
    if (b->cap > KEEP_CAP)
        buf_free(b);
}

void buf_truncate(struct buf *b, size_t len)
{
    if (len < b->len)
        b->len = len;
}
