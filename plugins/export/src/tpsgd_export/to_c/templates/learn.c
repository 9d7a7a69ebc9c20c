$licence
#include "net.h"
#include "tpsgd.h"
@far #if defined(__AVR__)
@far #error "the constants of this net do not fit into the first 64 KB of flash, which an AVR can read"
@far #endif

$tables
static const tps_block blocks[NET_BLOCKS] TPS_ROWS_IN_FLASH = {
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
/* Outputs of block i for some samples */
static float *net_outputs(const net_state *s, net_arena *a, uint32_t i, const float *x, uint32_t samples)
{
@!constants     tps_net net = net_of(s, a);
@constants     switch (i) {
@constants $outputs_of_blocks
@constants     default: return 0;
@constants     }
@!constants     TPS_ROW(tps_block, b, blocks + i);
@!constants     return tps_outputs(&net, b, s->weights, x, samples);
}

int net_forward(const net_state *s, net_arena *a, const float *x, float *logits)
{
    tps_net net = net_of(s, a);
    uint32_t i;
    if (!tps_usable(x, NET_INPUT)) return NET_BAD_INPUT;
    for (i = 0; i < NET_BLOCKS; i++) {
        float *y = net_outputs(s, a, i, x, 1);
        TPS_ROW(tps_block, b, blocks + i);
        tps_pool_outputs(b, y, 1);
        x = y;
    }
    return tps_answer(&net, x, logits);
}

@!backprop /* The part of block i in a step; its output becomes x. */
@!backprop static int net_pass(net_state *s, net_arena *a, uint32_t i, const float **x, const $label *labels, float lr,
@!backprop                     uint32_t learns, float *loss)
@!backprop {
@!constants @!backprop     tps_net net = net_of(s, a);
@!constants @!backprop     TPS_ROW(tps_block, b, blocks + i);
@!constants @!backprop     float *y = tps_outputs(&net, b, s->weights, *x, $batch);
@!constants @!backprop     return tps_pass(&net, i, s->weights, $moments_at, $ticks_at, $gains_at, x, y, labels, lr, learns, loss);
@constants @!backprop     switch (i) {
@constants @!backprop $passes_of_blocks
@constants @!backprop     default: return NET_OK;
@constants @!backprop     }
@!backprop }
@backprop /* Block i on the way back */
@backprop static void net_back(net_state *s, net_arena *a, uint32_t i, const float *x, float lr, uint32_t learns)
@backprop {
@!constants @backprop     tps_net net = net_of(s, a);
@!constants @backprop     tps_back(&net, i, s->weights, $moments_at, $ticks_at, x, lr, learns);
@constants @backprop     switch (i) {
@constants @backprop $backs_of_blocks
@constants @backprop     }
@backprop }

int net_step(net_state *s, net_arena *a, const float *x, const $label *labels, float lr,
             uint32_t learns, float *loss)
{
    tps_net net = net_of(s, a);
    uint32_t i;
    int error = tps_refuse(&net, x, labels, lr);
@backprop     const float *input = x;
    if (error) return error;
    for (i = 0; i < NET_BLOCKS; i++) loss[i] = 0.0f;
@!backprop     for (i = 0; i < NET_BLOCKS && !error; i++) error = net_pass(s, a, i, &x, labels, lr, learns, loss);
@!backprop     return error;
@backprop     for (i = 0; i < NET_BLOCKS; i++) {
@backprop         x = net_outputs(s, a, i, x, $batch);
@backprop         if (!tps_usable(x, $batch * TPS_WORD(&blocks[i].units) * TPS_WORD(&blocks[i].pixels))) return NET_DIVERGED;
@backprop     }
@backprop     loss[NET_BLOCKS - 1] = tps_output_loss(&net, labels);
@backprop     for (i = NET_BLOCKS; i-- > 0;)
@backprop         net_back(s, a, i, i ? a->numbers + TPS_WORD(&blocks[i - 1].output) : input, lr, learns);
@backprop     return NET_OK;
}

