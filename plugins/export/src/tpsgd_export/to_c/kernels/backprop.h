/* ---- backprop: the outputs of all blocks are kept; weights move on the way back ---- */

#ifdef TPS_WITH_CONVOLUTIONS
/* Products of dz with the weights of four channels, `kernel` weights apart: added to their maps */
TPS_HOT void tps_carry_four(const tps_convolution *c, const tps_products *of, const float *w, uint32_t kernel,
                            const float *dz, float *map)
{
    const int32_t plane = c->rows * c->columns, stride = c->stride_columns;
    const float w0 = w[0], w1 = w[kernel], w2 = w[2 * kernel], w3 = w[3 * kernel];
    int32_t i, j;
    for (i = of->rows; i; i--, map += c->stride_rows * c->columns, dz += c->out_columns) {
        const float *d = dz;
        float *p0 = map, *p1 = p0 + plane, *p2 = p1 + plane, *p3 = p2 + plane;
        for (j = of->columns; j; j--, p0 += stride, p1 += stride, p2 += stride, p3 += stride) {
            float value = *d++;
            *p0 += w0 * value;
            *p1 += w1 * value;
            *p2 += w2 * value;
            *p3 += w3 * value;
        }
    }
}

TPS_HOT void tps_carry_one(const tps_convolution *c, const tps_products *of, float w, const float *dz,
                           float *map)
{
    int32_t i, j;
    for (i = of->rows; i; i--, map += c->stride_rows * c->columns, dz += c->out_columns) {
        const float *d = dz;
        float *p = map;
        for (j = of->columns; j; j--, p += c->stride_columns) *p += w * *d++;
    }
}

/* Derivatives of what one filter reads, from dz of its map: added to `error` */
TPS_HOT void tps_carry_filter(const tps_block *b, const float *weights, uint32_t unit, const float *dz,
                              float *error)
{
    const tps_convolution *c = b->convolution;
    const int32_t channels = c->channels / c->groups, plane = c->rows * c->columns;
    const uint32_t kernel = (uint32_t)c->kernel_rows * c->kernel_columns;
    const float *w = weights + b->weight + unit * b->fan_in;
    int32_t k, u, v;
    error += (int32_t)(unit / (b->units / c->groups)) * channels * plane;
    for (u = 0; u < c->kernel_rows; u++)
        for (v = 0; v < c->kernel_columns; v++, w++) {
            const tps_products of = tps_products_of(c, u, v);
            for (k = 0; k + 4 <= (TPS_FIXED(b) ? 0 : channels); k += 4)
                tps_carry_four(c, &of, w + (uint32_t)k * kernel, kernel, dz + of.dz, error + k * plane + of.map);
            for (; k < channels; k++)
                tps_carry_one(c, &of, TPS_OF(b, w + (uint32_t)k * kernel), dz + of.dz, error + k * plane + of.map);
        }
}
#endif

/* Derivatives of a dense unit's inputs: added to `error` */
TPS_HOT void tps_carry_unit(const tps_block *b, const float *weights, uint32_t unit, float dz, float *error)
{
    const float *w = weights + b->weight + unit * b->inputs;
    uint32_t k;
    for (k = 0; k < b->inputs; k++) error[k] += dz * TPS_OF(b, w + k);
}

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
