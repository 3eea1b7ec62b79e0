#include "config.h"

#include "control.h"
#include "stores.h"

#include <stdlib.h>
#include <string.h>

struct ckpt_config ckpt_config = {
    .mode = CKPT_POOL_GROW,
    .margin_percent = 10,
    .budget_percent = 90,
    .numa_node = -1,
    .image_bytes_min = 1u << 20,
    .awake_us = -1,
    .spare = {.awake_us = 0},
    .checksum = 1,
    .copies = {.demote = CKPT_DEMOTE, .block = 16u << 10, .read_streams = 1, .read_ahead = 1},
};

struct text {
    const char *at;
    size_t length;
};

static int is(struct text text, const char *word) {
    return text.length == strlen(word) && memcmp(text.at, word, text.length) == 0;
}

/* Digits alone; anything else is 0, and an overflow is the largest number. */
static uint64_t number(struct text text) {
    uint64_t value = 0;
    for (size_t i = 0; i < text.length; i++) {
        if (text.at[i] < '0' || text.at[i] > '9') return 0;
        unsigned digit = (unsigned)(text.at[i] - '0');
        if (value > (UINT64_MAX - digit) / 10) return UINT64_MAX;
        value = value * 10 + digit;
    }
    return value;
}

static unsigned small(struct text text, unsigned most) {
    uint64_t value = number(text);
    return value > most ? most : (unsigned)value;
}

static void set(struct text key, struct text value) {
    struct ckpt_config *config = &ckpt_config;
    if (is(key, "pool")) {
        config->mode = is(value, "fixed") ? CKPT_POOL_FIXED : is(value, "share") ? CKPT_POOL_SHARE : CKPT_POOL_GROW;
    } else if (is(key, "pool-bytes")) {
        config->pool_bytes = number(value);
    } else if (is(key, "pool-percent")) {
        config->pool_percent = small(value, 1000);
    } else if (is(key, "margin-percent")) {
        config->margin_percent = small(value, 1000);
    } else if (is(key, "budget-bytes")) {
        config->budget_bytes = number(value);
    } else if (is(key, "budget-percent")) {
        config->budget_percent = small(value, 1000);
    } else if (is(key, "budget-path") && value.length < sizeof config->budget_path) {
        memcpy(config->budget_path, value.at, value.length);
        config->budget_path[value.length] = 0;
    } else if (is(key, "pages")) {
        config->pages = is(value, "hugetlb") ? CKPT_PAGES_HUGETLB
                        : is(value, "thp")   ? CKPT_PAGES_THP
                        : is(value, "small") ? CKPT_PAGES_SMALL
                                             : CKPT_PAGES_AUTO;
    } else if (is(key, "workers")) {
        config->workers = small(value, 256);
    } else if (is(key, "numa-node")) {
        config->numa_node = is(value, "none") ? -2 : is(value, "auto") ? -1 : (int)(number(value) & 0xffff);
    } else if (is(key, "image-min")) {
        config->image_bytes_min = number(value);
    } else if (is(key, "awake-us")) {
        config->awake_us = (int)small(value, 1000000);
    } else if (is(key, "checksum")) {
        config->checksum = number(value) != 0;
    } else if (is(key, "window-lanes")) {
        config->spare.lanes = small(value, 256);
    } else if (is(key, "window-awake-us")) {
        config->spare.awake_us = (int)small(value, 1000000);
    } else if (is(key, "demote")) {
        config->copies.demote = small(value, CKPT_DEMOTE_FLUSH);
    } else if (is(key, "block")) {
        config->copies.block = small(value, 1u << 30);
    } else if (is(key, "copy-out")) {
        config->copies.read_streams = is(value, "stream");
    } else if (is(key, "read-ahead")) {
        config->copies.read_ahead = small(value, 8);
    } else if (is(key, "aside")) {
        config->copies.aside = number(value) != 0;
    } else if (is(key, "hook")) {
        config->hook = is(value, "symbols")       ? CKPT_HOOKS_SYMBOLS
                       : is(value, "relocations") ? CKPT_HOOKS_RELOCATIONS
                                                  : CKPT_HOOKS_AUTO;
    }
}

void ckpt_config_read(void) {
    const char *at = getenv(CKPT_CONFIG_VARIABLE);
    while (at && *at) {
        size_t length = strcspn(at, ";");
        const char *equals = memchr(at, '=', length);
        if (equals)
            set((struct text){at, (size_t)(equals - at)}, (struct text){equals + 1, (size_t)(at + length - equals - 1)});
        at += length;
        if (*at) at++;
    }
}
