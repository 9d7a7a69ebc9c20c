/* Learn from STEPS samples of a file, and count the rest of them that the net gets right. */
#include <stdio.h>
#include "net.h"
static net_state state;
static net_arena arena;
static net_input x[NET_INPUT];
static uint16_t label;
static int32_t logits[NET_CLASSES];
static int sample(FILE *in)
{
    return fread(x, sizeof x, 1, in) == 1 && fread(&label, 2, 1, in) == 1;
}
int main(int count, char **files)
{
    FILE *in = fopen(files[count - 2], "rb"), *out = fopen(files[count - 1], "wb");
    int i, c, best, error, right = 0;
    net_begin(&state);
    for (i = 0; i < STEPS; i++) {
        if (!sample(in)) return 100;
        if ((error = net_step(&state, &arena, x, &label, RATE, NET_ALL_BLOCKS, 0))) return error;
    }
    while (sample(in)) {
        net_forward(&state, &arena, x, logits);
        for (c = 1, best = 0; c < (int)net_classes(&state); c++)
            best = logits[c] > logits[best] ? c : best;
        right += best == label;
    }
    return fprintf(out, "%d", right) < 0 || fclose(out) ? 100 : 0;
}
