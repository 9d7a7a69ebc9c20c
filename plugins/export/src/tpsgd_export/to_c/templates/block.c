TPS_ONCE float *net_outputs_${block}(const net_state *s, net_arena *a, const float *x, uint32_t samples)
{
    const tps_net net = net_of(s, a);
    return tps_outputs(&net, blocks + ${block}, s->weights, x, samples);
}

static float *net_forward_${block}(const net_state *s, net_arena *a, const float *x)
{
    float *y = net_outputs_${block}(s, a, x, 1);
    tps_pool_outputs(blocks + ${block}, y, 1);
    return y;
}

static int net_pass_${block}(net_state *s, net_arena *a, const float **x, const $label *labels, float lr,
                      uint32_t learns, float *loss)
{
    const tps_net net = net_of(s, a);
    float *y = net_outputs_${block}(s, a, *x, $batch);
    return tps_pass(&net, ${block}, s->weights, $moments_at, $ticks_at, $gains_at, x, y, labels, lr, learns, loss);
}
