// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/*
 * What the processes of one sandbox execute, open and connect to, for `dsecctl trace`. Compiled by bcc when it is asked
 * for (dsecctl/tracing.py), which defines BY_FUNCTION, PIDNS_DEV, PIDNS_INO and EXECS, OPENS, CONNECTS.
 *
 * Includes nothing, so that no kernel headers are needed: the layouts below are those of the system call interface.
 * The first thing each program does is to look whether the caller is in the sandbox's cgroup or below it.
 *
 * BY_FUNCTION attaches to the ends of the system calls' own functions, which costs nobody else's other calls anything.
 * Without it tracepoints of system calls are used, which make each call of each process on the host a little longer.
 */
#define ARGS 24
#define ARG_BYTES 96
#define PATH_BYTES 512

enum kind { EXEC = 1, EXEC_END, OPEN, CONNECT };

struct event {
	u64 at_ns;
	u32 pid, tid, inside_pid;
	s32 result;
	u64 flags; /* of an open; how many arguments of an exec there are here */
	u32 kind;
	u32 size; /* of an address */
	char comm[16];
	char text[PATH_BYTES]; /* a path or an address */
};

struct arguments {
	struct event event;
	char text[ARGS][ARG_BYTES];
};

/* What a system call began with, for its end. */
struct begun {
	u64 pointer, value;
};

struct nsinfo {
	u32 pid, tgid;
};

BPF_RINGBUF_OUTPUT(events, 1024);
BPF_CGROUP_ARRAY(group, 1);
BPF_ARRAY(lost, u64, 1);
BPF_HASH(calls, u64, struct begun, 65536);

static inline int ours(void)
{
	return group.check_current_task(0) > 0;
}

static inline void fill(struct event *event, u32 kind, long result)
{
	u64 both = bpf_get_current_pid_tgid();
	struct nsinfo inside = {};

	event->at_ns = bpf_ktime_get_boot_ns();
	event->pid = both >> 32;
	event->tid = both;
	event->inside_pid = bpf_get_ns_current_pid_tgid(PIDNS_DEV, PIDNS_INO, (void *)&inside, sizeof(inside)) ? 0 : inside.tgid;
	event->result = result;
	event->flags = 0;
	event->kind = kind;
	event->size = 0;
	bpf_get_current_comm(event->comm, sizeof(event->comm));
	event->text[0] = 0;
}

static inline void one_lost(void)
{
	u32 zero = 0;
	u64 *count = lost.lookup(&zero);

	if (count)
		__sync_fetch_and_add(count, 1);
}

static inline int opened(u64 path, u64 flags, long result)
{
	struct event *event = events.ringbuf_reserve(sizeof(struct event));

	if (!event) {
		one_lost();
		return 0;
	}
	fill(event, OPEN, result);
	event->flags = flags;
	bpf_probe_read_user_str(event->text, sizeof(event->text), (void *)path);
	events.ringbuf_submit(event, 0);
	return 0;
}

static inline int connected(u64 address, u64 size, long result)
{
	struct event *event = events.ringbuf_reserve(sizeof(struct event));
	u32 bytes = size > 110 ? 110 : size;

	if (!event) {
		one_lost();
		return 0;
	}
	fill(event, CONNECT, result);
	event->size = bytes;
	bpf_probe_read_user(event->text, bytes & 127, (void *)address);
	events.ringbuf_submit(event, 0);
	return 0;
}

static inline int executes(u64 path, u64 argv)
{
	struct arguments *all = events.ringbuf_reserve(sizeof(struct arguments));
	u64 pointer;
	int count = 0;

	if (!all) {
		one_lost();
		return 0;
	}
	fill(&all->event, EXEC, 0);
	bpf_probe_read_user_str(all->event.text, sizeof(all->event.text), (void *)path);
#pragma unroll
	for (int i = 0; i < ARGS; i++) {
		pointer = 0;
		bpf_probe_read_user(&pointer, sizeof(pointer), (void *)(argv + i * sizeof(pointer)));
		if (!pointer)
			break;
		all->text[i][0] = 0;
		bpf_probe_read_user_str(all->text[i], ARG_BYTES, (void *)pointer);
		count++;
	}
	if (count == ARGS) {
		pointer = 0;
		bpf_probe_read_user(&pointer, sizeof(pointer), (void *)(argv + ARGS * sizeof(pointer)));
		count += pointer != 0;
	}
	all->event.flags = count;
	events.ringbuf_submit(all, 0);
	return 0;
}

static inline int executed(long result)
{
	struct event *event = events.ringbuf_reserve(sizeof(struct event));

	if (!event) {
		one_lost();
		return 0;
	}
	fill(event, EXEC_END, result);
	events.ringbuf_submit(event, 0);
	return 0;
}

#ifdef BY_FUNCTION

/* struct pt_regs of the x86-64 system call interface; only the arguments' places count. */
struct registers {
	u64 r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di;
};

#define READ(registers) \
	struct registers r = {}; \
	if (!ours()) \
		return 0; \
	bpf_probe_read_kernel(&r, sizeof(r), (void *)registers)

#ifdef EXECS
KFUNC_PROBE(__x64_sys_execve, void *registers) { READ(registers); return executes(r.di, r.si); }
KFUNC_PROBE(__x64_sys_execveat, void *registers) { READ(registers); return executes(r.si, r.dx); }
KRETFUNC_PROBE(__x64_sys_execve, void *registers, long result) { return ours() ? executed(result) : 0; }
KRETFUNC_PROBE(__x64_sys_execveat, void *registers, long result) { return ours() ? executed(result) : 0; }
#endif
#ifdef OPENS
KRETFUNC_PROBE(__x64_sys_open, void *registers, long result) { READ(registers); return opened(r.di, r.si, result); }
KRETFUNC_PROBE(__x64_sys_openat, void *registers, long result) { READ(registers); return opened(r.si, r.dx, result); }
KRETFUNC_PROBE(__x64_sys_openat2, void *registers, long result)
{
	u64 flags = 0;
	READ(registers);

	bpf_probe_read_user(&flags, sizeof(flags), (void *)r.dx);
	return opened(r.si, flags, result);
}
#endif
#ifdef CONNECTS
KRETFUNC_PROBE(__x64_sys_connect, void *registers, long result) { READ(registers); return connected(r.si, r.dx, result); }
#endif

#else

static inline int begins(u64 pointer, u64 value)
{
	u64 key = bpf_get_current_pid_tgid();
	struct begun begun = { pointer, value };

	if (calls.update(&key, &begun))
		one_lost();
	return 0;
}

static inline int ends(struct begun *begun)
{
	u64 key = bpf_get_current_pid_tgid();
	struct begun *found;

	if (!ours())
		return 0;
	found = calls.lookup(&key);
	if (!found)
		return 0;
	*begun = *found;
	calls.delete(&key);
	return 1;
}

#define END(function) \
	struct begun begun = {}; \
	return ends(&begun) ? function(begun.pointer, begun.value, args->ret) : 0

#ifdef EXECS
TRACEPOINT_PROBE(syscalls, sys_enter_execve) { return ours() ? executes((u64)args->filename, (u64)args->argv) : 0; }
TRACEPOINT_PROBE(syscalls, sys_enter_execveat) { return ours() ? executes((u64)args->filename, (u64)args->argv) : 0; }
TRACEPOINT_PROBE(syscalls, sys_exit_execve) { return ours() ? executed(args->ret) : 0; }
TRACEPOINT_PROBE(syscalls, sys_exit_execveat) { return ours() ? executed(args->ret) : 0; }
#endif
#ifdef OPENS
TRACEPOINT_PROBE(syscalls, sys_enter_open) { return ours() ? begins((u64)args->filename, (u32)args->flags) : 0; }
TRACEPOINT_PROBE(syscalls, sys_enter_openat) { return ours() ? begins((u64)args->filename, (u32)args->flags) : 0; }
TRACEPOINT_PROBE(syscalls, sys_enter_openat2)
{
	u64 flags = 0;

	if (!ours())
		return 0;
	bpf_probe_read_user(&flags, sizeof(flags), (void *)args->how);
	return begins((u64)args->filename, flags);
}
TRACEPOINT_PROBE(syscalls, sys_exit_open) { END(opened); }
TRACEPOINT_PROBE(syscalls, sys_exit_openat) { END(opened); }
TRACEPOINT_PROBE(syscalls, sys_exit_openat2) { END(opened); }
#endif
#ifdef CONNECTS
TRACEPOINT_PROBE(syscalls, sys_enter_connect) { return ours() ? begins((u64)args->uservaddr, (u64)args->addrlen) : 0; }
TRACEPOINT_PROBE(syscalls, sys_exit_connect) { END(connected); }
#endif

#endif
