/* Places where a library that is built for a benchmark or a test (-DCKPT_PROBES) calls what that brings along. In the
 * library that is installed there is nothing there. */
#ifndef CKPT_PROBES_H
#define CKPT_PROBES_H

#include <stddef.h>

#ifdef CKPT_PROBES
void ckpt_probe_mapped(void);          /* an image was mapped */
void ckpt_probe_returned(void);        /* and given back */
void ckpt_probe_copy(const void *destination, const void *source); /* the driver begins a copy, */
void ckpt_probe_copied(int into);      /* and it goes on: a copy into an image, or out of it */
size_t ckpt_probe_bytes(size_t bytes); /* how much of a copy is really made */
#else
static inline void ckpt_probe_mapped(void) {}
static inline void ckpt_probe_returned(void) {}
static inline void ckpt_probe_copy(const void *destination, const void *source) {
    (void)destination;
    (void)source;
}
static inline void ckpt_probe_copied(int into) { (void)into; }
static inline size_t ckpt_probe_bytes(size_t bytes) { return bytes; }
#endif

#endif
