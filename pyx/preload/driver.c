#define _GNU_SOURCE
#include "driver.h"

#include "config.h"
#include "control_page.h"
#include "handover_server.h"
#include "image.h"
#include "next.h"
#include "process_facts.h"
#include "relocations.h"
#include "symbols.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

#define LIBRARY "libcuda.so"
#define NEWCOMERS 64 /* threads of the driver's between its pthread_create and their first instruction */

/* libckptpipe_preload_symbols.so has it: the library whose memcpy takes libc's place. */
extern char ckpt_symbols_present __attribute__((weak, visibility("default")));

static struct {
    pthread_mutex_t lock;
    struct ckpt_object object;
    _Atomic uintptr_t base; /* of the libcuda whose entries were redirected; 0 before */
    unsigned hook; /* enum ckpt_hook */
    int entries, error;
    _Atomic int started;
} driver = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* A thread that libcuda made. Its restore thread is one: the program's own calls come from the program's threads, so
 * that an allocation of pinned memory is not taken for an image. */
static _Thread_local int was_created_by_driver;
static uint32_t descriptor_bytes; /* of glibc's struct pthread, as its libthread_db knows it; 0 elsewhere */

/* Threads that were there before libcuda's pthread_create was redirected: the descriptor of each has the address of
 * the function that it began with. */
static int began_in_driver(void) {
    const uintptr_t *word = (const uintptr_t *)pthread_self();
    for (size_t i = 0; i < descriptor_bytes / sizeof *word; i++)
        if (ckpt_object_has_code(&driver.object, word[i])) return 1;
    return 0;
}

static int is_drivers_thread(void) {
    if (!was_created_by_driver && atomic_load(&driver.base)) was_created_by_driver = began_in_driver();
    return was_created_by_driver;
}

/* ---- who calls ---- */

struct found_object { /* struct dl_find_object of <dlfcn.h>, which older C libraries lack */
    unsigned long long flags;
    void *start, *end;
    struct link_map *map;
    void *frame;
    unsigned long long reserved[7];
};
static int (*find_object)(void *, struct found_object *);

int ckpt_driver_called_from(const void *address) {
    if (atomic_load(&driver.base) && ckpt_object_has(&driver.object, address)) return 1;
    if (find_object) {
        struct found_object found;
        if (find_object((void *)address, &found) != 0 || !found.map || !found.map->l_name) return 0;
        const char *slash = strrchr(found.map->l_name, '/');
        return strncmp(slash ? slash + 1 : found.map->l_name, LIBRARY, strlen(LIBRARY)) == 0;
    }
    struct ckpt_object object;
    return ckpt_object_find(LIBRARY, &object) && ckpt_object_has(&object, address);
}

/* ---- the first sign of work: libcuda calls mmap in cuInit ---- */

static void start(void) {
    if (atomic_load(&driver.started) || atomic_exchange(&driver.started, 1)) return;
    int before = errno;
    if (ckpt_control_make() == 0) {
        ckpt_control->hook = driver.hook;
        ckpt_control->hooked = (uint64_t)driver.entries;
        memcpy(ckpt_control->library, driver.object.path, sizeof driver.object.path);
        if (ckpt_control->hook == CKPT_HOOK_NONE) {
            ckpt_control->fallback_reason = CKPT_REASON_HOOK;
            ckpt_control_text(ckpt_control->fallback_text,
                              "libcuda's calls of memcpy cannot be redirected (%s); launch with --hook symbols",
                              driver.error ? ckpt_error_words(driver.error) : "it has no such entries");
        }
        ckpt_handover_start();
    }
    errno = before;
}

static int looks_like_an_image(size_t bytes, int protection, int flags, int fd) {
    int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
    return fd == -1 && bytes >= ckpt_config.image_bytes_min && protection == (PROT_READ | PROT_WRITE) &&
           (flags & (kind | MAP_TYPE)) == kind && !(flags & (MAP_GROWSDOWN | MAP_STACK | MAP_HUGETLB));
}

void *ckpt_driver_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset) {
    start();
    if (looks_like_an_image(bytes, protection, flags, fd) && ckpt_control && ckpt_control->hook != CKPT_HOOK_NONE) {
        if (is_drivers_thread() || atomic_load(&ckpt_control->armed)) {
            void *image = ckpt_image_map(address, bytes, flags);
            if (image) return image;
        } else {
            ckpt_image_passed(bytes);
        }
    }
    return ckpt_next.mmap(address, bytes, protection, flags, fd, offset);
}

int ckpt_driver_munmap(void *address, size_t bytes) {
    if (ckpt_image_near(address, bytes) && ckpt_image_unmap(address, bytes)) return 0;
    return ckpt_next.munmap(address, bytes);
}

void *ckpt_driver_memcpy(void *destination, const void *source, size_t bytes) {
    if (!ckpt_image_near(destination, bytes) && !ckpt_image_near(source, bytes))
        return ckpt_next.memcpy(destination, source, bytes);
    ckpt_image_copy(destination, source, bytes, 0);
    return destination;
}

void *ckpt_driver_memmove(void *destination, const void *source, size_t bytes) {
    if (!ckpt_image_near(destination, bytes) && !ckpt_image_near(source, bytes))
        return ckpt_next.memmove(destination, source, bytes);
    ckpt_image_copy(destination, source, bytes, 1);
    return destination;
}

static void *checked_memcpy(void *destination, const void *source, size_t bytes, size_t room) {
    if (bytes > room || (!ckpt_image_near(destination, bytes) && !ckpt_image_near(source, bytes)))
        return ckpt_next.memcpy_checked(destination, source, bytes, room);
    ckpt_image_copy(destination, source, bytes, 0);
    return destination;
}

static void *checked_memmove(void *destination, const void *source, size_t bytes, size_t room) {
    if (bytes > room || (!ckpt_image_near(destination, bytes) && !ckpt_image_near(source, bytes)))
        return ckpt_next.memmove_checked(destination, source, bytes, room);
    ckpt_image_copy(destination, source, bytes, 1);
    return destination;
}

/* ---- the driver's threads ---- */

static struct newcomer {
    _Atomic int taken;
    void *(*run)(void *);
    void *argument;
} newcomers[NEWCOMERS];

static void *run_newcomer(void *context) {
    struct newcomer *newcomer = context;
    void *(*run)(void *) = newcomer->run;
    void *argument = newcomer->argument;
    atomic_store(&newcomer->taken, 0);
    was_created_by_driver = 1;
    return run(argument);
}

int ckpt_driver_create_thread(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                              void *argument) {
    for (unsigned i = 0; i < NEWCOMERS; i++) {
        struct newcomer *newcomer = &newcomers[i];
        int free = 0;
        if (!atomic_compare_exchange_strong(&newcomer->taken, &free, 1)) continue;
        newcomer->run = run;
        newcomer->argument = argument;
        int error = ckpt_next.pthread_create(thread, attributes, run_newcomer, newcomer);
        if (error) atomic_store(&newcomer->taken, 0);
        return error;
    }
    return ckpt_next.pthread_create(thread, attributes, run, argument);
}

/* ---- redirection ---- */

static int complete(const struct ckpt_redirect *list) {
    return (list[0].entries || list[1].entries) && list[2].entries &&
           (list[3].entries || list[4].entries || list[5].entries || list[6].entries);
}

static void redirect(void) {
    struct ckpt_redirect list[] = {
        {"mmap", (void *)ckpt_driver_mmap, (void **)&ckpt_next.mmap, (void *)ckpt_exported_mmap, 0},
        {"mmap64", (void *)ckpt_driver_mmap, (void **)&ckpt_next.mmap, (void *)ckpt_exported_mmap, 0},
        {"munmap", (void *)ckpt_driver_munmap, (void **)&ckpt_next.munmap, (void *)ckpt_exported_munmap, 0},
        {"memcpy", (void *)ckpt_driver_memcpy, (void **)&ckpt_next.memcpy, NULL, 0},
        {"memmove", (void *)ckpt_driver_memmove, (void **)&ckpt_next.memmove, NULL, 0},
        {"__memcpy_chk", (void *)checked_memcpy, (void **)&ckpt_next.memcpy_checked, NULL, 0},
        {"__memmove_chk", (void *)checked_memmove, (void **)&ckpt_next.memmove_checked, NULL, 0},
        {"pthread_create", (void *)ckpt_driver_create_thread, (void **)&ckpt_next.pthread_create, NULL, 0},
    };
    size_t count = sizeof list / sizeof list[0];
    int changed = ckpt_config.hook == CKPT_HOOKS_SYMBOLS ? 0 : ckpt_relocations_redirect(&driver.object, list, count);
    driver.error = changed < 0 ? errno : 0;
    driver.entries = changed > 0 ? changed : 0;
    driver.hook = changed > 0 && complete(list) ? CKPT_HOOK_RELOCATIONS
                  : &ckpt_symbols_present       ? CKPT_HOOK_SYMBOLS
                                                : CKPT_HOOK_NONE;
}

void ckpt_driver_look(void) {
    struct ckpt_object object;
    if (!ckpt_object_find(LIBRARY, &object) || object.base == atomic_load(&driver.base)) return;
    pthread_mutex_lock(&driver.lock);
    if (object.base != atomic_load(&driver.base)) {
        driver.object = object;
        redirect();
        atomic_store(&driver.base, object.base);
    }
    pthread_mutex_unlock(&driver.lock);
}

void ckpt_driver_start(void) {
    void *address = dlsym(RTLD_DEFAULT, "_dl_find_object");
    memcpy(&find_object, &address, sizeof address);
    const uint32_t *known = dlsym(RTLD_DEFAULT, "_thread_db_sizeof_pthread");
    if (known && *known <= 8192) descriptor_bytes = *known;
    ckpt_driver_look(); /* a program that is linked with libcuda */
}

void ckpt_driver_forget(void) {
    pthread_mutex_init(&driver.lock, NULL);
    atomic_store(&driver.started, 0);
    for (unsigned i = 0; i < NEWCOMERS; i++) atomic_store(&newcomers[i].taken, 0);
}
