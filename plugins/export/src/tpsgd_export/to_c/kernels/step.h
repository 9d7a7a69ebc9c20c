/* ---- a net: forward, and one step of learning ---- */

enum { TPS_OK, TPS_BAD_INPUT, TPS_BAD_RATE, TPS_BAD_LABEL, TPS_DIVERGED, TPS_NO_SPACE, TPS_BAD_RECORD };

typedef struct {
    const tps_block *blocks;
    uint32_t count, batch, classes, params;
    float *arena;
    uint32_t dz, logits; /* places in the arena */
#ifdef TPS_WITH_NUMBERS
    const float *mean, *deviation; /* of each number of a label */
#endif
} tps_net;

/* The label of sample n of a batch */
TPS_FN tps_truth tps_truth_of(const tps_net *net, const tps_label *labels, uint32_t n)
{
#ifdef TPS_WITH_NUMBERS
    tps_truth truth = {0, 0, 0, 0};
    truth.numbers = labels + n * net->classes;
    truth.mean = net->mean;
    truth.deviation = net->deviation;
    truth.count = net->classes;
    return truth;
#else
    (void)net;
    return labels[n];
#endif
}

/* Outputs of a block for some samples, before the pools */
TPS_HOT float *tps_outputs(const tps_net *net, const tps_block *b, const float *weights, const float *x,
                          uint32_t samples)
{
    float *y = net->arena + b->output;
    uint32_t n;
    if (b->fixed) weights = b->fixed;
    if (net->batch == 1) samples = 1;
    for (n = 0; n < samples; n++) {
#ifdef TPS_WITH_SMALL
        if (b->small) {
            tps_small_outputs(b, net->arena + b->unpacked, x + n * b->inputs, y + n * b->units * b->pixels);
            continue;
        }
#endif
#ifdef TPS_WITH_CONVOLUTIONS
        if (b->convolution) tps_convolve(b, weights, x + n * b->inputs, y + n * b->units * b->pixels);
        else
#endif
            tps_dense(b, weights, x + n * b->inputs, y + n * b->units);
    }
    return y;
}

/* The pools of a block, in place: what is written lies before what is still to be read */
TPS_ONCE void tps_pool_outputs(const tps_block *b, float *y, uint32_t samples)
{
#ifdef TPS_WITH_POOLS
    uint32_t n, p, k, numbers = b->units * b->pixels;
    int32_t i, j;
    for (n = 0; n < samples && b->pools; n++) {
        float *to = y + n * b->pooled;
        const float *from = y + n * numbers;
        for (p = 0; p < b->pools; p++) {
            const tps_pool *pool = b->pool + p;
            float *out = to;
            for (k = 0; k < pool->channels; k++, from += pool->rows * pool->columns)
                for (i = 0; i < pool->out_rows; i++)
                    for (j = 0; j < pool->out_columns; j++)
                        *out++ = tps_pool_window(pool, from, tps_window_of(pool, i, j));
            from = to;
        }
    }
#else
    (void)b;
    (void)y;
    (void)samples;
#endif
}

/* The last block's output x as logits or numbers */
TPS_FN int tps_answer(const tps_net *net, const float *x, float *logits)
{
    uint32_t i;
    for (i = 0; i < net->classes; i++) {
        logits[i] = x[i];
#ifdef TPS_WITH_NUMBERS
        logits[i] = logits[i] * net->deviation[i] + net->mean[i];
#endif
    }
    return tps_usable(logits, net->classes) ? TPS_OK : TPS_DIVERGED;
}

TPS_FN int tps_forward(const tps_net *net, const float *weights, const float *x, float *logits)
{
    TPS_ROW(tps_block, first, net->blocks);
    uint32_t i;
    if (!tps_usable(x, first->inputs)) return TPS_BAD_INPUT;
    for (i = 0; i < net->count; i++) {
        TPS_ROW(tps_block, b, net->blocks + i);
        float *y = tps_outputs(net, b, weights, x, 1);
        tps_pool_outputs(b, y, 1);
        x = y;
    }
    return tps_answer(net, x, logits);
}

#ifdef TPS_WITH_READOUT
/* Derivatives of every sample's logits, in the arena; the loss comes back. */
TPS_HOT float tps_readout(const tps_net *net, const tps_block *b, const float *weights, float *gains,
                         const float *y, const tps_label *labels)
{
    float *e = net->arena + net->logits, gain = b->gain, loss = 0.0f, share = 1.0f / (float)net->batch;
    uint32_t n;
    if (b->slot != TPS_NOWHERE) {
        if (gains[b->slot] == 0.0f) {
            float rms = tps_sqrt(tps_mean_square(b, y, net->batch));
            gains[b->slot] = b->target / (rms > 0.0f ? rms : 1.0f);
        }
        gain = gains[b->slot];
    }
    for (n = 0; n < net->batch; n++, e += net->classes) {
        tps_read_out(b, weights, gain, y + n * b->units * b->pixels, e, net->classes);
        loss += tps_loss(b->loss, e, net->classes, tps_truth_of(net, labels, n), gain * share) * share;
    }
    return loss;
}
#endif

#ifdef TPS_WITH_LEARNED_CODES
/* Codes move by the batch's sum of e f^T. The features lie where dz did: all units have moved. */
TPS_HOT void tps_move_codes(const tps_net *net, const tps_block *b, const tps_rate *r, float *weights,
                            const float *y)
{
    float *e = net->arena + net->logits;
    float *f = net->arena + net->dz, g;
    uint32_t unit, i, j, c, n, number = b->learned;
#ifdef TPS_SGD
    if (net->batch == 1) {
        const uint32_t cells = (uint32_t)b->grid_rows * b->grid_columns, size = b->codes->size;
        float of_map[TPS_CELLS];
        for (c = 0; c < net->classes; c++) e[c] *= r->lr;
        if (cells == b->pixels) tps_move_rows(weights + number, size, net->classes, y, size, e);
        else
            for (unit = 0; unit < b->units; unit++, y += b->pixels, number += cells) {
                tps_map_features(b, y, of_map);
                tps_move_rows(weights + number, size, net->classes, of_map, cells, e);
            }
        return;
    }
#endif
    for (unit = 0; unit < b->units; unit++, y += b->pixels)
        for (i = 0; i < b->grid_rows; i++)
            for (j = 0; j < b->grid_columns; j++, number++) {
                for (n = 0; n < net->batch; n++)
                    f[n] = tps_mean(b, y + n * b->units * b->pixels, tps_cell_of(b, i, j));
                for (c = 0; c < net->classes; c++) {
                    for (g = 0.0f, n = 0; n < net->batch; n++) g += e[n * net->classes + c] * f[n];
                    tps_move(r, weights, number + c * b->codes->size, g);
                }
            }
}
#endif

/* dz of one unit for every sample; the loss of targets comes back. */
TPS_HOT float tps_unit(const tps_net *net, const tps_block *b, const float *weights, const float *y,
                       const tps_label *labels, uint32_t unit, float *dz)
{
    float loss = 0.0f;
    uint32_t n, numbers = b->units * b->pixels;
    for (n = 0; n < net->batch; n++, dz += b->pixels) {
        const float *own = y + n * numbers + unit * b->pixels;
        if (b->local == TPS_HEAD) *dz = *own;
#ifdef TPS_WITH_READOUT
        else if (b->local == TPS_READOUT)
            tps_read_back(b, weights, net->arena + net->logits + n * net->classes, unit, own, dz,
                          net->classes);
#endif
#ifdef TPS_WITH_TARGETS
        else loss += tps_towards_code(b, tps_truth_of(net, labels, n), unit, own, 1.0f / (float)net->batch, dz);
#endif
    }
    (void)labels;
    (void)weights;
    return loss;
}

#ifdef TPS_SGD
/* A dense block learns from one sample, eight units at a time. */
TPS_HOT float tps_learn_dense(const tps_net *net, const tps_block *b, const tps_rate *r, float *weights,
                              const float *x, const float *y, const tps_label *labels, uint32_t units)
{
    const uint32_t inputs = b->inputs;
    uint32_t unit, lanes, l;
    float loss = 0.0f, dz[8];
    for (unit = 0; unit < units; unit += lanes) {
        lanes = units - unit < 8 ? units - unit : 8;
#ifdef TPS_WITH_READOUT
        if (b->local == TPS_READOUT) {
            tps_feature_derivatives(b, weights, net->arena + net->logits, net->classes, unit, lanes, dz);
            for (l = 0; l < lanes; l++) dz[l] *= tps_slope(b, y[unit + l]);
        } else
#endif
            for (l = 0; l < lanes; l++) loss += tps_unit(net, b, weights, y, labels, unit + l, dz + l);
        for (l = 0; l < lanes; l++) {
            dz[l] *= r->lr;
            if (b->bias != TPS_NOWHERE) weights[b->bias + unit + l] -= dz[l];
        }
        tps_move_rows(weights + b->weight + unit * inputs, inputs, lanes, x, inputs, dz);
    }
    return loss;
}
#endif

/* Every unit of a block learns, one after another. */
TPS_HOT float tps_learn_units(const tps_net *net, const tps_block *b, const tps_rate *r, float *weights,
                              const float *x, const float *y, const tps_label *labels, uint32_t units)
{
    float loss = 0.0f, *dz = net->arena + net->dz;
    uint32_t unit;
    for (unit = 0; unit < units; unit++) {
        loss += tps_unit(net, b, weights, y, labels, unit, dz);
#ifdef TPS_WITH_CONVOLUTIONS
        if (b->convolution) tps_move_filter(b, r, weights, unit, x, dz, net->batch);
        else
#endif
            tps_move_dense(b, r, weights, unit, x, dz, net->batch);
    }
    return loss;
}

/* The loss of a batch whose outputs y are, but for that of targets; those of the last block become
 * derivatives. */
TPS_HOT float tps_block_loss(const tps_net *net, const tps_block *b, const float *weights, float *gains,
                             float *y, const tps_label *labels)
{
    uint32_t n;
    float loss = 0.0f, share = 1.0f / (float)net->batch;
    if (b->local == TPS_HEAD)
        for (n = 0; n < net->batch; n++)
            loss += tps_loss(b->loss, y + n * b->units, net->classes, tps_truth_of(net, labels, n), share) * share;
#ifdef TPS_WITH_READOUT
    if (b->local == TPS_READOUT) loss = tps_readout(net, b, weights, gains, y, labels);
#endif
    (void)weights;
    (void)gains;
    return loss;
}

/* One block learns from the batch whose outputs y are. */
TPS_HOT float tps_learn(const tps_net *net, const tps_block *b, const tps_rate *r, float *weights,
                        float *gains, const float *x, float *y, const tps_label *labels)
{
    const uint32_t units = b->local == TPS_HEAD ? net->classes : b->units;
    float loss = tps_block_loss(net, b, weights, gains, y, labels);
#ifdef TPS_SGD
    if (net->batch == 1 && !b->convolution)
        loss += tps_learn_dense(net, b, r, weights, x, y, labels, units);
    else
#endif
        loss += tps_learn_units(net, b, r, weights, x, y, labels, units);
#ifdef TPS_WITH_LEARNED_CODES
    if (b->learned != TPS_NOWHERE) tps_move_codes(net, b, r, weights, y);
#endif
    return loss;
}

TPS_FN int tps_refuse(const tps_net *net, const float *x, const tps_label *labels, float lr)
{
    TPS_ROW(tps_block, first, net->blocks);
    uint32_t n;
    if (!tps_usable(x, net->batch * first->inputs)) return TPS_BAD_INPUT;
    if (!tps_is_rate(lr)) return TPS_BAD_RATE;
    for (n = 0; n < net->batch; n++)
#ifdef TPS_WITH_NUMBERS
        if (!tps_usable(labels + n * net->classes, net->classes)) return TPS_BAD_LABEL;
#else
        if (labels[n] >= (net->classes == 1 ? 2u : net->classes)) return TPS_BAD_LABEL;
#endif
    return TPS_OK;
}

/* A block's part of a step: it learns if its bit in `learns` is set, and its output becomes x. A block
 * whose output is not finite does not learn, and ends the step. */
TPS_HOT int tps_pass(const tps_net *net, uint32_t i, float *weights, float *moments, float *ticks,
                     float *gains, const float **x, float *y, const tps_label *labels, float lr,
                     uint32_t learns, float *loss)
{
    TPS_ROW(tps_block, b, net->blocks + i);
    if (!tps_usable(y, net->batch * b->units * b->pixels)) return TPS_DIVERGED;
    if (b->local != TPS_FROZEN && learns >> i & 1u) {
#ifdef TPS_ADAM
        tps_rate r = tps_tick(lr, ticks + 2 * i, moments, net->params);
#else
        tps_rate r = {lr, 1.0f, moments, net->params};
#endif
        loss[i] = tps_learn(net, b, &r, weights, gains, *x, y, labels);
    }
    tps_pool_outputs(b, y, net->batch);
    (void)ticks;
    *x = y;
    return TPS_OK;
}

/* Every block with its bit in `learns` learns as the batch passes. */
TPS_FN int tps_step(const tps_net *net, float *weights, float *moments, float *ticks, float *gains,
                    const float *x, const tps_label *labels, float lr, uint32_t learns, float *loss)
{
    uint32_t i;
    int error = tps_refuse(net, x, labels, lr);
    if (error) return error;
    for (i = 0; i < net->count; i++) loss[i] = 0.0f;
    for (i = 0; i < net->count && !error; i++) {
        TPS_ROW(tps_block, b, net->blocks + i);
        float *y = tps_outputs(net, b, weights, x, net->batch);
        error = tps_pass(net, i, weights, moments, ticks, gains, &x, y, labels, lr, learns, loss);
    }
    return error;
}
