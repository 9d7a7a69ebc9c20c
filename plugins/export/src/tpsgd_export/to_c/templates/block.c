TPS_ONCE float *net_outputs_${block}(const net_state *s, net_arena *a, const float *x, uint32_t samples)
{
    const tps_net net = net_of(s, a);
    TPS_ROW(tps_block, b, blocks + ${block});
    return tps_outputs(&net, b, s->weights, x, samples);
}

@!backprop TPS_ONCE int net_pass_${block}(net_state *s, net_arena *a, const float **x, const $label *labels, float lr,
@!backprop                       uint32_t learns, float *loss)
@!backprop {
@!backprop     const tps_net net = net_of(s, a);
@!backprop     float *y = net_outputs_${block}(s, a, *x, $batch);
@!backprop     return tps_pass(&net, ${block}, s->weights, $moments_at, $ticks_at, $gains_at, x, y, labels, lr, learns, loss);
@!backprop }
@backprop TPS_ONCE void net_back_${block}(net_state *s, net_arena *a, const float *x, float lr, uint32_t learns)
@backprop {
@backprop     const tps_net net = net_of(s, a);
@backprop     tps_back(&net, ${block}, s->weights, $moments_at, $ticks_at, x, lr, learns);
@backprop }
