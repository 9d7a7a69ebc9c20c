/* Reads sequences from standard input, lets the net learn from them, and writes what it became.
 *
 * In: count, blocks, rate; then for each sequence: learn or look, steps, label, numbers.
 * Out: the answer and the losses of each that was learned, the logits of each that was looked at;
 * then the weights. */
#include <stdio.h>
#include "net.h"

static net_state state;
static net_arena arena;
static float x[NET_INPUT], loss[NET_BLOCKS], logits[NET_CLASSES];

static uint32_t word(void)
{
    uint32_t value = 0;
    if (fread(&value, 4, 1, stdin) != 1) fprintf(stderr, "too short\n");
    return value;
}

static void numbers(float *to, uint32_t count)
{
    if (fread(to, 4, count, stdin) != count) fprintf(stderr, "too short\n");
}

int main(void)
{
    uint32_t count = word(), blocks = word(), i, t;
    float rate;
    numbers(&rate, 1);
    net_begin(&state);
    for (i = 0; i < count; i++) {
        uint32_t learn = word(), steps = word(), label = word();
        int32_t answer = 0;
        net_start(&arena);
        for (t = 0; t < steps; t++) {
            numbers(x, NET_INPUT);
            if (learn) net_read(&state, &arena, x, (uint16_t)label, blocks);
            else net_look(&state, &arena, x);
        }
        if (learn) {
            answer = net_finish(&state, &arena, (uint16_t)label, rate, blocks, loss);
            fwrite(&answer, 4, 1, stdout);
            fwrite(loss, 4, NET_BLOCKS, stdout);
        } else {
            net_logits(&state, &arena, logits);
            fwrite(logits, 4, NET_CLASSES, stdout);
        }
    }
    fwrite(state.weights, 4, NET_PARAMS, stdout);
    return 0;
}
