/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * What the daemon and the programs share: keys and values of the maps. dsecd/backends/egress.py packs the same.
 *
 * A change here changes the object file, whose digest names the folder that maps and programs are pinned in: a
 * daemon with other structures fills maps of its own before it replaces the programs.
 */
#ifndef DSEC_EGRESS_H
#define DSEC_EGRESS_H

#include <linux/types.h>

#define POLICY_BYTES 15
#define RANGES_MAX 16
#ifndef RECENT
#define RECENT 8
#endif
/* Of one sandbox's refusals at most one in this time is put into the ring. */
#define TELL_NS 1000000000ULL

enum family { FAMILY_IPV4 = 4, FAMILY_IPV6 = 6 };

/* Longest prefix of (policy, family, address); an IPv4 address is the first four bytes. */
struct policy_key {
	__u32 prefixlen;
	__u8 policy[POLICY_BYTES];
	__u8 family;
	__u8 addr[16];
};

/* "named": the rule names exactly this address, so that it may be one of the host's own. */
struct range {
	__u8 protocol; /* TCP, UDP, and ICMP for both families */
	__u8 named;
	__u16 first, last;
};

struct ranges {
	__u32 count;
	struct range range[RANGES_MAX];
};

/*
 * What names have opened: addresses of one device, by the ports of the rule that names the name. Nothing begins after
 * until_ns. What is under way goes on while the far end answers: for so long after the last packet from there.
 */
#define RULE_BYTES 8
#define OPENED_MAX 16
#define LINGER_TCP_NS (3600ULL * 1000000000)
#define LINGER_UDP_NS (180ULL * 1000000000)

struct opened_key {
	__u32 device;
	__u8 family;
	__u8 pad[3];
	__u8 addr[16];
};

struct opening {
	__u64 until_ns, used_ns; /* since boot; until_ns is 0 in what is not used */
	__u8 rule[RULE_BYTES];
	__u16 first, last;
	__u8 protocol;
	__u8 pad[3];
};

struct opened {
	struct opening opening[OPENED_MAX];
};

struct sandbox {
	__u8 policy[POLICY_BYTES];
	__u8 has_ipv6;
	__u8 addr4[4];
	__u8 addr6[16];
	__u8 mac[6];
	__u8 host_mac[6];
	__u64 netns_cookie;
};

/* Why something was dropped; the numbers are part of what the daemon reads. */
enum reason {
	REASON_POLICY = 1,  /* no rule allows it */
	REASON_HOST,	    /* an address of the host that no rule names */
	REASON_SOURCE,	    /* another source address or MAC than its own */
	REASON_PROTOCOL,    /* not TCP, UDP or ICMP echo */
	REASON_FRAGMENT,    /* a later fragment where not all ports are allowed */
	REASON_HEADER,	    /* IP options, extension headers, truncated */
	REASON_FRAME,	    /* not IP, or with a VLAN tag */
	REASON_QUIET,	    /* what every kernel sends by itself when a device comes up: nobody's try, so not counted */
};

struct denied {
	__u64 at_ns; /* since boot */
	__u8 addr[16];
	__u16 port;
	__u8 family;
	__u8 protocol;
	__u8 reason;
	__u8 pad[3];
};

struct counters {
	__u64 out_packets, out_bytes, in_packets, in_bytes;
	__u64 denied_out, denied_in;
	__u64 told_ns; /* when something was last put into the ring `refusals` */
	struct denied recent[RECENT]; /* outbound; number N is at N % RECENT */
};

#endif
