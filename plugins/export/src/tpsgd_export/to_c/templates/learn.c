$licence
#include "net.h"
#include "tpsgd.h"

$tables
static const tps_block blocks[NET_BLOCKS] = {
$rows};

TPS_HOT tps_net net_of(const net_state *s, net_arena *a)
{
@!of_numbers     tps_net net = {blocks, $blocks, $batch, 0, $params, 0, $dz, $logits};
@!of_numbers     net.classes = net_classes(s);
@of_numbers     tps_net net = {blocks, $blocks, $batch, NET_NUMBERS, $params, 0, $dz, $logits, 0, 0};
@of_numbers     net.mean = s->weights + NET_MEANS;
@of_numbers     net.deviation = net.mean + NET_NUMBERS;
    net.arena = a->numbers;
    return net;
}

@constants $functions_of_blocks
int net_forward(const net_state *s, net_arena *a, const float *x, float *logits)
{
    tps_net net = net_of(s, a);
@!constants     return tps_forward(&net, s->weights, x, logits);
@constants     if (!tps_usable(x, NET_INPUT)) return NET_BAD_INPUT;
@constants $forward_of_blocks
@constants     return tps_answer(&net, x, logits);
}

/* The part of block i in a step; its output becomes x. */
static int net_pass(net_state *s, net_arena *a, uint32_t i, const float **x, const $label *labels, float lr,
                    uint32_t learns, float *loss)
{
@!constants     tps_net net = net_of(s, a);
@!constants     float *y = tps_outputs(&net, blocks + i, s->weights, *x, $batch);
@!constants     return tps_pass(&net, i, s->weights, $moments_at, $ticks_at, $gains_at, x, y, labels, lr, learns, loss);
@constants     switch (i) {
@constants $cases
@constants     }
@constants     return NET_OK;
}

int net_step(net_state *s, net_arena *a, const float *x, const $label *labels, float lr,
             uint32_t learns, float *loss)
{
    tps_net net = net_of(s, a);
    uint32_t i;
    int error = tps_refuse(&net, x, labels, lr);
    if (error) return error;
    for (i = 0; i < NET_BLOCKS; i++) loss[i] = 0.0f;
    for (i = 0; i < NET_BLOCKS && !error; i++) error = net_pass(s, a, i, &x, labels, lr, learns, loss);
    return error;
}

