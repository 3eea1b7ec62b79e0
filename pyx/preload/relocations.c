#define _GNU_SOURCE
#include "relocations.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
#define TAKES_SYMBOL(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT || (type) == R_X86_64_64)
#elif defined(__aarch64__)
#define TAKES_SYMBOL(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT || (type) == R_AARCH64_ABS64)
#else
#error "the capture library knows x86-64 and aarch64"
#endif

struct search {
    const char *name;
    struct ckpt_object *object;
};

static int look(struct dl_phdr_info *info, size_t size, void *context) {
    (void)size;
    struct search *search = context;
    const char *slash = strrchr(info->dlpi_name, '/');
    const char *file = slash ? slash + 1 : info->dlpi_name;
    if (strncmp(file, search->name, strlen(search->name)) != 0) return 0;
    struct ckpt_object *object = search->object;
    object->base = info->dlpi_addr;
    object->headers = info->dlpi_phdr;
    object->header_count = info->dlpi_phnum;
    strncpy(object->path, info->dlpi_name, sizeof object->path - 1);
    object->path[sizeof object->path - 1] = 0;
    return 1;
}

int ckpt_object_find(const char *name, struct ckpt_object *object) {
    struct search search = {name, object};
    return dl_iterate_phdr(look, &search);
}

static int has(const struct ckpt_object *object, uintptr_t address, unsigned flags) {
    for (unsigned i = 0; i < object->header_count; i++) {
        const ElfW(Phdr) *header = &object->headers[i];
        if (header->p_type == PT_LOAD && (header->p_flags & flags) == flags &&
            address - (object->base + header->p_vaddr) < header->p_memsz)
            return 1;
    }
    return 0;
}

int ckpt_object_has(const struct ckpt_object *object, const void *address) {
    return has(object, (uintptr_t)address, 0);
}

int ckpt_object_has_code(const struct ckpt_object *object, uintptr_t address) { return has(object, address, PF_X); }

struct tables {
    const ElfW(Sym) *symbols;
    const char *names;
    const ElfW(Rela) *rela, *plt;
    size_t rela_bytes, plt_bytes;
};

static const ElfW(Phdr) *header_of(const struct ckpt_object *object, unsigned type) {
    for (unsigned i = 0; i < object->header_count; i++)
        if (object->headers[i].p_type == type) return &object->headers[i];
    return NULL;
}

/* The loader has made these absolute, unless the dynamic section is read-only. */
static const void *absolute(const struct ckpt_object *object, ElfW(Addr) value) {
    return (const void *)(value < object->base ? object->base + value : value);
}

static int find_tables(const struct ckpt_object *object, struct tables *tables) {
    const ElfW(Phdr) *header = header_of(object, PT_DYNAMIC);
    if (!header) return 0;
    int explicit_addends = 1;
    for (const ElfW(Dyn) *entry = (const void *)(object->base + header->p_vaddr); entry->d_tag != DT_NULL; entry++) {
        switch (entry->d_tag) {
        case DT_SYMTAB: tables->symbols = absolute(object, entry->d_un.d_ptr); break;
        case DT_STRTAB: tables->names = absolute(object, entry->d_un.d_ptr); break;
        case DT_RELA: tables->rela = absolute(object, entry->d_un.d_ptr); break;
        case DT_RELASZ: tables->rela_bytes = entry->d_un.d_val; break;
        case DT_JMPREL: tables->plt = absolute(object, entry->d_un.d_ptr); break;
        case DT_PLTRELSZ: tables->plt_bytes = entry->d_un.d_val; break;
        case DT_PLTREL: explicit_addends = entry->d_un.d_val == DT_RELA; break;
        default: break;
        }
    }
    if (!explicit_addends) tables->plt = NULL;
    return tables->symbols && tables->names;
}

static int protect(const struct ckpt_object *object, void **entry, int writable) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)entry & ~(page - 1);
    const ElfW(Phdr) *relro = header_of(object, PT_GNU_RELRO);
    if (!relro) return 0;
    uintptr_t from = (object->base + relro->p_vaddr) & ~(page - 1);
    uintptr_t to = (object->base + relro->p_vaddr + relro->p_memsz) & ~(page - 1);
    if (start < from || start >= to) return 0; /* an entry that lazy binding writes to */
    return mprotect((void *)start, page, writable ? PROT_READ | PROT_WRITE : PROT_READ);
}

static int redirect(const struct ckpt_object *object, void **entry, const struct ckpt_redirect *to) {
    if (protect(object, entry, 1)) return -1;
    void *old = __atomic_load_n(entry, __ATOMIC_RELAXED);
    /* An entry that was not bound yet leads back into the library, to a stub that would bind it anew. */
    if (old && old != to->hook && old != to->ignored && !ckpt_object_has(object, old)) *to->next = old;
    __atomic_store_n(entry, to->hook, __ATOMIC_RELEASE);
    protect(object, entry, 0);
    return 1;
}

static int redirect_table(const struct ckpt_object *object, const struct tables *tables, const ElfW(Rela) *table,
                          size_t bytes, struct ckpt_redirect *list, size_t count) {
    int changed = 0;
    for (size_t i = 0; table && i < bytes / sizeof *table; i++) {
        if (!TAKES_SYMBOL(ELF64_R_TYPE(table[i].r_info)) || table[i].r_addend) continue;
        const ElfW(Sym) *symbol = &tables->symbols[ELF64_R_SYM(table[i].r_info)];
        if (symbol->st_shndx != SHN_UNDEF) continue; /* its own function of that name */
        for (size_t k = 0; k < count; k++) {
            if (strcmp(tables->names + symbol->st_name, list[k].name) != 0) continue;
            int done = redirect(object, (void **)(object->base + table[i].r_offset), &list[k]);
            if (done < 0) return -1;
            list[k].entries++;
            changed += done;
        }
    }
    return changed;
}

int ckpt_relocations_redirect(const struct ckpt_object *object, struct ckpt_redirect *list, size_t count) {
    struct tables tables = {0};
    if (!find_tables(object, &tables)) return 0;
    int first = redirect_table(object, &tables, tables.plt, tables.plt_bytes, list, count);
    int second = redirect_table(object, &tables, tables.rela, tables.rela_bytes, list, count);
    return first < 0 || second < 0 ? -1 : first + second;
}
