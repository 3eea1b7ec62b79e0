/* Time of processors that cgroups of both versions leave a process: the least of its group's and of those above. */
#define _GNU_SOURCE
#include "check.h"
#include "process_facts.h"

#include <limits.h>
#include <sys/stat.h>

static char folder[512];

static const char *at(const char *name) {
    static char path[1024];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void put(const char *name, const char *text) {
    FILE *file = fopen(at(name), "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

static unsigned quota(const char *list) {
    char path[1024];
    put("list", list);
    snprintf(path, sizeof path, "%s", at("list"));
    return ckpt_cpu_quota(&(struct ckpt_groups){path, folder});
}

int main(int count, char **argument) {
    const char *folders[] = {"a", "a/b", "cpu", "cpu/x", "cpu/x/y"};
    CHECK(count == 2);
    snprintf(folder, sizeof folder, "%s/groups", argument[1]);
    CHECK(mkdir(folder, 0700) == 0);
    for (unsigned i = 0; i < sizeof folders / sizeof folders[0]; i++) CHECK(mkdir(at(folders[i]), 0700) == 0);

    CHECK(quota("0::/a/b\n") == UINT_MAX);
    put("a/cpu.max", "max 100000\n");
    CHECK(quota("0::/a/b\n") == UINT_MAX);
    put("a/b/cpu.max", "1250000 100000\n");
    CHECK(quota("0::/a/b\n") == 12 && quota("0::/a\n") == UINT_MAX && quota("0::/\n") == UINT_MAX);
    put("a/cpu.max", "350000 100000\n");
    CHECK(quota("0::/a/b\n") == 3);
    put("cpu.max", "50000 100000\n");
    CHECK(quota("0::/a/b\n") == 0 && quota("0::/../elsewhere\n") == 0);

    put("cpu/x/cpu.cfs_period_us", "100000\n");
    put("cpu/x/cpu.cfs_quota_us", "-1\n");
    CHECK(quota("4:memory:/a\n3:cpuset:/x\n2:cpu,cpuacct:/x/y\n") == UINT_MAX);
    put("cpu/x/cpu.cfs_quota_us", "800000\n");
    CHECK(quota("4:memory:/a\n3:cpuset:/x\n2:cpu,cpuacct:/x/y\n") == 8);
    CHECK(quota("3:cpuset,cpuacct:/x\n") == UINT_MAX && quota("nonsense\n\n::\n") == 0);

    put("a/cpu.max", "100000 0\n");
    put("cpu.max", "");
    CHECK(quota("0::/a\n") == UINT_MAX);
    return 0;
}
