/* SPDX-License-Identifier: Apache-2.0 */
/* The numbers of the agent protocol, version 1: docs/agent-protocol.md. Nothing here but constants. */
#ifndef DSEC_PROTO_H
#define DSEC_PROTO_H

#define PROTOCOL_VERSION 1
#define AGENT_VERSION "1"

#define FRAME_HEADER 12u
#define FRAME_PAYLOAD_MAX 65536u
#define FRAME_MAX (FRAME_HEADER + FRAME_PAYLOAD_MAX)
#define REQUEST_MAX (4u << 20) /* a START split over frames */
#define CHANNEL_MAX 0x7fffffffu
#define ID_MAX 64u
#define MESSAGE_MAX 512u

#define FLAG_EOF 1u
#define FLAG_MORE 2u

enum frame_type {
    T_HELLO = 0x01,
    T_START = 0x02,
    T_ATTACH = 0x03,
    T_CREDIT = 0x04,
    T_INPUT = 0x05,
    T_RESIZE = 0x06,
    T_SIGNAL = 0x07,
    T_LIST = 0x08,
    T_FORGET = 0x09,
    T_USAGE = 0x0a,
    T_PING = 0x0b,
    T_CLOSE = 0x0c,
    T_SHUTDOWN = 0x0d,
    T_PEEK = 0x0e,
    T_OUTPUT = 0x10,
    T_EXIT = 0x12,
    T_INFO = 0x13,
    T_HELLO_OK = 0x14,
    T_STARTED = 0x15,
    T_ATTACHED = 0x16,
    T_OK = 0x1e,
    T_ERROR = 0x1f,
    T_FILE_GET = 0x20,
    T_DATA = 0x21,
    T_FILE_PUT = 0x22,
    T_COMMIT = 0x23,
    T_FILE_STAT = 0x24,
    T_FILE_LIST = 0x25,
    T_FILE_REMOVE = 0x26,
    T_FILE_MKDIR = 0x27,
    T_FILE_RENAME = 0x28,
    T_READY = 0x29,
    T_FREEZE = 0x38,
    T_LIMIT = 0x39,
    T_RENEW = 0x3a,
    T_DIAL = 0x3b,
    T_NETWORK = 0x3c,
};

enum tag {
    F_PROTOCOL = 1,
    F_GENERATION,
    F_TIME_NS,
    F_VERSION,
    F_ID,
    F_ARGV,
    F_ENV,
    F_CWD,
    F_USER,
    F_FLAGS,
    F_ROWS,
    F_COLS,
    F_RLIMIT,
    F_UMASK,
    F_TIMEOUT_MS,
    F_IDLE_TIMEOUT_MS,
    F_BUFFER_BYTES,
    F_KEEP_MS,
    F_CREDIT,
    F_STREAM,
    F_BYTES,
    F_OFFSET,
    F_OFFSET_OUT,
    F_OFFSET_ERR,
    F_SIGNAL,
    F_SCOPE,
    F_GRACE_MS,
    F_START,
    F_END,
    F_PID_COUNT,
    F_NLINK,
    F_PID,
    F_RUNNING,
    F_KIND,
    F_STATUS,
    F_REASON,
    F_TOTAL_OUT,
    F_TOTAL_ERR,
    F_DROPPED_OUT,
    F_DROPPED_ERR,
    F_CPU_USER_US,
    F_CPU_SYSTEM_US,
    F_MAX_RSS_KIB,
    F_STARTED_NS,
    F_FINISHED_NS,
    F_CODE,
    F_ERRNO,
    F_MESSAGE,
    F_PATH,
    F_TARGET,
    F_MODE,
    F_UID,
    F_GID,
    F_SIZE,
    F_MTIME_NS,
    F_NAME,
    F_CURSOR,
    F_LIMIT,
    F_PART,
    F_EXECS_RUNNING,
    F_EXECS_TOTAL,
    F_INO,
    F_CGROUP,
    F_OOM_KILLS,
    F_PORT,
    F_COUNT, /* one past the last tag */
};

/* START flags. */
#define START_PTY 1u
#define START_STDIN 2u
#define START_ATTACH 4u

enum exit_kind { KIND_EXITED = 1, KIND_SIGNALLED = 2 };
enum exit_reason { REASON_ITSELF, REASON_TIMEOUT, REASON_IDLE, REASON_KILLED, REASON_SHUTDOWN, REASON_OOM };

#define STREAM_IN 0u
#define STREAM_OUT 1u
#define STREAM_ERR 2u

/* Of a file among many: u32 mode, u64 time, u32 length of its name, u32 size; then name and contents. */
#define RECORD_HEADER 20u

/* FILE_* flags. */
#define PUT_PARENTS 1u
#define PUT_EXCLUSIVE 2u
#define PUT_KEEP_PART 4u
#define PUT_MANY 8u
#define STAT_FOLLOW 1u
#define REMOVE_RECURSIVE 1u
#define MKDIR_PARENTS 1u

#endif
