/* libckptpipe_preload_symbols.so: the second way to a driver's copies, for one whose relocation entries cannot be
 * redirected. Its memcpy takes libc's place for every library, and costs each call two comparisons and a jump; so it
 * is preloaded only where `ckptpipe launch` finds that the first way will not do, or is told to. */
#define _GNU_SOURCE
#include "symbols.h"

#include <dlfcn.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef void *copy_call(void *, const void *, size_t);
typedef void *checked_call(void *, const void *, size_t, size_t);
typedef int thread_call(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

EXPORT char ckpt_symbols_present = 1;
extern const struct ckpt_interposed ckpt_interposed __attribute__((weak, visibility("default")));

/* Calls that come while libraries are still being relocated, before the constructor. */
static void *early_memmove(void *destination, const void *source, size_t bytes) {
    volatile unsigned char *to = destination;
    const volatile unsigned char *from = source;
    if ((uintptr_t)destination <= (uintptr_t)source)
        for (size_t i = 0; i < bytes; i++) to[i] = from[i];
    else
        for (size_t i = bytes; i-- > 0;) to[i] = from[i];
    return destination;
}

static copy_call *next_memcpy = early_memmove, *next_memmove = early_memmove;
static checked_call *next_checked_memcpy, *next_checked_memmove;
static thread_call *next_pthread_create;

static void find(void *pointer, const char *name) {
    void *address = dlsym(RTLD_NEXT, name);
    if (address) memcpy(pointer, &address, sizeof address);
}

__attribute__((constructor)) static void begin(void) {
    find(&next_memcpy, "memcpy");
    find(&next_memmove, "memmove");
    find(&next_checked_memcpy, "__memcpy_chk");
    find(&next_checked_memmove, "__memmove_chk");
    find(&next_pthread_create, "pthread_create");
}

static inline int is_near(const void *address, size_t bytes) {
    uintptr_t start = (uintptr_t)address;
    return &ckpt_interposed && __atomic_load_n((uintptr_t *)ckpt_interposed.high, __ATOMIC_RELAXED) > start &&
           start + bytes > __atomic_load_n((uintptr_t *)ckpt_interposed.low, __ATOMIC_RELAXED);
}

static inline int touches(const void *destination, const void *source, size_t bytes) {
    return __builtin_expect(is_near(destination, bytes) || is_near(source, bytes), 0);
}

static void *interposed_memcpy(void *destination, const void *source, size_t bytes) {
    return touches(destination, source, bytes) ? ckpt_interposed.memcpy(destination, source, bytes)
                                               : next_memcpy(destination, source, bytes);
}

static void *interposed_memmove(void *destination, const void *source, size_t bytes) {
    return touches(destination, source, bytes) ? ckpt_interposed.memmove(destination, source, bytes)
                                               : next_memmove(destination, source, bytes);
}

/* The loader binds these before the constructor ran, too: then the room is not checked, as without fortification. */
static void *interposed_checked_memcpy(void *destination, const void *source, size_t bytes, size_t room) {
    if (next_checked_memcpy && (bytes > room || !touches(destination, source, bytes)))
        return next_checked_memcpy(destination, source, bytes, room);
    return interposed_memcpy(destination, source, bytes);
}

static void *interposed_checked_memmove(void *destination, const void *source, size_t bytes, size_t room) {
    if (next_checked_memmove && (bytes > room || !touches(destination, source, bytes)))
        return next_checked_memmove(destination, source, bytes, room);
    return interposed_memmove(destination, source, bytes);
}

static int interposed_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                                     void *argument) {
    if (!next_pthread_create) find(&next_pthread_create, "pthread_create");
    if (&ckpt_interposed && ckpt_interposed.called_from_driver(__builtin_return_address(0)))
        return ckpt_interposed.pthread_create(thread, attributes, run, argument);
    return next_pthread_create(thread, attributes, run, argument);
}

EXPORT void *memcpy(void *, const void *, size_t) __attribute__((alias("interposed_memcpy")));
EXPORT void *memmove(void *, const void *, size_t) __attribute__((alias("interposed_memmove")));
EXPORT void *__memcpy_chk(void *, const void *, size_t, size_t) __attribute__((alias("interposed_checked_memcpy")));
EXPORT void *__memmove_chk(void *, const void *, size_t, size_t) __attribute__((alias("interposed_checked_memmove")));
EXPORT int pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *)
    __attribute__((alias("interposed_pthread_create")));
