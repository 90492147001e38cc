/* SPDX-License-Identifier: Apache-2.0 */
#include "fields.h"

#include <string.h>

#define FIELD_HEADER 6u

static uint16_t load_u16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

uint32_t load_u32(const uint8_t *p)
{
    return (uint32_t)load_u16(p) | (uint32_t)load_u16(p + 2) << 16;
}

uint64_t load_u64(const uint8_t *p)
{
    return (uint64_t)load_u32(p) | (uint64_t)load_u32(p + 4) << 32;
}

void store_u32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

void store_u64(uint8_t *p, uint64_t v)
{
    for (int i = 0; i < 8; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

long frame_decode(const uint8_t *data, size_t len, struct frame *out)
{
    if (len < FRAME_HEADER)
        return 0;
    uint32_t payload = load_u32(data);
    out->type = data[4];
    out->flags = data[5];
    out->channel = load_u32(data + 8);
    out->payload = data + FRAME_HEADER;
    out->len = payload;
    if (payload > FRAME_PAYLOAD_MAX || load_u16(data + 6) != 0 || out->channel > CHANNEL_MAX)
        return -1;
    if (len - FRAME_HEADER < payload)
        return 0;
    return (long)(FRAME_HEADER + payload);
}

enum shape { SHAPE_UNKNOWN, SHAPE_NUMBER, SHAPE_BYTES, SHAPE_REPEATED };

static enum shape shape_of(unsigned tag)
{
    switch (tag) {
    case F_ARGV:
    case F_ENV:
    case F_RLIMIT:
    case F_CGROUP:
        return SHAPE_REPEATED;
    case F_VERSION:
    case F_ID:
    case F_CWD:
    case F_USER:
    case F_CODE:
    case F_MESSAGE:
    case F_PATH:
    case F_TARGET:
    case F_NAME:
    case F_PART:
        return SHAPE_BYTES;
    default:
        return tag > 0 && tag < F_COUNT ? SHAPE_NUMBER : SHAPE_UNKNOWN;
    }
}

/* One field at *at; false at the end or when cut short (then *at != len). */
static bool field_at(const uint8_t *data, size_t len, size_t *at, unsigned *tag, struct span *value)
{
    if (len - *at < FIELD_HEADER)
        return false;
    size_t size = load_u32(data + *at + 2);
    if (size > len - *at - FIELD_HEADER)
        return false;
    *tag = load_u16(data + *at);
    value->data = data + *at + FIELD_HEADER;
    value->len = size;
    *at += FIELD_HEADER + size;
    return true;
}

static bool accept_field(struct request *out, unsigned tag, struct span value)
{
    enum shape shape = shape_of(tag);
    if (shape == SHAPE_UNKNOWN)
        return true;
    if (shape != SHAPE_REPEATED && out->present[tag])
        return false;
    if (shape == SHAPE_NUMBER) {
        if (value.len != 8)
            return false;
        out->num[tag] = load_u64(value.data);
    }
    out->present[tag] = true;
    out->span[tag] = value;
    return true;
}

bool request_decode(const uint8_t *data, size_t len, struct request *out)
{
    memset(out, 0, sizeof(*out));
    out->all = (struct span){data, len};
    size_t at = 0;
    unsigned tag;
    struct span value;
    while (field_at(data, len, &at, &tag, &value))
        if (!accept_field(out, tag, value))
            return false;
    return at == len;
}

bool request_has(const struct request *r, enum tag tag)
{
    return r->present[tag];
}

uint64_t request_num(const struct request *r, enum tag tag, uint64_t otherwise)
{
    return request_has(r, tag) ? r->num[tag] : otherwise;
}

bool request_next(const struct request *r, enum tag tag, size_t *at, struct span *out)
{
    unsigned found;
    while (field_at(r->all.data, r->all.len, at, &found, out))
        if (found == (unsigned)tag)
            return true;
    return false;
}

bool request_string(const struct request *r, enum tag tag, char *out, size_t size)
{
    struct span s = r->span[tag];
    if (!request_has(r, tag) || s.len == 0 || s.len >= size || memchr(s.data, 0, s.len) != NULL)
        return false;
    memcpy(out, s.data, s.len);
    out[s.len] = 0;
    return true;
}

static bool is_name_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
}

bool request_name(const struct request *r, enum tag tag, char out[ID_MAX + 1])
{
    if (!request_string(r, tag, out, ID_MAX + 1))
        return false;
    for (const char *c = out; *c; c++)
        if (!is_name_char(*c))
            return false;
    return true;
}

size_t frame_begin(struct buf *b, enum frame_type type, uint32_t channel)
{
    size_t begun = b->len;
    uint8_t *h = buf_reserve(b, FRAME_HEADER);
    if (h == NULL)
        return begun;
    memset(h, 0, FRAME_HEADER);
    h[4] = (uint8_t)type;
    store_u32(h + 8, channel);
    buf_commit(b, FRAME_HEADER);
    return begun;
}

void frame_end(struct buf *b, size_t begun)
{
    if (b->failed) {
        buf_truncate(b, begun);
        return;
    }
    store_u32(buf_head(b) + begun, (uint32_t)(b->len - begun - FRAME_HEADER));
}

void put_bytes(struct buf *b, enum tag tag, const void *data, size_t len)
{
    uint8_t *h = buf_reserve(b, FIELD_HEADER + len);
    if (h == NULL)
        return;
    h[0] = (uint8_t)tag;
    h[1] = 0;
    store_u32(h + 2, (uint32_t)len);
    if (len > 0)
        memcpy(h + FIELD_HEADER, data, len);
    buf_commit(b, FIELD_HEADER + len);
}

void put_u64(struct buf *b, enum tag tag, uint64_t value)
{
    uint8_t raw[8];
    store_u64(raw, value);
    put_bytes(b, tag, raw, sizeof(raw));
}

void put_text(struct buf *b, enum tag tag, const char *text)
{
    put_bytes(b, tag, text, strlen(text));
}

void put_error(struct buf *b, uint32_t channel, const char *code, int err, const char *message)
{
    size_t len = strlen(message);
    size_t begun = frame_begin(b, T_ERROR, channel);
    put_text(b, F_CODE, code);
    put_u64(b, F_ERRNO, (uint64_t)err);
    put_bytes(b, F_MESSAGE, message, len > MESSAGE_MAX ? MESSAGE_MAX : len);
    frame_end(b, begun);
}
