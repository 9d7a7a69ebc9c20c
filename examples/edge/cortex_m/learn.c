/* Learn from samples in flash, then say how many of the held-out samples are right.
 *
 * data.h has bytes, which are pixels: TRAIN, TEST, EPOCHS, RATE, SCALE, train_x, train_y, test_x,
 * test_y. A net in net.h learns from them, NET_BATCH at a time, in another order in every epoch. */
#include "board.h"
#include "data.h"
#include "net.h"

static net_state state;
static net_arena arena;
static float input[NET_BATCH * NET_INPUT];

static void say(const char *name, uint32_t value, uint32_t base, const char *end)
{
    char text[48], digits[12];
    int n = 0, count = 0;
    while (*name) text[n++] = *name++;
    do {
        uint32_t digit = value % base;
        digits[count++] = (char)(digit < 10 ? '0' + digit : 'a' + digit - 10);
        value /= base;
    } while (value);
    while (count) text[n++] = digits[--count];
    while (*end) text[n++] = *end++;
    text[n] = 0;
    board_say(text);
}

/* A PC has no clock and no painted stack: what it did not measure is left out. */
static void say_measured(const char *name, uint32_t value)
{
    if (value) say(name, value, 10, "\n");
}

static void load(const uint8_t *bytes, float *x)
{
    int i;
    for (i = 0; i < NET_INPUT; i++) x[i] = (float)bytes[i] * SCALE;
}

/* The i-th sample of an epoch: steps of a prime lead to every sample once. */
static uint32_t shuffled(uint32_t i, uint32_t epoch)
{
    static const uint32_t primes[7] = {100003, 100019, 100043, 100049, 100057, 100069, 100103};
    return (uint32_t)((uint64_t)i * primes[epoch % 7] % TRAIN);
}

static int learn(void)
{
    float loss[NET_BLOCKS];
    uint16_t labels[NET_BATCH];
    uint32_t epoch, i, n, start;
    int error = 0;
    for (epoch = 0; epoch < EPOCHS; epoch++)
        for (i = 0; i + NET_BATCH <= TRAIN && !error; i += NET_BATCH) {
            for (n = 0; n < NET_BATCH; n++) {
                uint32_t sample = shuffled(i + n, epoch);
                load(train_x[sample], input + n * NET_INPUT);
                labels[n] = train_y[sample];
            }
            start = board_clock();
            error = net_step(&state, &arena, input, labels, RATE, NET_ALL_BLOCKS, loss);
            if (!epoch && i == NET_BATCH) say_measured("step ", (board_clock() - start) & 0xFFFFFF);
        }
    return error;
}

int main(void)
{
    float logits[NET_CLASSES];
    union { float f; uint32_t u; } number;
    uint32_t i, n, start, right = 0, hash = 2166136261u;
    net_begin(&state);
    board_clock_start();
    if (learn()) return 1;
    for (i = 0; i < TEST; i++) {
        uint32_t best = 0;
        load(test_x[i], input);
        start = board_clock();
        if (net_forward(&state, &arena, input, logits)) return 1;
        if (!i) say_measured("inference ", (board_clock() - start) & 0xFFFFFF);
        for (n = 1; n < net_classes(&state); n++)
            if (logits[n] > logits[best]) best = n;
        right += best == test_y[i];
    }
    for (i = 0; i < NET_PARAMS; i++) {
        number.f = state.weights[i];
        hash = (hash ^ number.u) * 16777619u;
    }
    say("right ", right, 10, " ");
    say("of ", TEST, 10, "\n");
    say("weights ", hash, 16, "\n");
    say_measured("stack ", board_stack());
    say("ram ", NET_RAM_BYTES, 10, "\n");
    return 0;
}
