/* The mean over seeds of what one step adds to each weight and bias, from the first weights on. */
#include <stdio.h>

#include "net.h"

static net_state first, state;
static net_arena arena;
static net_input x[NET_INPUT];
static double moved[NET_WEIGHTS + NET_BIASES + 1];

int main(int count, char **files)
{
    FILE *in = fopen(files[count - 2], "rb"), *out = fopen(files[count - 1], "wb");
    uint16_t label;
    uint32_t i, seed;
    if (fread(x, sizeof x, 1, in) != 1 || fread(&label, 2, 1, in) != 1) return 100;
    net_begin(&first);
    for (seed = 1; seed <= SEEDS; seed++) {
        state = first;
        state.random = seed * 2654435761u;
        if (net_step(&state, &arena, x, &label, RATE, 1, 0)) return 101;
        for (i = 0; i < NET_WEIGHTS; i++) moved[i] += state.weights[i] - first.weights[i];
        for (i = 0; i < NET_BIASES; i++) moved[NET_WEIGHTS + i] += state.biases[i] - first.biases[i];
    }
    for (i = 0; i < NET_WEIGHTS + NET_BIASES; i++) moved[i] /= SEEDS;
    return fwrite(moved, sizeof(double), NET_WEIGHTS + NET_BIASES, out) != NET_WEIGHTS + NET_BIASES || fclose(out);
}
