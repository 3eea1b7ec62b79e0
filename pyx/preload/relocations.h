/* Redirecting what one loaded library calls: the entries that its dynamic relocations filled in. */
#ifndef CKPT_RELOCATIONS_H
#define CKPT_RELOCATIONS_H

#include <link.h>
#include <stddef.h>
#include <stdint.h>

struct ckpt_object { /* a loaded library */
    uintptr_t base;  /* what its addresses are relative to */
    const ElfW(Phdr) *headers;
    unsigned header_count;
    char path[192];
};

struct ckpt_redirect {
    const char *name;
    void *hook;
    void **next;   /* what the hook goes on to; the entry's old value, where that is another's function */
    void *ignored; /* an old value that is not to go on to: our own function of that name */
    unsigned entries; /* that were changed */
};

/* 1 where a library whose file name begins with `name` is loaded; `object` is filled in. Takes the loader's list
 * lock for a moment, never its main lock. */
int ckpt_object_find(const char *name, struct ckpt_object *object);

/* 1 where an address lies in one of its loaded segments. */
int ckpt_object_has(const struct ckpt_object *object, const void *address);

/* 1 where it lies in one that can be executed. */
int ckpt_object_has_code(const struct ckpt_object *object, uintptr_t address);

/* Puts the hooks into every entry that names one of the functions; pages that are read-only after relocation are
 * made so again. Returns how many entries were changed, or -1 with errno when a page could not be made writable. */
int ckpt_relocations_redirect(const struct ckpt_object *object, struct ckpt_redirect *list, size_t count);

#endif
