/* Which of several implementations runs, for files that have a table `implementations` of structures that begin with
 * `name` and `supported`, the last of which every machine has, and call through `current`.
 */

#ifndef CKPTPIPE_DISPATCH_H
#define CKPTPIPE_DISPATCH_H

#include <stddef.h>
#include <string.h>

#define COUNT ((int)(sizeof implementations / sizeof implementations[0]))

/* PREFIX_select(name): 0, or -1 where this machine has none of that name; "" or NULL takes the first that it has.
   PREFIX_name(): of the one that runs. PREFIX_available(n): the n-th that this machine has, NULL behind the last. */
#define CK_DISPATCH(prefix)                                                                             \
    static const implementation *current = &implementations[COUNT - 1];                                 \
    int prefix##_select(const char *name) {                                                             \
        for (int i = 0; i < COUNT; i++) {                                                               \
            if (!implementations[i].supported()) continue;                                              \
            if (name != NULL && name[0] && strcmp(name, implementations[i].name) != 0) continue;        \
            current = &implementations[i];                                                              \
            return 0;                                                                                   \
        }                                                                                               \
        return -1;                                                                                      \
    }                                                                                                   \
    const char *prefix##_name(void) { return current->name; }                                           \
    const char *prefix##_available(int wanted) {                                                        \
        for (int i = 0; i < COUNT; i++)                                                                 \
            if (implementations[i].supported() && wanted-- == 0) return implementations[i].name;        \
        return NULL;                                                                                    \
    }

#endif
