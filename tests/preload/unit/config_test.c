/* The variable as the launcher writes it, and as somebody else might. Also prints the sizes of the messages. */
#define _GNU_SOURCE
#include "check.h"
#include "config.h"
#include "control.h"
#include "handover.h"
#include "stores.h"

#include <string.h>

int main(void) {
    CHECK(ckpt_config.copies.demote == CKPT_DEMOTE && ckpt_config.copies.read_streams && ckpt_config.awake_us == -1);
    CHECK(ckpt_config.spare.lanes == 0 && ckpt_config.spare.awake_us == 0);
    setenv(CKPT_CONFIG_VARIABLE,
           "hook=symbols;pages=hugetlb;workers=7;pool=fixed;pool-bytes=12345;budget-percent=50;numa-node=3;"
           "image-min=99;budget-path=/run/x;demote=7;block=4096;copy-out=plain;read-ahead=3;aside=1;"
           "window-lanes=5;window-awake-us=6;nonsense;=;=4;workers",
           1);
    ckpt_config_read();
    CHECK(ckpt_config.hook == CKPT_HOOKS_SYMBOLS && ckpt_config.pages == CKPT_PAGES_HUGETLB);
    CHECK(ckpt_config.workers == 7 && ckpt_config.mode == CKPT_POOL_FIXED && ckpt_config.pool_bytes == 12345);
    CHECK(ckpt_config.budget_percent == 50 && ckpt_config.numa_node == 3 && ckpt_config.image_bytes_min == 99);
    CHECK(strcmp(ckpt_config.budget_path, "/run/x") == 0);
    CHECK(ckpt_config.copies.demote == CKPT_DEMOTE_FLUSH && ckpt_config.copies.block == 4096);
    CHECK(!ckpt_config.copies.read_streams && ckpt_config.copies.read_ahead == 3 && ckpt_config.copies.aside == 1);
    CHECK(ckpt_config.spare.lanes == 5 && ckpt_config.spare.awake_us == 6);
    char large[2048] = "budget-path=/";
    memset(large + strlen(large), 'a', sizeof large - 100);
    setenv(CKPT_CONFIG_VARIABLE, large, 1);
    ckpt_config_read();
    CHECK(strcmp(ckpt_config.budget_path, "/run/x") == 0);
    setenv(CKPT_CONFIG_VARIABLE, "pool-bytes=99999999999999999999999;workers=-1;pool-percent=5x;numa-node=none", 1);
    ckpt_config_read();
    CHECK(ckpt_config.pool_bytes == UINT64_MAX && ckpt_config.workers == 0 && ckpt_config.pool_percent == 0);
    CHECK(ckpt_config.numa_node == -2);
    printf("%zu %zu %d\n", sizeof(struct ckpt_request), sizeof(struct ckpt_answer), CKPT_EXIT_STATUS);
    return 0;
}
