/* SPDX-License-Identifier: Apache-2.0 */
/* Frames and fields: what bytes mean. No sockets here. */
#ifndef DSEC_FIELDS_H
#define DSEC_FIELDS_H

#include "buf.h"
#include "proto.h"

struct frame {
    uint8_t type;
    uint8_t flags;
    uint32_t channel;
    const uint8_t *payload;
    size_t len;
};

struct span {
    const uint8_t *data;
    size_t len;
};

/* A decoded field list. Spans point into the payload it was decoded from. */
struct request {
    bool present[F_COUNT];
    uint64_t num[F_COUNT];
    struct span span[F_COUNT];
    struct span all; /* the whole list, for the repeated tags */
};

/* 0: need more bytes; > 0: bytes the frame takes; -1: malformed. */
long frame_decode(const uint8_t *data, size_t len, struct frame *out);

/* False when the list is malformed: cut short, a number not 8 bytes long, a single tag given twice. */
bool request_decode(const uint8_t *data, size_t len, struct request *out);
bool request_has(const struct request *r, enum tag tag);
uint64_t request_num(const struct request *r, enum tag tag, uint64_t otherwise);
/* Walks a repeated tag: *at starts as 0; false at the end. */
bool request_next(const struct request *r, enum tag tag, size_t *at, struct span *out);
/* Copies a text or path field as a C string; false when absent, empty, too long, or with a NUL inside. */
bool request_string(const struct request *r, enum tag tag, char *out, size_t size);
/* Copies an id or part name: [A-Za-z0-9_-]{1,64}. */
bool request_name(const struct request *r, enum tag tag, char out[ID_MAX + 1]);

/* Building a frame at the tail of a queue: begin, put..., end. A queue that fails midway is cut back by frame_end. */
size_t frame_begin(struct buf *b, enum frame_type type, uint32_t channel);
void frame_end(struct buf *b, size_t begun);
void put_u64(struct buf *b, enum tag tag, uint64_t value);
void put_bytes(struct buf *b, enum tag tag, const void *data, size_t len);
void put_text(struct buf *b, enum tag tag, const char *text);
/* A whole ERROR frame; message is formatted and cut to MESSAGE_MAX. */
void put_error(struct buf *b, uint32_t channel, const char *code, int err, const char *message);

uint32_t load_u32(const uint8_t *p);
uint64_t load_u64(const uint8_t *p);
void store_u32(uint8_t *p, uint32_t v);
void store_u64(uint8_t *p, uint64_t v);

#endif
