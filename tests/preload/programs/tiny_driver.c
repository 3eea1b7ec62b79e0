/* A libcuda.so.1 of a few calls, built in several ways: what a real one could do that the simulated one does not. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

#ifdef BY_DLSYM /* no relocation entry of these, but for dlsym's */
static void *(*the_mmap)(void *, size_t, int, int, int, off_t);
static int (*the_munmap)(void *, size_t);
static void *(*the_memcpy)(void *, const void *, size_t), *(*the_memmove)(void *, const void *, size_t);
static int (*the_pthread_create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
#define mmap the_mmap
#define munmap the_munmap
#define memcpy the_memcpy
#define memmove the_memmove
#define pthread_create the_pthread_create
#endif

EXPORT int cuInit(unsigned flags) {
    (void)flags;
#ifdef BY_DLSYM
    the_mmap = dlsym(RTLD_DEFAULT, "mmap");
    the_munmap = dlsym(RTLD_DEFAULT, "munmap");
    the_memcpy = dlsym(RTLD_DEFAULT, "memcpy");
    the_memmove = dlsym(RTLD_DEFAULT, "memmove");
    the_pthread_create = dlsym(RTLD_DEFAULT, "pthread_create");
#endif
    int device = memfd_create("device", MFD_CLOEXEC);
    if (device < 0 || ftruncate(device, 4096)) return 1;
    void *mapped = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, device, 0);
    close(device);
    return mapped == MAP_FAILED || munmap(mapped, 4096) ? 2 : 0;
}

struct request {
    void *address, *mapped;
    size_t bytes;
    int flags;
};

static void *serve(void *context) {
    struct request *request = context;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE | request->flags;
    request->mapped = mmap(request->address, request->bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    return NULL;
}

#ifdef EARLY /* its thread is there before anybody can have seen the library */
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct request *asked;

static void *wait_and_serve(void *unused) {
    pthread_mutex_lock(&turn);
    for (;; pthread_cond_broadcast(&changed)) {
        while (!asked) pthread_cond_wait(&changed, &turn);
        serve(asked);
        asked = NULL;
    }
    return unused;
}

__attribute__((constructor)) static void begin(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, wait_and_serve, NULL);
}

static int serve_elsewhere(struct request *request) {
    pthread_mutex_lock(&turn);
    asked = request;
    pthread_cond_broadcast(&changed);
    while (asked) pthread_cond_wait(&changed, &turn);
    pthread_mutex_unlock(&turn);
    return 0;
}
#else
static int serve_elsewhere(struct request *request) {
    pthread_t thread;
    return pthread_create(&thread, NULL, serve, request) || pthread_join(thread, NULL);
}
#endif

/* On a thread of the driver's, or of the program's. */
EXPORT void *tiny_map(void *address, size_t bytes, int fixed, int own_thread) {
    struct request request = {address, NULL, bytes, fixed ? MAP_FIXED : 0};
    if (!own_thread)
        serve(&request);
    else if (serve_elsewhere(&request))
        return MAP_FAILED;
    return request.mapped;
}

EXPORT int tiny_unmap(void *address, size_t bytes) { return munmap(address, bytes); }
EXPORT void *tiny_copy(void *to, const void *from, size_t bytes) { return memcpy(to, from, bytes); }
EXPORT void *tiny_move(void *to, const void *from, size_t bytes) { return memmove(to, from, bytes); }
