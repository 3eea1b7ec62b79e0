/* One budget among processes: what a dead one held is free, the last one removes the file. */
#define _GNU_SOURCE
#include "budget.h"
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static pid_t claimant(const char *path, uint64_t bytes, int expected) {
    int told[2];
    char byte = 0;
    CHECK(pipe(told) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        ckpt_budget_forget();
        CHECK(ckpt_budget_claim(path, 100, bytes) == expected);
        CHECK(write(told[1], &byte, 1) == 1);
        for (;;) pause();
    }
    close(told[1]);
    CHECK(read(told[0], &byte, 1) == 1);
    close(told[0]);
    return child;
}

static void end(pid_t child) {
    CHECK(kill(child, SIGKILL) == 0);
    CHECK(waitpid(child, NULL, 0) == child);
}

int main(int count, char **arguments) {
    char path[256];
    struct stat found;
    CHECK(count == 2);
    snprintf(path, sizeof path, "%s/shares", arguments[1]);
    CHECK(ckpt_budget_claim("", 10, 11) == ENOSPC && ckpt_budget_claim("", 10, 10) == 0);
    CHECK(ckpt_budget_claim(path, 100, 40) == 0);
    CHECK(ckpt_budget_claim(path, 999, 101) == ENOSPC); /* the first one's word holds */
    CHECK(ckpt_budget_total() == 100);
    pid_t first = claimant(path, 60, 0), second = claimant(path, 1, ENOSPC);
    CHECK(ckpt_budget_claim(path, 0, 41) == ENOSPC);
    CHECK(ckpt_budget_used() == 60);
    end(first);
    CHECK(ckpt_budget_claim(path, 0, 100) == 0);
    end(second);
    ckpt_budget_leave();
    CHECK(stat(path, &found) != 0 && errno == ENOENT);
    /* Another's file, or one that others can write, is not used. */
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    CHECK(fd >= 0 && fchmod(fd, 0666) == 0);
    CHECK(ckpt_budget_claim(path, 100, 1) == EPERM);
    CHECK(unlink(path) == 0 && symlink("/etc/passwd", path) == 0);
    CHECK(ckpt_budget_claim(path, 100, 1) == ELOOP);
    return 0;
}
