/* A step in parts learns what the whole step learns; a rate that is NaN is refused. */
#include <stdio.h>
#include <string.h>

#include "net.h"

static net_state whole, parts;
static net_arena arena;
#ifdef NET_RATE
static net_input x[NET_INPUT];
#define LOSS int32_t
#define FAST NET_RATE(0.05)
#else
static float x[NET_BATCH * NET_INPUT];
#define LOSS float
#define FAST 0.05f
#endif

int main(int count, char **words)
{
    union { uint32_t u; float f; } nan;
    LOSS loss[NET_BLOCKS], other[NET_BLOCKS];
    uint16_t labels[NET_BATCH];
    uint32_t i, n, part = 0, calls = 0;
    int answer;
    nan.u = 0x7FC00000u + (uint32_t)count - 1u; /* unknown to the compiler */
    net_begin(&whole);
    net_begin(&parts);
    for (i = 0; i < 40; i++) {
        for (n = 0; n < sizeof x / sizeof *x; n++) x[n] = (unsigned char)(n * 7 + i * 13) % 5;
        for (n = 0; n < NET_BATCH; n++) labels[n] = (uint16_t)((i + n) % net_classes(&whole));
        if (net_step(&whole, &arena, x, labels, FAST, NET_ALL_BLOCKS, loss)) return 1;
        do {
            calls++;
            answer = net_step_part(&parts, &arena, x, labels, FAST, NET_ALL_BLOCKS, other, &part);
        } while (answer == NET_MORE);
        if (answer || part) return 2;
#ifndef __FAST_MATH__ /* which may sum in another order wherever a function is inlined */
        if (memcmp(&whole, &parts, sizeof whole) || memcmp(loss, other, sizeof loss)) return 3;
#endif
    }
    if (calls != 40 * NET_BLOCKS) return 4;
    whole = parts;
    part = NET_BLOCKS;
    if (net_step_part(&parts, &arena, x, labels, FAST, NET_ALL_BLOCKS, other, &part) != NET_BAD_ORDER) return 5;
#ifdef NET_RATE
    float values[NET_INPUT];
    for (n = 0; n < NET_INPUT; n++) values[n] = nan.f;
    net_quantise(values, x);
    for (n = 0; n < NET_INPUT; n++)
        if (x[n]) return 6;
#else
    if (net_step(&parts, &arena, x, labels, nan.f, NET_ALL_BLOCKS, other) != NET_BAD_RATE) return 7;
    nan.u |= 0x80000000u;
    if (net_step(&parts, &arena, x, labels, nan.f, NET_ALL_BLOCKS, other) != NET_BAD_RATE) return 8;
    x[NET_INPUT - 1] = nan.f;
    if (net_step(&parts, &arena, x, labels, FAST, NET_ALL_BLOCKS, other) != NET_BAD_INPUT) return 9;
#endif
    if (memcmp(&whole, &parts, sizeof whole)) return 10;
    return puts(words[0]) < 0;
}
