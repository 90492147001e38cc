/* SPDX-License-Identifier: Apache-2.0 */
/* One output stream's bytes, addressed by absolute offset: the newest ones, up to a maximum. */
#ifndef DSEC_RING_H
#define DSEC_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ring {
    uint8_t *data;
    size_t cap; /* grows to max as needed */
    size_t max;
    uint64_t start; /* oldest byte held */
    uint64_t end;   /* after the newest byte */
};

/* All rings together never take more than this. */
#define RING_BUDGET ((size_t)128 << 20)

void ring_init(struct ring *r, size_t max);
void ring_free(struct ring *r); /* gives the memory back, keeps the offsets: start becomes end */
/* How many bytes can be added without losing a byte at or after floor; grows the ring when it is nearly full. */
size_t ring_space(struct ring *r, uint64_t floor);
/* Adds n bytes (any number), dropping the oldest where there is no room. */
void ring_add(struct ring *r, const uint8_t *data, size_t n);
/* Copies up to n bytes from offset (>= start); returns how many. */
size_t ring_copy(const struct ring *r, uint64_t offset, uint8_t *out, size_t n);
/* Shrinks the memory to what is held. */
void ring_trim(struct ring *r);
/* True when a ring could not grow for lack of memory since the last call. */
bool ring_starved(void);

#endif
