/* The server of handover.h: one thread, which also makes and warms the pool in the background. */
#ifndef CKPT_HANDOVER_SERVER_H
#define CKPT_HANDOVER_SERVER_H

/* Starts the thread, with all signals blocked in it. The control page is there. */
void ckpt_handover_start(void);
void ckpt_handover_wake(void); /* there is something to warm */
void ckpt_handover_forget(void); /* in the child of a fork */

#endif
