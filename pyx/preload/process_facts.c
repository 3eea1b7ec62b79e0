#define _GNU_SOURCE
#include "process_facts.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

long ckpt_read_file(const char *path, char *text, size_t room) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    size_t length = 0;
    for (ssize_t got; length + 1 < room && (got = read(fd, text + length, room - 1 - length)) > 0;)
        length += (size_t)got;
    close(fd);
    text[length] = 0;
    return (long)length;
}

const char *ckpt_error_words(int error) {
    static _Thread_local char room[96];
    return strerror_r(error, room, sizeof room); /* GNU's */
}

uint64_t ckpt_start_time(void) {
    char text[1024];
    if (ckpt_read_file("/proc/self/stat", text, sizeof text) < 0) return 0;
    char *at = strrchr(text, ')'); /* the name before may hold anything */
    for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
    return at ? strtoull(at, NULL, 10) : 0;
}

static uint64_t number_in(const char *text, const char *key) {
    const char *at = text;
    size_t length = strlen(key);
    while (at && strncmp(at, key, length) != 0) {
        at = strchr(at, '\n');
        if (at) at++;
    }
    return at ? strtoull(at + length, NULL, 10) : 0;
}

static uint64_t number_from(const char *folder, const char *file) {
    char path[512], text[64];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    if (ckpt_read_file(path, text, sizeof text) <= 0 || text[0] < '0' || text[0] > '9') return UINT64_MAX;
    return strtoull(text, NULL, 10);
}

struct bound {
    uint64_t left;
    char *whose;
    size_t room;
};

static void narrow(struct bound *bound, uint64_t left, const char *whose) {
    if (left >= bound->left) return;
    bound->left = left;
    snprintf(bound->whose, bound->room, "%s", whose);
}

static void narrow_by_group(struct bound *bound, const char *folder, const char *limit_file, const char *usage_file,
                            const char *cache_key) {
    uint64_t limit = number_from(folder, limit_file), usage = number_from(folder, usage_file);
    if (limit == UINT64_MAX || usage == UINT64_MAX || limit > 1ull << 60) return; /* version 1 writes a huge number */
    char path[512], text[8192];
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    uint64_t cache = ckpt_read_file(path, text, sizeof text) > 0 ? number_in(text, cache_key) : 0;
    uint64_t used = usage > cache ? usage - cache : 0;
    narrow(bound, limit > used ? limit - used : 0, folder);
}

/* Looks at what a group's folder says; `version` of cgroups. */
typedef void group_call(void *context, const char *folder, int version);

/* The group and every one above it; a path that leads out of this process's view ends at the root. */
static void walk_up(const char *root, char *path, int version, group_call *call, void *context) {
    char folder[480];
    if (strcmp(path, "/") == 0 || strncmp(path, "/../", 4) == 0) path[0] = 0;
    for (;;) {
        snprintf(folder, sizeof folder, "%s%s", root, path);
        call(context, folder, version);
        char *slash = strrchr(path, '/');
        if (!slash || !path[0]) return;
        *slash = 0;
    }
}

/* Whether a list with commas has a word. */
static int lists(const char *list, const char *word) {
    size_t length = strlen(word);
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strncmp(at, word, length) == 0 && (!at[length] || at[length] == ',')) return 1;
    return 0;
}

static const struct ckpt_groups mine = {"/proc/self/cgroup", "/sys/fs/cgroup"};

/* All groups that bound the use of a controller. */
static void each_group(const struct ckpt_groups *groups, const char *controller, group_call *call, void *context) {
    char text[8192], old[320];
    if (ckpt_read_file(groups->list, text, sizeof text) <= 0) return;
    snprintf(old, sizeof old, "%s/%s", groups->root, controller);
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) continue;
        *path++ = 0;
        if (!controllers[1])
            walk_up(groups->root, path, 2, call, context);
        else if (lists(controllers + 1, controller))
            walk_up(old, path, 1, call, context);
    }
}

static void narrow_memory(void *bound, const char *folder, int version) {
    if (version == 2)
        narrow_by_group(bound, folder, "memory.max", "memory.current", "inactive_file ");
    else
        narrow_by_group(bound, folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ");
}

uint64_t ckpt_memory_left(char *whose, size_t room) {
    char text[8192];
    struct bound bound = {UINT64_MAX, whose, room};
    if (room) whose[0] = 0;
    if (ckpt_read_file("/proc/meminfo", text, sizeof text) > 0)
        narrow(&bound, number_in(text, "MemAvailable:") * 1024, "the machine");
    each_group(&mine, "memory", narrow_memory, &bound);
    return bound.left;
}

static void narrow_cpus(void *least, const char *folder, int version) {
    uint64_t quota, period;
    if (version == 2) { /* "max 100000", "250000 100000" */
        char path[512], text[64], *end;
        snprintf(path, sizeof path, "%s/cpu.max", folder);
        if (ckpt_read_file(path, text, sizeof text) <= 0 || text[0] < '0' || text[0] > '9') return;
        quota = strtoull(text, &end, 10);
        period = strtoull(end, NULL, 10);
    } else {
        quota = number_from(folder, "cpu.cfs_quota_us"); /* -1: none */
        period = number_from(folder, "cpu.cfs_period_us");
    }
    if (quota == UINT64_MAX || period == UINT64_MAX || !period) return;
    if (quota / period < *(unsigned *)least) *(unsigned *)least = (unsigned)(quota / period);
}

unsigned ckpt_cpu_quota(const struct ckpt_groups *groups) {
    unsigned least = UINT_MAX;
    each_group(groups ? groups : &mine, "cpu", narrow_cpus, &least);
    return least;
}

/* The PCI address of /dev/nvidia<minor> is in the driver's own folder of /proc. */
static int node_of_minor(long minor) {
    DIR *gpus = opendir("/proc/driver/nvidia/gpus");
    int node = -1;
    for (struct dirent *entry; gpus && (entry = readdir(gpus));) {
        char path[512], text[2048];
        snprintf(path, sizeof path, "/proc/driver/nvidia/gpus/%s/information", entry->d_name);
        if (entry->d_name[0] == '.' || ckpt_read_file(path, text, sizeof text) <= 0) continue;
        const char *line = strstr(text, "Device Minor:");
        if (!line || strtol(line + strlen("Device Minor:"), NULL, 10) != minor) continue;
        snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/numa_node", entry->d_name);
        if (ckpt_read_file(path, text, sizeof text) > 0) node = (int)strtol(text, NULL, 10);
        break;
    }
    if (gpus) closedir(gpus);
    return node;
}

int ckpt_gpu_node(void) {
    DIR *own = opendir("/proc/self/fd");
    int node = -2;
    for (struct dirent *entry; own && (entry = readdir(own));) {
        char path[300], target[64];
        snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
        ssize_t length = readlink(path, target, sizeof target - 1);
        if (length <= 0) continue;
        target[length] = 0;
        if (strncmp(target, "/dev/nvidia", 11) != 0 || target[11] < '0' || target[11] > '9') continue;
        int found = node_of_minor(strtol(target + 11, NULL, 10));
        if (node == -2) node = found;
        if (found != node) node = -1;
    }
    if (own) closedir(own);
    return node;
}

/* "0-3,8,10-11" of /sys; the number of members. */
static int parse_list(const char *text, cpu_set_t *set) {
    int count = 0;
    for (const char *at = text; *at >= '0' && *at <= '9';) {
        char *end;
        long first = strtol(at, &end, 10), last = first;
        if (*end == '-') last = strtol(end + 1, &end, 10);
        for (long i = first; i <= last && i < CPU_SETSIZE; i++, count++)
            if (set) CPU_SET((int)i, set);
        at = *end == ',' ? end + 1 : end;
    }
    return count;
}

int ckpt_node_count(void) {
    char text[256];
    return ckpt_read_file("/sys/devices/system/node/online", text, sizeof text) > 0 ? parse_list(text, NULL) : 1;
}

int ckpt_node_cpus(int node, cpu_set_t *cpus) {
    if (sched_getaffinity(getpid(), sizeof *cpus, cpus)) return 0; /* of the main thread: what taskset said */
    if (node >= 0) {
        char path[128], text[4096];
        cpu_set_t near;
        CPU_ZERO(&near);
        snprintf(path, sizeof path, "/sys/devices/system/node/node%d/cpulist", node);
        if (ckpt_read_file(path, text, sizeof text) <= 0) return 0;
        parse_list(text, &near);
        CPU_AND(cpus, cpus, &near);
    }
    return CPU_COUNT(cpus);
}
