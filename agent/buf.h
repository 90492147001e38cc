/* SPDX-License-Identifier: Apache-2.0 */
/* A growing byte queue with a ceiling: bytes are added at the tail and taken from the head. */
#ifndef DSEC_BUF_H
#define DSEC_BUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct buf {
    uint8_t *data;
    size_t head; /* first byte not taken yet */
    size_t len;  /* bytes from head on */
    size_t cap;
    size_t max;  /* len never exceeds this */
    bool failed; /* an addition did not fit or found no memory; sticky */
};

void buf_init(struct buf *b, size_t max);
void buf_free(struct buf *b);

/* Room for n more bytes at the tail, or NULL (then b->failed is set). */
uint8_t *buf_reserve(struct buf *b, size_t n);
/* The n bytes written at buf_reserve's address become part of the queue. */
void buf_commit(struct buf *b, size_t n);
bool buf_add(struct buf *b, const void *data, size_t n);
void buf_take(struct buf *b, size_t n);
/* Forgets everything after the first len bytes. */
void buf_truncate(struct buf *b, size_t len);

static inline uint8_t *buf_head(const struct buf *b)
{
    return b->data + b->head;
}

#endif
