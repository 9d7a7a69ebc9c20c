/* ---- backprop: the outputs of all blocks are kept; weights move on the way back ---- */

/* A block's units, one after another: derivatives of the inputs from weights that have not moved yet,
 * then the weights, by dz of every sample. */
TPS_HOT void tps_back_units(const tps_net *net, const tps_block *b, const tps_rate *r, float *weights,
                            const float *x, const float *y, float *error, int learns, uint32_t units)
{
    float *dz = net->arena + net->dz;
    const float *w = b->fixed ? b->fixed : weights;
    uint32_t unit, n, i;
    for (unit = 0; unit < units; unit++) {
        for (n = 0; n < net->batch; n++)
            for (i = 0; i < b->pixels; i++) dz[n * b->pixels + i] = y[(n * b->units + unit) * b->pixels + i];
        for (n = 0; n < net->batch && error; n++) {
#ifdef TPS_WITH_CONVOLUTIONS
            if (b->convolution) tps_carry_filter(b, w, unit, dz + n * b->pixels, error + n * b->inputs);
            else
#endif
                tps_carry_unit(b, w, unit, dz[n], error + n * b->inputs);
        }
        if (!learns) continue;
#ifdef TPS_WITH_CONVOLUTIONS
        if (b->convolution) tps_move_filter(b, r, weights, unit, x, dz, net->batch);
        else
#endif
            tps_move_dense(b, r, weights, unit, x, dz, net->batch);
    }
}

#ifdef TPS_SGD
/* The same of a dense block and one sample, four units at a time; y becomes their steps. */
TPS_HOT void tps_back_dense(const tps_block *b, const tps_rate *r, float *weights, const float *x, float *y,
                            float *error, int learns, uint32_t units)
{
    const float *w = (b->fixed ? b->fixed : weights) + b->weight;
    uint32_t unit;
    if (TPS_FIXED(b) && error) tps_add_fixed(w, 1, b->inputs, b->inputs, y, units, error);
    else if (error) tps_add_columns(w, b->inputs, units, y, b->inputs, error);
    if (!learns) return;
    for (unit = 0; unit < units; unit++) {
        y[unit] *= r->lr;
        if (b->bias != TPS_NOWHERE) weights[b->bias + unit] -= y[unit];
    }
    tps_move_rows(weights + b->weight, b->inputs, units, x, b->inputs, y);
}
#endif

/* Whether a block before block i learns, which the error must reach */
TPS_HOT int tps_learns_before(const tps_net *net, uint32_t i)
{
    while (i--)
        if (TPS_BYTE(&net->blocks[i].local) != TPS_FROZEN) return 1;
    return 0;
}

/* Block i on the way back: dz lies where its output lay, and where its input lies, dz of the block
 * before it will. */
TPS_HOT void tps_back(const tps_net *net, uint32_t i, float *weights, float *moments, float *ticks,
                      const float *x, float lr, uint32_t learns)
{
    TPS_ROW(tps_block, b, net->blocks + i);
    const uint32_t units = i + 1 == net->count ? net->classes : b->units, count = net->batch * b->inputs;
    const int own = b->local != TPS_FROZEN && learns >> i & 1u;
    float *error = tps_learns_before(net, i) ? net->arena + net->logits : 0;
    float *y = net->arena + b->output, *before;
    uint32_t k;
#ifdef TPS_ADAM
    tps_rate r = {lr, 1.0f, moments, net->params};
    if (own) r = tps_tick(lr, ticks + 2 * i, moments, net->params);
#else
    tps_rate r = {lr, 1.0f, moments, net->params};
#endif
    (void)ticks;
    if (!own && !error) return;
    for (k = 0; k < count && error; k++) error[k] = 0.0f;
#ifdef TPS_SGD
    if (net->batch == 1 && !b->convolution) tps_back_dense(b, &r, weights, x, y, error, own, units);
    else
#endif
        tps_back_units(net, b, &r, weights, x, y, error, own, units);
    if (!error) return;
    TPS_ROW(tps_block, earlier, net->blocks + i - 1);
    before = net->arena + earlier->output;
    for (k = 0; k < count; k++) before[k] = error[k] * tps_slope(earlier, before[k]);
}

/* The derivative of the loss takes the place of the last block's output; the loss comes back. */
TPS_FN float tps_output_loss(const tps_net *net, const tps_label *labels)
{
    TPS_ROW(tps_block, b, net->blocks + net->count - 1);
    float *y = net->arena + b->output, loss = 0.0f, share = 1.0f / (float)net->batch;
    uint32_t n;
    for (n = 0; n < net->batch; n++)
        loss += tps_loss(b->loss, y + n * b->units, net->classes, tps_truth_of(net, labels, n), share) * share;
    return loss;
}
