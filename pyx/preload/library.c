/* The library's beginning and end, and what becomes of it in the child of a fork. */
#define _GNU_SOURCE
#include "budget.h"
#include "config.h"
#include "control_page.h"
#include "driver.h"
#include "handover_server.h"
#include "image.h"
#include "next.h"
#include "pool.h"
#include "ring.h"

#include <pthread.h>

/* A child of fork has none of our threads and none of our mappings (MADV_DONTFORK). Its copies of our descriptors
 * are closed, so that it does not keep the pool's memory when its parent ends. It may use CUDA itself later. */
static void forked(void) {
    ckpt_driver_forget();
    if (!ckpt_control) return;
    ckpt_handover_forget();
    ckpt_images_forget();
    ckpt_pool_forget();
    ckpt_budget_forget();
    ckpt_ring_forget();
    ckpt_control_forget();
}

__attribute__((constructor)) static void begin(void) {
    ckpt_config_read();
    ckpt_ring_set_spare(&ckpt_config.spare);
    ckpt_next_find();
    pthread_atfork(NULL, NULL, forked);
    ckpt_driver_start();
}

__attribute__((destructor)) static void end(void) { ckpt_budget_leave(); }
