/* The gate: a driver that reads an image waits for what is not there yet, and never for ever. */
#ifndef CKPT_GATE_H
#define CKPT_GATE_H

#include "control.h"

/* Returns when [start, end) of the image may be read, and of one without a window all that lies before. Ends the
 * process where that will not be: see ckpt_gate. */
void ckpt_gate_pass(struct ckpt_image *image, uint64_t start, uint64_t end);

/* Ends the process with CKPT_EXIT_STATUS and one line on standard error. */
_Noreturn void ckpt_gate_end(const char *why);

#endif
