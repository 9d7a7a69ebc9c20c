/* Learn from samples in flash in integers, then say how many of the held-out samples are right.
 *
 * data.h has what examples/edge/cortex_m/learn.c reads; its bytes are inputs as they are, and RATE is
 * a number of 65,536ths. The net in net.h is one of integers. */
#include "board.h"
#include "data.h"
#include "net.h"

static net_state state;
static net_arena arena;
static net_input input[NET_INPUT];

static void say(const char *name, uint32_t value, const char *end)
{
    char text[48], digits[12];
    int n = 0, count = 0;
    while (*name) text[n++] = *name++;
    do {
        digits[count++] = (char)('0' + value % 10);
        value /= 10;
    } while (value);
    while (count) text[n++] = digits[--count];
    while (*end) text[n++] = *end++;
    text[n] = 0;
    board_say(text);
}

static void say_measured(const char *name, uint32_t value)
{
    if (value) say(name, value, "\n");
}

static void load(const uint8_t *bytes)
{
    int i;
    for (i = 0; i < NET_INPUT; i++) input[i] = (net_input)bytes[i];
}

static int learn(void)
{
    int32_t loss[NET_BLOCKS];
    uint32_t epoch, i, start, ticks = 0;
    uint16_t label;
    int error = 0;
    for (epoch = 0; epoch < EPOCHS; epoch++)
        for (i = 0; i < TRAIN && !error; i++) {
            load(train_x[i]);
            label = train_y[i];
            start = board_clock();
            error = net_step(&state, &arena, input, &label, RATE, NET_ALL_BLOCKS, loss);
            ticks += (board_clock() - start) & 0xFFFFFF;
        }
    say_measured("steps ", ticks);
    return error;
}

/* FNV-1a over the weights and the biases */
static uint32_t hash(void)
{
    uint32_t i, h = 2166136261u;
    for (i = 0; i < NET_WEIGHTS; i++) h = (h ^ (uint32_t)(state.weights[i] & 0xFFFF)) * 16777619u;
#if NET_BIASES
    for (i = 0; i < NET_BIASES; i++) h = (h ^ (uint32_t)state.biases[i]) * 16777619u;
#endif
    return (h ^ state.random) * 16777619u;
}

int main(void)
{
    int32_t logits[NET_CLASSES];
    uint32_t i, n, start, right = 0;
    net_begin(&state);
    board_clock_start();
    if (learn()) return 1;
    for (i = 0; i < TEST; i++) {
        uint32_t best = 0;
        load(test_x[i]);
        start = board_clock();
        if (net_forward(&state, &arena, input, logits)) return 1;
        if (!i) say_measured("inference ", (board_clock() - start) & 0xFFFFFF);
        for (n = 1; n < net_classes(&state); n++)
            if (logits[n] > logits[best]) best = n;
        right += best == test_y[i];
    }
    say("right ", right, " ");
    say("of ", TEST, "\n");
    say("weights ", hash(), "\n");
    say_measured("stack ", board_stack());
    say("ram ", NET_RAM_BYTES, "\n");
    return 0;
}
