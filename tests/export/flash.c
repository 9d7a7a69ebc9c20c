/* Flash whose power is cut after every byte that is erased or programmed, and what is loaded then. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "net.h"

static uint8_t flash[2][NET_SLOT_BYTES];
static net_state state, old, young, loaded;
static net_arena arena;
static long budget, worn;
static uint32_t protected_from = NET_SLOT_BYTES; /* bytes from here on take neither, and say nothing */

/* The cut comes in the middle of a byte: some of its bits have changed. */
static int change(uint8_t *byte, uint8_t to)
{
    uint8_t some = (uint8_t)(rand() & 255);
    if (budget-- > 0) *byte = to;
    else if (!budget--) *byte = (uint8_t)((*byte & some) | (to & ~some));
    return budget < 0;
}

static int erase(void *board, uint32_t slot)
{
    uint32_t i;
    for (i = 0; i < NET_SLOT_BYTES; i++)
        if (i < protected_from && change(flash[slot] + i, 255)) return 1;
    worn++;
    return board != &flash;
}

static int write_bytes(void *board, uint32_t slot, uint32_t at, const uint8_t *from, uint32_t count)
{
    uint32_t i;
    if (at % NET_CHUNK_BYTES || count != NET_CHUNK_BYTES || at + count > NET_SLOT_BYTES) abort();
    for (i = 0; i < count; i++) {
        if (at + i >= protected_from) continue;
        if (flash[slot][at + i] != 255) abort(); /* only what is erased can be programmed */
        if (change(flash[slot] + at + i, from[i])) return 1;
    }
    return board != &flash;
}

static int read_bytes(void *board, uint32_t slot, uint32_t at, uint8_t *to, uint32_t count)
{
    if (at + count > NET_SLOT_BYTES) abort();
    memcpy(to, flash[slot] + at, count);
    return board != &flash;
}

static net_flash chip = {erase, write_bytes, read_bytes, &flash};

/* Other weights than before */
static void learn(void)
{
#ifdef NET_RATE
    net_input x[NET_INPUT];
    memset(x, 1 + rand() % 7, sizeof x);
#else
    float x[NET_INPUT], loss[NET_BLOCKS];
    int i;
    for (i = 0; i < NET_INPUT; i++) x[i] = (float)rand() / (float)RAND_MAX;
#endif
    uint16_t label = (uint16_t)(rand() % NET_CLASSES);
#ifdef NET_RATE
    if (net_step(&state, &arena, x, &label, NET_RATE(0.05), NET_ALL_BLOCKS, 0)) abort();
#else
    if (net_step(&state, &arena, x, &label, 0.05f, NET_ALL_BLOCKS, loss)) abort();
#endif
}

static int same(const net_state *a, const net_state *b) { return !memcmp(a, b, sizeof *a); }

static int load(void)
{
    budget = 1L << 40;
    net_begin(&loaded);
    return net_load_from(&loaded, &chip);
}

/* The power is cut after `cut` bytes of saving `state`; 0: old, 1: new, 2: neither was loaded. */
static int saved_until(long cut)
{
    young = state;
    budget = cut;
    net_save_to(&state, &chip);
    if (load()) return 2;
    return same(&loaded, &young) ? 1 : same(&loaded, &old) ? 0 : 2;
}

int main(void)
{
    long cut, first, count[3] = {0, 0, 0}, chain[3] = {0, 0, 0};
    uint8_t record[NET_RECORD_BYTES];
    net_begin(&state);
    memset(flash, 255, sizeof flash);
    if (load() != NET_BAD_RECORD) return 1;
    for (first = 0; first < 2; first++) /* into the first slot, into the second */
        for (cut = 0; cut < (long)(2 * NET_SLOT_BYTES + 2); cut++) {
            memset(flash, 255, sizeof flash);
            budget = 1L << 40;
            if (first && net_save_to(&state, &chip)) return 2;
            learn();
            if (net_save_to(&state, &chip)) return 3;
            old = state;
            learn();
            count[saved_until(cut)]++;
            if (net_save_to(&state, &chip) || load() || !same(&loaded, &state)) return 4; /* it goes on */
        }
    for (cut = 0; cut < 4000; cut++) { /* one cut after another */
        old = loaded;
        learn();
        chain[saved_until(rand() % (long)(3 * NET_SLOT_BYTES))]++;
    }
    net_save(&loaded, record);
    net_begin(&state);
    if (net_load(&state, record) || !same(&state, &loaded)) return 5;
    old = state;
    for (cut = 0; cut < 3; cut++) { /* none of a slot is written, or its first chunk alone, as before */
        protected_from = cut < 2 ? 0 : NET_CHUNK_BYTES;
        learn();
        state.weights[0] = old.weights[0];
        if (net_save_to(&state, &chip) != NET_BAD_FLASH) return 7;
        protected_from = NET_SLOT_BYTES;
        if (cut == 1 && (net_save_to(&state, &chip) || load() || !same(&loaded, &state))) return 8;
    }
    old = state;
    chip.board = 0; /* the board's functions fail */
    budget = 1L << 40;
    if (net_save_to(&state, &chip) != NET_BAD_FLASH || !same(&state, &old)) return 6;
    printf("%ld %ld %ld %ld %ld %ld\n", count[0], count[1], count[2], chain[0], chain[1], chain[2]);
    return 0;
}
