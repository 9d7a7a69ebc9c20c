/* A net, or a head, learns from samples that are computed, and says what became of it, as hashes of the
 * bits of its numbers. SEQUENCES, INTEGERS, HEAD or NUMBERS say what kind of net it is; put() is the machine's. */
#include <stdint.h>
#if defined(HEAD)
#include "head.h"
#define NET_INPUT HEAD_INPUT
#define NET_CLASSES HEAD_CLASSES
#define net_state head_state
#define net_arena head_arena
#define net_begin head_begin
#define net_learn head_learn
#define net_scores head_scores
#define net_scale head_scale
#else
#include "net.h"
#endif

#ifndef STEPS
#define STEPS 12
#endif
#ifndef LABELS
#define LABELS NET_CLASSES
#endif
#define LENGTH 5 /* time steps of a sequence */

void put(char sign);

static uint32_t random_state = 1, hash;

static uint32_t draw(uint32_t below)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 16) * below >> 16;
}

static void add(uint32_t word)
{
    hash = (hash ^ word) * 16777619u;
}

#if defined(INTEGERS)
typedef int32_t number;
static uint32_t bits(int32_t x) { return (uint32_t)x; }
#else
typedef float number;
static uint32_t bits(float x)
{
    union { float f; uint32_t u; } same;
    same.f = x;
    return same.u;
}
#endif

static void add_numbers(const number *x, uint32_t count)
{
    while (count--) add(bits(*x++));
}

/* A name and the hash since the last line */
static void say(const char *name)
{
    int i;
    while (*name) put(*name++);
    put(' ');
    for (i = 28; i >= 0; i -= 4) put("0123456789abcdef"[hash >> i & 15u]);
    put('\n');
    hash = 2166136261u;
}

static net_state state;
static net_arena arena;

#if defined(INTEGERS)
static net_input x[NET_INPUT];
static void sample(net_input *to, uint32_t count) { while (count--) *to++ = (net_input)draw(128); }
#else
static float x[NET_INPUT * BATCH];
static void sample(float *to, uint32_t count) { while (count--) *to++ = (float)draw(4096) / 2048.0f - 1.0f; }
#endif

#if defined(NUMBERS)
#define OUTPUTS NET_NUMBERS
static float labels[NET_NUMBERS * BATCH];
#else
#define OUTPUTS NET_CLASSES
#endif
#if !defined(NUMBERS) && !defined(SEQUENCES) && !defined(HEAD)
static uint16_t labels[BATCH];
#endif
#if !defined(HEAD)
static number loss[NET_BLOCKS];
#endif
static number outputs[OUTPUTS];

static void say_weights(const char *name)
{
    uint32_t i;
    for (i = 0; i < sizeof state.weights / sizeof state.weights[0]; i++) add(bits(state.weights[i]));
    say(name);
}

static int learn(void)
{
#if defined(HEAD)
    sample(x, NET_INPUT);
    return net_learn(&state, &arena, x, (uint16_t)draw(LABELS), 1.0f);
#elif defined(SEQUENCES)
    uint16_t label = (uint16_t)draw(LABELS);
    int i;
    net_start(&arena);
    for (i = 0; i < LENGTH; i++) {
        sample(x, NET_INPUT);
        net_read(&state, &arena, x, label, NET_ALL_BLOCKS);
    }
    return net_finish(&state, &arena, label, 0.05f, NET_ALL_BLOCKS, loss) % NET_MEASURED;
#else
    uint32_t i;
    sample(x, NET_INPUT * BATCH);
#if defined(NUMBERS)
    sample(labels, NET_NUMBERS * BATCH);
#else
    for (i = 0; i < BATCH; i++) labels[i] = (uint16_t)draw(LABELS);
#endif
    for (i = 0; i < NET_BLOCKS; i++) loss[i] = 0;
#if defined(INTEGERS)
    return net_step(&state, &arena, x, labels, NET_RATE(0.05), NET_ALL_BLOCKS, loss);
#else
    return net_step(&state, &arena, x, labels, 0.05f, NET_ALL_BLOCKS, loss);
#endif
#endif
}

static int ask(void)
{
#if defined(HEAD)
    return net_scores(&state, &arena, x, outputs);
#elif defined(SEQUENCES)
    int i;
    net_start(&arena);
    for (i = 0; i < LENGTH; i++) net_look(&state, &arena, x);
    return net_logits(&state, &arena, outputs);
#else
    return net_forward(&state, &arena, x, outputs);
#endif
}

#if !defined(HEAD)
/* A flash that is empty, and of which only the bytes that are written matter */
static int flash_erase(void *board, uint32_t slot)
{
    (void)board;
    (void)slot;
    return 0;
}

static int flash_write(void *board, uint32_t slot, uint32_t at, const uint8_t *from, uint32_t count)
{
    (void)board;
    (void)slot;
    (void)at;
    while (count--) add(*from++);
    return 0;
}

static int flash_read(void *board, uint32_t slot, uint32_t at, uint8_t *to, uint32_t count)
{
    (void)board;
    (void)slot;
    (void)at;
    while (count--) *to++ = 0;
    return 0;
}
#endif

int main(void)
{
    uint32_t i;
    int errors = 0;
    hash = 2166136261u;
    net_begin(&state);
    say_weights("begin");
    for (i = 0; i < STEPS; i++) {
#if defined(SCALED)
        sample(x, NET_INPUT);
        net_scale(x);
        errors |= ask();
#endif
        errors |= learn();
    }
#if defined(SCALED)
    add_numbers(x, NET_INPUT);
    say("scaled");
#endif
    add((uint32_t)errors);
    say("errors");
    say_weights("weights");
    errors |= ask();
    add_numbers(outputs, OUTPUTS);
    say("outputs");
#if !defined(HEAD)
    add_numbers(loss, NET_BLOCKS);
    say("losses");
    {
        net_flash flash = {flash_erase, flash_write, flash_read, 0};
        net_save_to(&state, &flash);
    }
    say("record");
#endif
    return errors;
}
