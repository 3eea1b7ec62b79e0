/* plain_target that does something else all the while: RESTLESS says what. */
#define main plain_main
#include "../../simcuda/targets/plain.c"
#undef main

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>

extern char **environ;
static const char *how;

static void wait_for(pid_t child) {
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    if (status) {
        fprintf(stderr, "restless: a child ended with %x\n", status);
        _exit(7);
    }
}

static void once(void) {
    char *arguments[] = {"/bin/true", NULL};
    pid_t child = -1;
    if (!strcmp(how, "fork") && !(child = fork())) {
        /* The child of a fork uses memory and ends without cleaning up. */
        void *space = mmap(NULL, 4 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        memset(space, 1, 4 << 20);
        munmap(space, 4 << 20);
        _exit(0);
    }
    if (!strcmp(how, "vfork") && posix_spawn(&child, arguments[0], NULL, NULL, arguments, environ)) _exit(8);
    if (!strcmp(how, "exec") && !(child = fork())) {
        execv(arguments[0], arguments);
        _exit(9);
    }
    if (child > 0) wait_for(child);
}

static void *copy(void *unused) {
    (void)unused;
    unsigned char *from = malloc(1 << 20), *to = malloc(1 << 20);
    for (unsigned i = 0;; i++) {
        memset(from, (int)i, 1 << 20);
        memcpy(to, from, 1 << 20);
        if (memcmp(to, from, 1 << 20)) _exit(10);
    }
    return NULL;
}

static void *run(void *unused) {
    for (;;) {
        once();
        usleep(1000);
    }
    return unused;
}

static volatile sig_atomic_t ticks;
static void tick(int number) {
    (void)number;
    ticks++;
}

int main(int count, char **arguments) {
    pthread_t thread;
    how = getenv("RESTLESS");
    if (!how) return 2;
    if (!strcmp(how, "threads")) {
        for (int i = 0; i < 2; i++) pthread_create(&thread, NULL, copy, NULL);
    } else if (!strcmp(how, "signals")) {
        struct sigaction action = {.sa_handler = tick, .sa_flags = SA_RESTART};
        struct itimerval often = {{0, 500}, {0, 500}};
        sigaction(SIGALRM, &action, NULL);
        setitimer(ITIMER_REAL, &often, NULL);
    } else if (strcmp(how, "close") && strcmp(how, "child")) {
        pthread_create(&thread, NULL, run, NULL);
    }
    return plain_main(count, arguments);
}

/* plain_target says that it is ready by fflush: then CUDA is in use. */
int fflush(FILE *file) {
    static int done;
    if (!done++ && !strcmp(how, "child")) {
        int made[2];
        char byte = 0;
        if (pipe(made)) _exit(11);
        if (!fork()) {
            if (write(made[1], &byte, 1) != 1) _exit(12);
            for (;;) pause();
        }
        if (read(made[0], &byte, 1) != 1) _exit(13);
    } else if (done == 1 && !strcmp(how, "close")) {
        for (int fd = 3; fd < 256; fd++) close(fd); /* as a daemon does */
    }
    return fflush_unlocked(file);
}
