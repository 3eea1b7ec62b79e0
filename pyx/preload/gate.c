#define _GNU_SOURCE
#include "gate.h"

#include "control_page.h"
#include "futex.h"
#include "ring.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DEADLINE_MS 60000u
#define ORPHAN_MS 5000u
#define LONGEST_SLEEP_MS 100u

_Noreturn void ckpt_gate_end(const char *why) {
    char line[CKPT_TEXT + 160];
    if (!ckpt_control->failure[0]) ckpt_control_text(ckpt_control->failure, "%s", why);
    int length = snprintf(line, sizeof line,
                          "ckptpipe: process %d ends: the driver wants a part of its checkpoint image that is not "
                          "there: %s; nothing unverified was given to it\n",
                          (int)getpid(), why);
    if (length > (int)sizeof line - 1) length = (int)sizeof line - 1;
    ssize_t told = write(STDERR_FILENO, line, (size_t)length);
    (void)told;
    atomic_store(&ckpt_control->ended, 1);
    ckpt_control_event();
    for (;;) syscall(SYS_exit_group, CKPT_EXIT_STATUS); /* no handlers: the program's state is of no use */
}

/* The controller's words: its own length limit may be missing. */
static void end_with_failure(void) {
    char why[CKPT_TEXT];
    memcpy(why, ckpt_control->failure, sizeof why - 1);
    why[sizeof why - 1] = 0;
    ckpt_gate_end(why[0] ? why : "the restore failed");
}

static unsigned or_default(unsigned milliseconds, unsigned otherwise) {
    return milliseconds ? milliseconds : otherwise;
}

static void end_if_late(const struct ckpt_image *image, uint64_t end, uint64_t progress_ns, uint64_t orphan_ns) {
    char why[CKPT_TEXT];
    uint64_t now = ckpt_now_ns();
    unsigned deadline = or_default(atomic_load(&ckpt_control->gate_deadline_ms), DEADLINE_MS);
    unsigned orphan = or_default(atomic_load(&ckpt_control->gate_orphan_ms), ORPHAN_MS);
    unsigned long long ready = atomic_load(&image->ready);
    if (orphan_ns && (now - orphan_ns) / 1000000 >= orphan)
        ckpt_control_text(why, "nobody feeds it (bytes %llu to %llu; restore it with ckptpipe restore)", ready,
                          (unsigned long long)end);
    else if ((now - progress_ns) / 1000000 >= deadline)
        ckpt_control_text(why, "nothing more came for %u ms (bytes %llu to %llu)", deadline, ready,
                          (unsigned long long)end);
    else
        return;
    ckpt_gate_end(why);
}

void ckpt_gate_pass(struct ckpt_image *image, uint64_t start, uint64_t end) {
    if (atomic_load(&image->gate) == CKPT_GATE_OPEN) return;
    int before = errno, waited = 0;
    uint64_t ready = 0, progress_ns = ckpt_now_ns(), orphan_ns = 0;
    for (;;) {
        uint32_t event = atomic_load(&ckpt_control->gate_events);
        uint32_t gate = atomic_load(&image->gate);
        if (gate == CKPT_GATE_OPEN) break;
        uint64_t base = atomic_load(&image->base), now_ready = atomic_load(&image->ready); /* in this order */
        if (base <= start && now_ready >= end) break; /* good, also when what comes later has failed */
        if (gate == CKPT_GATE_FAILED) end_with_failure();
        if (!waited) {
            waited = 1;
            atomic_fetch_add(&image->gate_waits, 1);
            atomic_fetch_add(&image->waiting, 1);
            atomic_fetch_add(&ckpt_control->gate_waiters, 1);
            ckpt_ring_rest(1); /* whoever fills wants processors */
            ckpt_control_event();
        }
        if (now_ready != ready) {
            ready = now_ready;
            progress_ns = ckpt_now_ns();
        }
        if (atomic_load(&ckpt_control->feeders))
            orphan_ns = 0;
        else if (!orphan_ns)
            orphan_ns = ckpt_now_ns();
        end_if_late(image, end, progress_ns, orphan_ns);
        ckpt_futex_wait(&ckpt_control->gate_events, event, LONGEST_SLEEP_MS, 1);
    }
    if (waited) {
        ckpt_ring_rest(0);
        atomic_fetch_sub(&image->waiting, 1);
        atomic_fetch_sub(&ckpt_control->gate_waiters, 1);
    }
    errno = before;
}
