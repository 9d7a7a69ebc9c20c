/* Takes the steps of a file, then writes what became of the net into another.
 * In: count; then for each step the inputs, the label, the rate and the blocks.
 * Out: for each step its status and losses; logits of the last input; a saved record. */
#include <stdio.h>
#include "net.h"

static net_state state, again;
static net_arena arena;
static uint8_t record[NET_RECORD_BYTES];

static uint32_t word(FILE *file, int bytes)
{
    uint32_t value = 0;
    int i;
    for (i = 0; i < bytes; i++) value |= (uint32_t)fgetc(file) << (8 * i);
    return value;
}

int main(int count_of_arguments, char **arguments)
{
    FILE *in = fopen(arguments[1], "rb"), *out = fopen(arguments[2], "wb");
    uint32_t steps = word(in, 4), i, k;
    int32_t numbers[NET_BLOCKS + NET_CLASSES + 1] = {0};
    net_input x[NET_INPUT] = {0};
    net_begin(&state);
    for (i = 0; count_of_arguments > 3 && i < (uint32_t)(arguments[3][0] - '0'); i++) net_add_class(&state);
    for (i = 0; i < steps; i++) {
        uint16_t label, rate;
        for (k = 0; k < NET_INPUT; k++) x[k] = (net_input)fgetc(in);
        label = (uint16_t)word(in, 2);
        rate = (uint16_t)word(in, 2);
        numbers[0] = net_step(&state, &arena, x, &label, rate, word(in, 4), numbers + 1);
        fwrite(numbers, 4, NET_BLOCKS + 1, out);
    }
    net_forward(&state, &arena, x, numbers);
    fwrite(numbers, 4, NET_CLASSES, out);
    net_save(&state, record);
    fwrite(record, 1, sizeof record, out);
    if (net_load(&again, record) || again.random != state.random) return 2;
    record[NET_RECORD_BYTES / 2] ^= 4;
    if (net_load(&again, record) != NET_BAD_RECORD) return 3;
    again = state;
    again.random = 0;
    net_save(&again, record);
    if (net_load(&again, record) != NET_BAD_RECORD) return 4;
    again = state;
    again.classes = NET_CLASSES + 1;
    net_save(&again, record);
    if (net_load(&again, record) != NET_BAD_RECORD) return 5;
    if (count_of_arguments > 4) { /* a record to load: its status is that of the program */
        FILE *other = fopen(arguments[4], "rb");
        if (fread(record, 1, sizeof record, other) != sizeof record) return 6;
        fclose(other);
        return net_load(&again, record) == NET_BAD_RECORD ? 7 : 0;
    }
    fclose(in);
    return fclose(out);
}
