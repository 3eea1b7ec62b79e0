/* What bench/launched.py compiles into a capture library of its own: see launch_switches.c. */
#ifndef CKPT_LAUNCH_SWITCHES_H
#define CKPT_LAUNCH_SWITCHES_H

extern int ckpt_bench_free;    /* copies cost nothing, and the bytes are lost: what the driver needs at least */
void ckpt_bench_switch(void);  /* an image was mapped: read the switches */
void ckpt_bench_report(void);  /* it was given back: write down where the time went */
void ckpt_bench_enter(void);   /* a copy: it comes, */
void ckpt_bench_drained(void); /* the one before it is stored, */
void ckpt_bench_leave(int in); /* and it is over for the driver; into the image, or out of it */

#endif
