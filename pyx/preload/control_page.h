/* This process's control page: made when the driver is first seen at work, never moved. */
#ifndef CKPT_CONTROL_PAGE_H
#define CKPT_CONTROL_PAGE_H

#include "control.h"

extern struct ckpt_control *ckpt_control; /* NULL before, and in the child of a fork */

int ckpt_control_make(void); /* 0 or an errno */
int ckpt_control_fd(void);   /* -1 where the program has closed it */
struct ckpt_piece *ckpt_control_pieces(void);
_Atomic uint64_t *ckpt_control_blocks(void);
void ckpt_control_event(void); /* something changed: wakes watchers, where there are any */
void ckpt_control_forget(void);

/* One line into a text field of CKPT_TEXT bytes. */
void ckpt_control_text(char *field, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
