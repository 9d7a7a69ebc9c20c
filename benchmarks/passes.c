/* Learn from the samples of a file, one at a time, and say how many test samples are right after 1, 5
 * and 20 passes: a line for each learning rate.
 *
 *     passes FILE SEED RATE...
 *
 * FILE: as uint32 the numbers of a sample, of training and of test samples; the training samples as
 * float, their labels as uint16; the same of the test samples. Of a recurrent net, a sample is a
 * sequence, and a rate is a line of 1 and 5 passes. */
#include <stdio.h>
#include <stdlib.h>

#include "net.h"

typedef struct { uint32_t count; float *x; uint16_t *y; } samples;

static net_state state;
static net_arena arena;
static uint32_t numbers;

#ifdef NET_MEASURED /* a recurrent net */
#define LONGEST 5
static int learn(const float *x, uint16_t label, float lr)
{
    float loss[NET_BLOCKS];
    uint32_t i;
    int error = NET_MEASURED;
    while (error == NET_MEASURED) {
        net_start(&arena);
        for (i = 0, error = 0; !error && i < numbers; i += NET_INPUT)
            error = net_read(&state, &arena, x + i, label, NET_ALL_BLOCKS);
        if (!error) error = net_finish(&state, &arena, label, lr, NET_ALL_BLOCKS, loss);
    }
    return error;
}

static int ask(const float *x, float *logits)
{
    uint32_t i;
    int error = 0;
    net_start(&arena);
    for (i = 0; !error && i < numbers; i += NET_INPUT) error = net_look(&state, &arena, x + i);
    return error ? error : net_logits(&state, &arena, logits);
}
#else
#define LONGEST 20
static int learn(const float *x, uint16_t label, float lr)
{
    float loss[NET_BLOCKS];
    return net_step(&state, &arena, x, &label, lr, NET_ALL_BLOCKS, loss);
}

static int ask(const float *x, float *logits) { return net_forward(&state, &arena, x, logits); }
#endif

static samples room(uint32_t count)
{
    samples s = {0, 0, 0};
    s.count = count;
    s.x = malloc(sizeof(float) * numbers * count);
    s.y = malloc(sizeof(uint16_t) * count);
    return s;
}

static int filled(samples s, FILE *file)
{
    return fread(s.x, sizeof(float) * numbers, s.count, file) == s.count &&
           fread(s.y, sizeof(uint16_t), s.count, file) == s.count;
}

static uint32_t right(samples test)
{
    uint32_t i, n, best, count = 0;
    for (i = 0; i < test.count; i++) {
        float logits[NET_CLASSES];
        if (ask(test.x + (size_t)i * numbers, logits)) continue;
        for (best = 0, n = 1; n < net_classes(&state); n++)
            if (logits[n] > logits[best]) best = n;
        count += best == test.y[i];
    }
    return count;
}

static void run(samples train, samples test, uint32_t *order, uint32_t seed, float lr)
{
    uint32_t pass, i, random = 2654435761u * (seed + 1u);
    int error = 0;
    net_begin(&state);
    for (i = 0; i < train.count; i++) order[i] = i;
    for (pass = 1; pass <= LONGEST; pass++) {
        for (i = train.count - 1; i > 0; i--) {
            uint32_t j, other;
            random ^= random << 13;
            random ^= random >> 17;
            random ^= random << 5;
            j = random % (i + 1), other = order[i];
            order[i] = order[j];
            order[j] = other;
        }
        for (i = 0; i < train.count && !error; i++)
            error = learn(train.x + (size_t)order[i] * numbers, train.y[order[i]], lr);
        if (pass == 1 || pass == 5 || pass == 20) printf("%u ", error ? 0 : right(test));
    }
    printf("\n");
}

int main(int count, char **words)
{
    FILE *file = fopen(words[1], "rb");
    uint32_t sizes[3];
    samples train, test;
    int i;
    if (!file || fread(sizes, sizeof sizes, 1, file) != 1) return 1;
    numbers = sizes[0];
    train = room(sizes[1]);
    test = room(sizes[2]);
    if (!filled(train, file) || !filled(test, file)) return 1;
    for (i = 3; i < count; i++)
        run(train, test, malloc(sizeof(uint32_t) * train.count), (uint32_t)atoi(words[2]),
            strtof(words[i], 0));
    return 0;
}
