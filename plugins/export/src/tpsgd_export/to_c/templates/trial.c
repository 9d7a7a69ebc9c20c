/* Learn from the batches of a file, and write the weights to another. */
#include <stdio.h>
#include "net.h"

static net_state state;
static net_arena arena;
static float x[COUNT], loss[NET_BLOCKS];
#ifdef NET_NUMBERS
static float labels[NET_BATCH * NET_NUMBERS];
#define GAINS_END NET_MEANS
#else
static uint16_t labels[NET_BATCH];
#define GAINS_END sizeof state.weights / sizeof(float)
#endif

static int step(uint32_t blocks)
{
#ifdef SEQUENCES
    int i, error = NET_MEASURED;
    while (error == NET_MEASURED) {
        net_start(&arena);
        for (i = 0, error = 0; !error && i < COUNT; i += NET_INPUT)
            error = net_read(&state, &arena, x + i, labels[0], blocks);
        if (!error) error = net_finish(&state, &arena, labels[0], RATE, blocks, loss);
    }
    return error;
#else
    return net_step(&state, &arena, x, labels, RATE, blocks, loss);
#endif
}

int main(int count, char **files)
{
    FILE *in = fopen(files[count - 2], "rb"), *out = fopen(files[count - 1], "wb");
    uint32_t i, blocks;
    int error = 0;
    net_begin(&state);
    for (i = NET_PARAMS; i < GAINS_END; i++)
        state.weights[i] = 0.0f; /* gains: the first batch measures them, as in tpsgd.fit */
    while (!error && fread(&blocks, 4, 1, in) == 1) {
        if (fread(x, 4, COUNT, in) != COUNT || fread(labels, sizeof labels, 1, in) != 1)
            return 100;
        error = step(blocks);
    }
    return fwrite(state.weights, 4, NET_PARAMS, out) != NET_PARAMS || fclose(out) ? 100 : error;
}
