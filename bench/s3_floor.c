/* s3_floor put|get FILE HOST PORT CONNECTIONS PLAN: what bytes of S3 requests cost a program that does nothing else.
 *
 * PLAN: for each request "OFFSET NBYTES HEAD_NBYTES\n" and the head, ready to be sent. Threads with a connection and a
 * buffer of their own take them in turn: a PUT checksums its bytes of FILE through the buffer and has the kernel send
 * them, a GET receives, checksums and writes them to FILE ("-": nowhere). A piece stays in the core's cache from one
 * step to the next. Prints "ETAG\n" for each request, then "seconds cpu_seconds peak_rss".
 */
#define _GNU_SOURCE
#include "crc32c.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define PIECE ((size_t)256 << 10) /* bytes; fits into a core's second-level cache */
#define HEAD_MAX 16384
#define ETAG_MAX 128

struct request {
    off_t offset;
    size_t nbytes, head_nbytes;
    char *head;
    char etag[ETAG_MAX];
};

static struct request *requests;
static size_t count, next;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int putting, file = -1;
static struct addrinfo *server;

static void fail(const char *what) {
    fprintf(stderr, "s3_floor: %s: %s\n", what, errno ? strerror(errno) : "unexpected");
    exit(1);
}

static void send_all(int to, const char *data, size_t nbytes) {
    while (nbytes) {
        ssize_t sent = send(to, data, nbytes, MSG_NOSIGNAL);
        if (sent < 0) fail("send");
        data += sent;
        nbytes -= (size_t)sent;
    }
}

/* The head of the answer; what came of its body lies behind it: *early bytes from the pointer returned. */
static char *answer(int from, char *head, size_t *early) {
    size_t have = 0;
    for (;;) {
        ssize_t got = recv(from, head + have, HEAD_MAX - have, 0);
        errno = got ? errno : 0;
        if (got <= 0) fail("recv");
        have += (size_t)got;
        char *end = memmem(head, have, "\r\n\r\n", 4);
        if (end) {
            *end = 0;
            errno = 0;
            if (strncmp(head, "HTTP/1.1 20", 11)) fail(head);
            *early = have - (size_t)(end + 4 - head);
            return end + 4;
        }
        if (have == HEAD_MAX) fail("a head without end");
    }
}

static void put(int socket, struct request *request, char *buffer) {
    char head[HEAD_MAX];
    uint32_t crc = 0;
    size_t early;
    for (size_t done = 0; done < request->nbytes;) {
        size_t want = request->nbytes - done < PIECE ? request->nbytes - done : PIECE;
        ssize_t got = pread(file, buffer, want, request->offset + (off_t)done);
        if (got <= 0) fail("pread");
        crc = ck_crc32c(crc, buffer, (size_t)got);
        done += (size_t)got;
    }
    send_all(socket, request->head, request->head_nbytes);
    off_t at = request->offset, end = request->offset + (off_t)request->nbytes;
    while (at < end)
        if (sendfile(socket, file, &at, (size_t)(end - at)) <= 0) fail("sendfile");
    answer(socket, head, &early);
    char *etag = strcasestr(head, "\r\netag: ");
    if (etag) sscanf(etag + 8, "%127[^\r\n]", request->etag);
}

static void keep(const char *data, size_t nbytes, off_t offset) {
    if (file >= 0 && pwrite(file, data, nbytes, offset) != (ssize_t)nbytes) fail("pwrite");
}

static void get(int socket, struct request *request, char *buffer) {
    char head[HEAD_MAX];
    size_t done;
    send_all(socket, request->head, request->head_nbytes);
    char *body = answer(socket, head, &done);
    uint32_t crc = ck_crc32c(0, body, done);
    keep(body, done, request->offset);
    while (done < request->nbytes) {
        size_t want = request->nbytes - done < PIECE ? request->nbytes - done : PIECE;
        ssize_t got = recv(socket, buffer, want, MSG_WAITALL);
        errno = got ? errno : 0;
        if (got <= 0) fail("recv");
        crc = ck_crc32c(crc, buffer, (size_t)got);
        keep(buffer, (size_t)got, request->offset + (off_t)done);
        done += (size_t)got;
    }
}

static void *work(void *unused) {
    char *buffer = aligned_alloc(4096, PIECE);
    int made = socket(server->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    if (!buffer || made < 0 || connect(made, server->ai_addr, server->ai_addrlen)) fail("connect");
    setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    for (;;) {
        pthread_mutex_lock(&lock);
        size_t mine = next < count ? next++ : count;
        pthread_mutex_unlock(&lock);
        if (mine == count) break;
        (putting ? put : get)(made, &requests[mine], buffer);
    }
    close(made);
    free(buffer);
    return unused;
}

static void read_plan(const char *path) {
    FILE *plan = fopen(path, "rb");
    struct request one = {0};
    if (!plan) fail(path);
    while (fscanf(plan, "%ld %zu %zu", &one.offset, &one.nbytes, &one.head_nbytes) == 3) {
        one.head = malloc(one.head_nbytes);
        requests = realloc(requests, (count + 1) * sizeof *requests);
        if (!one.head || !requests || fgetc(plan) != '\n') fail("plan");
        if (fread(one.head, 1, one.head_nbytes, plan) != one.head_nbytes) fail("plan");
        requests[count++] = one;
    }
    fclose(plan);
}

static double seconds_of(struct timeval time) { return (double)time.tv_sec + (double)time.tv_usec * 1e-6; }

int main(int arguments, char **argument) {
    if (arguments != 7) return 2;
    putting = !strcmp(argument[1], "put");
    if (strcmp(argument[2], "-"))
        file = open(argument[2], putting ? O_RDONLY : O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0 && strcmp(argument[2], "-")) fail(argument[2]);
    if (getaddrinfo(argument[3], argument[4], NULL, &server)) fail(argument[3]);
    int threads = atoi(argument[5]);
    read_plan(argument[6]);
    ck_crc32c_select(NULL);
    pthread_t thread[64];
    if (threads < 1 || threads > 64) return 2;

    struct rusage usage;
    struct timespec begin, end;
    getrusage(RUSAGE_SELF, &usage);
    double before = seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int i = 0; i < threads; i++)
        if ((errno = pthread_create(&thread[i], NULL, work, NULL))) fail("pthread_create");
    for (int i = 0; i < threads; i++) pthread_join(thread[i], NULL);
    clock_gettime(CLOCK_MONOTONIC, &end);
    getrusage(RUSAGE_SELF, &usage);

    for (size_t i = 0; i < count; i++) printf("%s\n", requests[i].etag);
    printf("%.9f %.6f %ld\n", (double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec) * 1e-9,
           seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime) - before, usage.ru_maxrss);
    return 0;
}
