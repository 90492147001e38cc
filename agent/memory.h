/* SPDX-License-Identifier: Apache-2.0 */
/* Giving memory back: what of a virtual machine's has not been used for long is paged out, by DAMON. */
#ifndef DSEC_MEMORY_H
#define DSEC_MEMORY_H

#include <stdint.h>

/* The damon word: what was not touched for `age_s` goes, at most `quota` bytes a second, looked at every `sample_us`. */
struct damon {
    uint64_t age_s, quota, sample_us;
};

/* 0, or -1 with errno: a kernel without DAMON keeps its memory. Needs /proc and /sys. */
int memory_watch(const struct damon *d);
/* A compressed swap device of that many bytes, for pages that belong to no file. 0 or -1 with errno. */
int memory_swap(uint64_t bytes);

#endif
