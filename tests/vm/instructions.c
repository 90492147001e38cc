/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A plugin of QEMU: how many instructions each emulated processor has executed, a hundred times a second.
 *
 *     -plugin instructions.so,out=FILE
 *
 * Each line of FILE is the time as the host has it, in seconds, and a number for each processor. Unlike times, these do
 * not depend on what else the host does. Counted are blocks as they begin: one that a fault cuts short counts whole.
 *
 * QEMU's docs/devel/tcg-plugins.rst. Debian's packages have no header for it, so what is used of its interface is
 * declared here; a QEMU with another version of it refuses the plugin, and says so.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define EVERY_NS 10000000
#define PROCESSORS_MAX 16

typedef uint64_t plugin_id;
struct qemu_plugin_tb;
struct qemu_plugin_scoreboard;
typedef struct {
    struct qemu_plugin_scoreboard *score;
    size_t offset;
} counter;

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *block);
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id id, void (*call)(plugin_id id, struct qemu_plugin_tb *block));
void qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(struct qemu_plugin_tb *block, int op, counter to, uint64_t add);
struct qemu_plugin_scoreboard *qemu_plugin_scoreboard_new(size_t bytes);
uint64_t qemu_plugin_u64_get(counter of, unsigned processor);
int qemu_plugin_num_vcpus(void);
int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv);

extern const int qemu_plugin_version;
const int qemu_plugin_version = 2; /* the first that counts for each processor by itself */

static counter executed;
static FILE *out;

static void translated(plugin_id id, struct qemu_plugin_tb *block)
{
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(block, 0, executed, qemu_plugin_tb_n_insns(block));
}

static void *tell(void *unused)
{
    const struct timespec pause = {.tv_nsec = EVERY_NS};
    for (;; nanosleep(&pause, NULL)) {
        struct timespec now;
        int count = qemu_plugin_num_vcpus();
        clock_gettime(CLOCK_REALTIME, &now);
        fprintf(out, "%lld.%09ld", (long long)now.tv_sec, now.tv_nsec);
        for (int i = 0; i < count && i < PROCESSORS_MAX; i++)
            fprintf(out, " %llu", (unsigned long long)qemu_plugin_u64_get(executed, (unsigned)i));
        fputc('\n', out);
        fflush(out);
    }
    return unused;
}

int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv)
{
    pthread_t thread;
    (void)info;
    if (argc != 1 || strncmp(argv[0], "out=", 4) != 0 || (out = fopen(argv[0] + 4, "w")) == NULL)
        return -1;
    executed.score = qemu_plugin_scoreboard_new(sizeof(uint64_t));
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    return pthread_create(&thread, NULL, tell, NULL);
}
