// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/*
 * What a sandbox may send and receive.
 *
 * from_sandbox and to_sandbox sit on the host's end of each sandbox's device (tc clsact, direct action), where nobody
 * inside can reach them. A device that is not in the map `sandboxes` passes nothing. connect4 and the others sit on the
 * cgroup of all sandboxes: they decide nothing that the first two do not, but give an error at once instead of silence.
 * One set of programs and maps serves all sandboxes; docs/network.md says what is decided and why.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include "egress.h"

#define AF_INET 2
#define AF_INET6 10
#define IP_OFFSET 0x1fff
#define IP_MF 0x2000
#define IP6_OFFSET 0xfff8
#define IP6_MF 0x0001
#define ICMP_UNREACHABLE 3
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETER 12
#define ICMP_ECHO 8
#define ICMP6_LAST_ERROR 4
#define ICMP6_ECHO 128
#define ICMP6_ECHO_REPLY 129
#define TCP_SYN 0x02
#define TCP_ACK 0x10

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1 << 20);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct policy_key);
	__type(value, struct ranges);
} policies SEC(".maps");

/* Room for 256 addresses of each of 4,096 sandboxes. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 20);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct opened_key);
	__type(value, struct opened);
} opened SEC(".maps");

/* By the index of the host's end of the device. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 16);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct sandbox);
} sandboxes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 16);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct counters);
} counters SEC(".maps");

/* From the cookie of a sandbox's network namespace to its device. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 16);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} namespaces SEC(".maps");

/* Devices to which something was refused: wakes the daemon, which reads the rest in `counters`. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 16);
} refusals SEC(".maps");

/* By device: of how many refusals (denied_out) an event has told. The daemon's own note, here so that it outlives it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 16);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, __u64);
} told SEC(".maps");

/* One packet as the policy sees it: the far end's address and port, whichever way it goes. */
struct flow {
	__u8 addr[16];
	__u16 port;
	__u8 family;
	__u8 protocol;
	__u8 later;  /* a fragment without ports */
	__u8 begins; /* it asks for a new connection, or might */
	__u8 exempt; /* an ICMP error on its way in: connection tracking judges it */
};

static __always_inline int same(const __u8 *a, const __u8 *b, int size)
{
	for (int i = 0; i < size; i++)
		if (a[i] != b[i])
			return 0;
	return 1;
}

static __always_inline void copy(__u8 *to, const __u8 *from, int size)
{
	for (int i = 0; i < size; i++)
		to[i] = from[i];
}

static __always_inline int within(__u16 first, __u16 last, const struct flow *flow)
{
	return flow->later ? first == 0 && last == 0xffff : first <= flow->port && flow->port <= last;
}

/* Whether a name has opened the address. */
static __always_inline int opened_by_name(__u32 device, const struct flow *flow, int inbound)
{
	struct opened_key key = { .device = device, .family = flow->family };
	__u64 linger = flow->protocol == IPPROTO_TCP ? LINGER_TCP_NS : LINGER_UDP_NS;
	__u64 now = bpf_ktime_get_boot_ns();
	struct opened *found;
	int allowed = 0;

	copy(key.addr, flow->addr, 16);
	found = bpf_map_lookup_elem(&opened, &key);
	if (!found)
		return 0;
	for (int i = 0; i < OPENED_MAX; i++) {
		struct opening *opening = &found->opening[i];

		if (!opening->until_ns || opening->protocol != flow->protocol ||
		    !within(opening->first, opening->last, flow))
			continue;
		if (now >= opening->until_ns && (flow->begins || !opening->used_ns || now - opening->used_ns >= linger))
			continue;
		if (inbound)
			opening->used_ns = now;
		allowed = 1;
	}
	return allowed;
}

/* 0, or why not, by the rules for addresses; *named is set when a rule names exactly this one. */
static __always_inline int consult_policy(const struct sandbox *box, const struct flow *flow, int *named)
{
	struct policy_key key = { .prefixlen = 8 * (POLICY_BYTES + 1 + 16), .family = flow->family };
	const struct ranges *found;
	int allowed = 0;

	copy(key.policy, box->policy, POLICY_BYTES);
	copy(key.addr, flow->addr, 16);
	found = bpf_map_lookup_elem(&policies, &key);
	if (!found)
		return REASON_POLICY;
	for (int i = 0; i < RANGES_MAX; i++) {
		const struct range *range = &found->range[i];

		if (i >= found->count)
			break;
		if (range->protocol != flow->protocol)
			continue;
		if (within(range->first, range->last, flow)) {
			allowed = 1;
			*named |= range->named;
		}
	}
	if (allowed)
		return 0;
	return flow->later ? REASON_FRAGMENT : REASON_POLICY;
}

/* 0, or why not. */
static __always_inline int consult(const struct sandbox *box, __u32 device, const struct flow *flow, int inbound,
				   int *named)
{
	int reason = consult_policy(box, flow, named);

	return reason && opened_by_name(device, flow, inbound) ? 0 : reason;
}

/* Whether a TCP segment asks for a connection; one whose flags are elsewhere is taken for such. */
static __always_inline int begins(struct __sk_buff *skb, int at)
{
	__u8 flags;

	return bpf_skb_load_bytes(skb, at + 13, &flags, 1) || (flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
}

/* Ports and types: `at` is where the transport header begins. */
static __always_inline int transport(struct __sk_buff *skb, int at, int inbound, struct flow *flow)
{
	__be16 ports[2];
	__u8 type;

	if (flow->protocol == IPPROTO_TCP || flow->protocol == IPPROTO_UDP) {
		if (flow->later)
			return 0;
		if (bpf_skb_load_bytes(skb, at, ports, sizeof(ports)))
			return REASON_HEADER;
		flow->port = bpf_ntohs(inbound ? ports[0] : ports[1]);
		flow->begins = flow->protocol == IPPROTO_TCP && begins(skb, at);
		return 0;
	}
	if (flow->protocol != (flow->family == FAMILY_IPV4 ? IPPROTO_ICMP : IPPROTO_ICMPV6))
		return REASON_PROTOCOL;
	flow->protocol = IPPROTO_ICMP;
	if (flow->later)
		return 0;
	if (bpf_skb_load_bytes(skb, at, &type, 1))
		return REASON_HEADER;
	if (flow->family == FAMILY_IPV4) {
		if (!inbound)
			return type == ICMP_ECHO ? 0 : REASON_PROTOCOL;
		flow->exempt = type == ICMP_UNREACHABLE || type == ICMP_TIME_EXCEEDED || type == ICMP_PARAMETER;
		return type == 0 || flow->exempt ? 0 : REASON_PROTOCOL;
	}
	if (!inbound)
		return type == ICMP6_ECHO ? 0 : REASON_PROTOCOL;
	flow->exempt = type >= 1 && type <= ICMP6_LAST_ERROR;
	return type == ICMP6_ECHO_REPLY || flow->exempt ? 0 : REASON_PROTOCOL;
}

static __always_inline int ipv4(struct __sk_buff *skb, const struct sandbox *box, int inbound, struct flow *flow)
{
	struct iphdr ip;
	__u16 fragment;

	flow->family = FAMILY_IPV4;
	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)))
		return REASON_HEADER;
	copy(flow->addr, (const __u8 *)(inbound ? &ip.saddr : &ip.daddr), 4);
	flow->protocol = ip.protocol;
	if (ip.version != 4 || ip.ihl != 5)
		return REASON_HEADER;
	if (!same(box->addr4, (const __u8 *)(inbound ? &ip.daddr : &ip.saddr), 4))
		return REASON_SOURCE;
	fragment = bpf_ntohs(ip.frag_off);
	flow->later = (fragment & IP_OFFSET) != 0;
	return transport(skb, ETH_HLEN + sizeof(ip), inbound, flow);
}

static __always_inline int ipv6(struct __sk_buff *skb, const struct sandbox *box, int inbound, struct flow *flow)
{
	struct ipv6hdr ip;
	struct { __u8 next, reserved; __be16 offset; __be32 id; } fragment;
	int at = ETH_HLEN + sizeof(ip);

	flow->family = FAMILY_IPV6;
	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)))
		return REASON_HEADER;
	copy(flow->addr, (const __u8 *)(inbound ? &ip.saddr : &ip.daddr), 16);
	flow->protocol = ip.nexthdr;
	if (ip.version != 6)
		return REASON_HEADER;
	if (!box->has_ipv6 || !same(box->addr6, (const __u8 *)(inbound ? &ip.daddr : &ip.saddr), 16))
		return REASON_SOURCE;
	if (ip.nexthdr == IPPROTO_FRAGMENT) {
		if (bpf_skb_load_bytes(skb, at, &fragment, sizeof(fragment)))
			return REASON_HEADER;
		flow->protocol = fragment.next;
		flow->later = (bpf_ntohs(fragment.offset) & IP6_OFFSET) != 0;
		at += sizeof(fragment);
	}
	switch (flow->protocol) {
	case IPPROTO_HOPOPTS:
	case IPPROTO_ROUTING:
	case IPPROTO_FRAGMENT:
	case IPPROTO_DSTOPTS:
	case IPPROTO_AH:
		return REASON_HEADER;
	}
	return transport(skb, at, inbound, flow);
}

/* ff02::16 */
static const __u8 report_readers[16] = { 0xff, 2, [15] = 0x16 };
#define ICMPV6_GROUP_REPORT 143

/* A report of multicast groups, which kernels send by themselves when a device comes up: RFC 3810, 5.2. Its only extension
 * header is of eight bytes. */
static __always_inline int group_report(struct __sk_buff *skb)
{
	struct ipv6hdr ip;
	__u8 more[9]; /* that header, and the message's type */

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.version != 6 || ip.nexthdr != IPPROTO_HOPOPTS)
		return 0;
	if (!same(report_readers, (const __u8 *)&ip.daddr, 16))
		return 0;
	if (bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(ip), more, sizeof(more)))
		return 0;
	return more[0] == IPPROTO_ICMPV6 && more[1] == 0 && more[8] == ICMPV6_GROUP_REPORT;
}

static __always_inline int parse(struct __sk_buff *skb, const struct sandbox *box, int inbound, struct flow *flow)
{
	struct ethhdr eth;

	if (skb->vlan_present || bpf_skb_load_bytes(skb, 0, &eth, sizeof(eth)))
		return REASON_FRAME;
	if (eth.h_proto != bpf_htons(ETH_P_IP) && eth.h_proto != bpf_htons(ETH_P_IPV6))
		return REASON_FRAME;
	/* Nobody's attempt, in either direction: no kernel can be told not to. */
	if (eth.h_proto == bpf_htons(ETH_P_IPV6) && group_report(skb))
		return REASON_QUIET;
	if (!inbound && (!same(box->mac, eth.h_source, ETH_ALEN) || !same(box->host_mac, eth.h_dest, ETH_ALEN)))
		return REASON_SOURCE;
	if (eth.h_proto == bpf_htons(ETH_P_IP))
		return ipv4(skb, box, inbound, flow);
	return ipv6(skb, box, inbound, flow);
}

/* Whether the packet would end at the host itself; also true for broadcast and multicast. */
static __always_inline int ends_here(struct __sk_buff *skb, const struct sandbox *box, const struct flow *flow)
{
	struct bpf_fib_lookup fib = { .ifindex = skb->ifindex };
	long result;

	if (flow->family == FAMILY_IPV4) {
		fib.family = AF_INET;
		copy((__u8 *)&fib.ipv4_src, box->addr4, 4);
		copy((__u8 *)&fib.ipv4_dst, flow->addr, 4);
	} else {
		fib.family = AF_INET6;
		copy((__u8 *)fib.ipv6_src, box->addr6, 16);
		copy((__u8 *)fib.ipv6_dst, flow->addr, 16);
	}
	result = bpf_fib_lookup(skb, &fib, sizeof(fib), BPF_FIB_LOOKUP_SKIP_NEIGH);
	return result < 0 || result == BPF_FIB_LKUP_RET_NOT_FWDED || result == BPF_FIB_LKUP_RET_FWD_DISABLED;
}

static __always_inline void note_denied(__u32 device, struct counters *count, const struct flow *flow, int reason)
{
	__u64 number = __sync_fetch_and_add(&count->denied_out, 1);
	struct denied *entry = &count->recent[number % RECENT];

	entry->at_ns = bpf_ktime_get_boot_ns();
	copy(entry->addr, flow->addr, 16);
	entry->port = flow->port;
	entry->family = flow->family;
	entry->protocol = flow->protocol;
	entry->reason = reason;
	/* A full ring is tried again with the next one. */
	if (entry->at_ns - count->told_ns >= TELL_NS && !bpf_ringbuf_output(&refusals, &device, sizeof(device), 0))
		count->told_ns = entry->at_ns;
}

SEC("tc")
int from_sandbox(struct __sk_buff *skb)
{
	__u32 device = skb->ifindex;
	const struct sandbox *box = bpf_map_lookup_elem(&sandboxes, &device);
	struct counters *count = bpf_map_lookup_elem(&counters, &device);
	struct flow flow = {};
	int reason, named = 0;

	if (!box || !count)
		return TC_ACT_SHOT;
	reason = parse(skb, box, 0, &flow);
	if (!reason)
		reason = consult(box, device, &flow, 0, &named);
	if (!reason && !named && ends_here(skb, box, &flow))
		reason = REASON_HOST;
	if (reason == REASON_QUIET)
		return TC_ACT_SHOT;
	if (reason) {
		note_denied(device, count, &flow, reason);
		return TC_ACT_SHOT;
	}
	__sync_fetch_and_add(&count->out_packets, 1);
	__sync_fetch_and_add(&count->out_bytes, skb->len);
	return TC_ACT_OK;
}

SEC("tc")
int to_sandbox(struct __sk_buff *skb)
{
	__u32 device = skb->ifindex;
	const struct sandbox *box = bpf_map_lookup_elem(&sandboxes, &device);
	struct counters *count = bpf_map_lookup_elem(&counters, &device);
	struct flow flow = {};
	int reason, named = 0;

	if (!box || !count)
		return TC_ACT_SHOT;
	reason = parse(skb, box, 1, &flow);
	if (!reason && !flow.exempt)
		reason = consult(box, device, &flow, 1, &named);
	if (reason == REASON_QUIET)
		return TC_ACT_SHOT;
	if (reason) {
		__sync_fetch_and_add(&count->denied_in, 1);
		return TC_ACT_SHOT;
	}
	__sync_fetch_and_add(&count->in_packets, 1);
	__sync_fetch_and_add(&count->in_bytes, skb->len);
	return TC_ACT_OK;
}

/* 1 to go on, 0 for EPERM. What is not TCP or UDP, or stays inside, is not for these hooks. */
static __always_inline int may_reach(struct bpf_sock_addr *ctx, struct flow *flow)
{
	__u64 cookie = bpf_get_netns_cookie(ctx);
	const __u32 *device = bpf_map_lookup_elem(&namespaces, &cookie);
	const struct sandbox *box;
	struct counters *count;
	int reason, named = 0;

	if (!device || (ctx->protocol != IPPROTO_TCP && ctx->protocol != IPPROTO_UDP))
		return 1;
	box = bpf_map_lookup_elem(&sandboxes, device);
	count = bpf_map_lookup_elem(&counters, device);
	if (!box || !count)
		return 0;
	if (same(flow->addr, flow->family == FAMILY_IPV4 ? box->addr4 : box->addr6,
		 flow->family == FAMILY_IPV4 ? 4 : 16))
		return 1;
	flow->protocol = ctx->protocol;
	flow->port = bpf_ntohs((__u16)ctx->user_port);
	flow->begins = flow->protocol == IPPROTO_TCP;
	reason = consult(box, *device, flow, 0, &named);
	if (reason)
		note_denied(*device, count, flow, reason);
	return !reason;
}

static __always_inline int may_reach4(struct bpf_sock_addr *ctx, __u32 address)
{
	struct flow flow = { .family = FAMILY_IPV4 };

	copy(flow.addr, (const __u8 *)&address, 4);
	/* 127.0.0.0/8, and 0.0.0.0, which is this machine as well. */
	if (flow.addr[0] == 127 || address == 0)
		return 1;
	return may_reach(ctx, &flow);
}

static __always_inline int may_reach6(struct bpf_sock_addr *ctx)
{
	__u32 words[4] = { ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3] };
	struct flow flow = { .family = FAMILY_IPV6 };

	if (words[0] == 0 && words[1] == 0 && words[2] == bpf_htonl(0xffff))
		return may_reach4(ctx, words[3]);
	/* :: and ::1 */
	if (words[0] == 0 && words[1] == 0 && words[2] == 0 && (words[3] == 0 || words[3] == bpf_htonl(1)))
		return 1;
	copy(flow.addr, (const __u8 *)words, 16);
	return may_reach(ctx, &flow);
}

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	return may_reach4(ctx, ctx->user_ip4);
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	return may_reach6(ctx);
}

SEC("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx)
{
	return may_reach4(ctx, ctx->user_ip4);
}

SEC("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx)
{
	return may_reach6(ctx);
}

char LICENSE[] SEC("license") = "GPL";

#ifndef BUILD
#define BUILD 1
#endif
/* Says nothing to the kernel; another number makes another object, with folders and maps of its own. */
__u32 build SEC("version") = BUILD;
