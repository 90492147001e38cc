/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The peer's first process: what a guest without dsec needs to read a layer, and no more.
 *
 * It says "dsec-bench-init", loads the modules of the initramfs, mounts the layer that lies on the device named by
 * bench.layer= (with DAX when that is a pmem), waits for a line on the console, reads bench.mib= MiB of the file
 * bench.file= there, says "dsec-bench-done" and sleeps.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static char cmdline[4096];

static const char *word(const char *name, char *value, size_t size)
{
    char *at = strstr(cmdline, name);
    value[0] = '\0';
    if (at != NULL)
        snprintf(value, size, "%.*s", (int)strcspn(at + strlen(name), " \n"), at + strlen(name));
    return value;
}

static void load_modules(void)
{
    struct dirent **names;
    int n = scandir("/modules", &names, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        char path[512];
        snprintf(path, sizeof(path), "/modules/%s", names[i]->d_name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd >= 0 && names[i]->d_name[0] != '.')
            syscall(SYS_finit_module, fd, "", 0);
        if (fd >= 0)
            close(fd);
    }
}

static void say(const char *text)
{
    ssize_t n = write(STDOUT_FILENO, text, strlen(text));
    (void)n;
}

int main(void)
{
    static char buffer[1 << 17];
    char layer[64], file[256], mib[16], line[16];
    mount("dev", "/dev", "devtmpfs", 0, NULL);
    mount("proc", "/proc", "proc", 0, NULL);
    int console = open("/dev/console", O_RDWR);
    dup2(console, 0);
    dup2(console, 1);
    int fd = open("/proc/cmdline", O_RDONLY);
    ssize_t n = read(fd, cmdline, sizeof(cmdline) - 1);
    (void)n;
    close(fd);
    say("dsec-bench-init\n");
    load_modules();
    word("bench.layer=", layer, sizeof(layer));
    if (layer[0] == '\0')
        for (;;)
            pause();
    struct stat status;
    while (stat(layer, &status) < 0)
        usleep(10000);
    if (mount(layer, "/root", "erofs", MS_RDONLY, strstr(layer, "pmem") ? "dax=always" : "") < 0)
        perror("mount");
    say("dsec-bench-ready\n");
    n = read(STDIN_FILENO, line, sizeof(line));
    fd = open(word("bench.file=", file, sizeof(file)), O_RDONLY);
    long left = atol(word("bench.mib=", mib, sizeof(mib))) << 20;
    while (left > 0 && (n = read(fd, buffer, sizeof(buffer))) > 0)
        left -= n;
    say(left <= 0 ? "dsec-bench-done\n" : "dsec-bench-short\n");
    for (;;)
        pause();
}
