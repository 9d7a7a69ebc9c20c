$licence
#include "net.h"
#include "tpsgd.h"
@far #if defined(__AVR__)
@far #error "the constants of this net do not fit into the first 64 KB of flash, which an AVR can read"
@far #endif

$tables
/* The layers of all blocks */
static const tps_block layers_of_net[$layer_rows] = {
$rows};

/* What they read and write in the arena */
static const tps_row places_of_layers[$layer_rows] = {
$row_places};

/* The first layer of each block, and behind the last one */
static const uint16_t first_of_block[NET_BLOCKS + 1] = {$first_rows};

static tps_net net_of(const net_state *s, net_arena *a)
{
@!of_numbers     tps_net net = {layers_of_net, $layer_rows, $batch, 0, $params, 0, $dz, $logits};
@!of_numbers     net.classes = net_classes(s);
@of_numbers     tps_net net = {layers_of_net, $layer_rows, $batch, NET_NUMBERS, $params, 0, $dz, $logits, 0, 0};
@of_numbers     net.mean = s->weights + NET_MEANS;
@of_numbers     net.deviation = net.mean + NET_NUMBERS;
    net.arena = a->numbers;
    return net;
}

int net_forward(const net_state *s, net_arena *a, const float *x, float *logits)
{
    tps_net net = net_of(s, a);
    uint32_t i;
    if (!tps_usable(x, NET_INPUT)) return NET_BAD_INPUT;
    for (i = 0; i < ${layer_rows}u; i++) {
        tps_row_outputs(&net, places_of_layers + i, i, s->weights, x, 1);
        tps_pool_row(&net, places_of_layers + i, layers_of_net + i, 1);
    }
    return tps_answer(&net, a->numbers + layers_of_net[${layer_rows}u - 1u].output, logits);
}

/* The part of block i in a step */
static int net_pass(net_state *s, net_arena *a, uint32_t i, const float *x, const $label *labels, float lr,
                    uint32_t learns, float *loss)
{
    tps_net net = net_of(s, a);
    return tps_pass_rows(&net, places_of_layers, first_of_block[i], first_of_block[i + 1],
                         (int)(learns >> i & 1u), s->weights, $moments_at, $part_ticks, $gains_at, x,
                         labels, lr, loss + i);
}

int net_step(net_state *s, net_arena *a, const float *x, const $label *labels, float lr,
             uint32_t learns, float *loss)
{
    tps_net net = net_of(s, a);
    uint32_t i;
    int error = tps_refuse(&net, x, labels, lr);
    if (error) return error;
    for (i = 0; i < NET_BLOCKS; i++) loss[i] = 0.0f;
    for (i = 0; i < NET_BLOCKS && !error; i++) error = net_pass(s, a, i, x, labels, lr, learns, loss);
    return error;
}

