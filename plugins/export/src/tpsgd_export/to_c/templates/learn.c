$licence
#include "net.h"
#include "tpsgd.h"

$tables
static const tps_block blocks[NET_BLOCKS] = {
$rows};

static tps_net net_of(float *arena, uint32_t classes)
{
    tps_net net = {blocks, $blocks, $batch, 0, $params, 0, $dz, $logits};
    net.classes = classes;
    net.arena = arena;
    return net;
}

int net_forward(const net_state *s, net_arena *a, const float *x, float *logits)
{
    tps_net net = net_of(a->numbers, net_classes(s));
    return tps_forward(&net, s->weights, x, logits);
}

int net_step(net_state *s, net_arena *a, const float *x, const uint16_t *labels, float lr,
             uint32_t learns, float *loss)
{
    tps_net net = net_of(a->numbers, net_classes(s));
    return tps_step(&net, s->weights, $moments_at, $ticks_at, $gains_at, x, labels, lr, learns, loss);
}

