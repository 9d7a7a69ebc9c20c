/* ---- recurrent layers: a sequence is read one time step at a time, and nothing grows with it ----
 *
 * A layer's gradients are sums over time steps in which its old states count as inputs; the weights
 * move after the last step. */

enum { TPS_MEASURED = 7, TPS_BAD_ORDER = 8 };
enum { TPS_READY, TPS_LOOKING, TPS_LEARNING, TPS_ENDED };
enum { TPS_LAST, TPS_MEAN, TPS_EVERY }; /* where in time the loss of a diagonal layer looks */

typedef struct {
    uint32_t states;
    uint8_t loss_at, feeds; /* feeds: the next layer reads its output at every step */
    uint32_t x, h, traces, lambda, mean; /* places in the arena; traces: TPS_NOWHERE if it is frozen */
} tps_diagonal;

typedef struct {
    const tps_block *block;         /* inputs, units, local loss; `output`: its state in the arena */
    uint32_t weight_h, bias_h;      /* places among the weights, as those of the block */
    uint32_t params, summed, sums;  /* how many parameters, and sums of gradients; their place */
    float leak;
    uint8_t per_step;               /* class codes of their own for every time step */
    uint64_t seed, key;             /* from which those follow */
    const tps_diagonal *diagonal;   /* or 0: a cell */
} tps_layer;

#ifndef TPS_PROGRESS
#define TPS_PROGRESS
typedef struct { /* how far a sequence has been read */
    uint32_t mode, steps, label, blocks, error, measures;
} tps_progress;
#endif

typedef struct {
    const tps_layer *layers;
    uint32_t count;   /* of recurrent layers */
    uint32_t scratch; /* place in the arena */
    tps_net head;     /* the layers after them */
} tps_reader;

/* Where the stream of a class starts at a time step */
TPS_FN uint64_t tps_stream(uint64_t seed, uint64_t key, uint64_t step, uint64_t member)
{
    uint64_t z = tps_mix(seed + TPS_GOLDEN);
    z = tps_mix((z ^ key) + TPS_GOLDEN);
    z = tps_mix((z ^ step) + TPS_GOLDEN);
    return tps_mix((z ^ member) + TPS_GOLDEN);
}

TPS_FN float tps_square_mean(const float *y, uint32_t count)
{
    uint32_t i;
    float sum = 0.0f;
    for (i = 0; i < count; i++) sum += y[i] * y[i];
    return sum / (float)count;
}

TPS_FN float tps_gain(const tps_block *b, const float *gains)
{
    return b->slot == TPS_NOWHERE ? b->gain : gains[b->slot];
}

TPS_FN void tps_calibrate(const tps_block *b, float *gains, float mean_square)
{
    float rms = tps_sqrt(mean_square);
    gains[b->slot] = b->target / (rms > 0.0f ? rms : 1.0f);
}

/* A local loss at one time step */
typedef struct {
    const tps_block *block;
    tps_codes codes; /* of this step; `label`: the row of the class in them */
    const float *weights;
    uint32_t label, classes;
    uint64_t stream;
    float *e, loss;
} tps_local;

/* Numbers of a layer's codes that learn; their sums of gradients lie behind the others. */
TPS_FN uint32_t tps_learned_codes(const tps_layer *layer, uint32_t classes)
{
#ifdef TPS_WITH_LEARNED_CODES
    if (layer->block->learned != TPS_NOWHERE) return classes * layer->block->units;
#endif
    (void)layer;
    (void)classes;
    return 0;
}

/* Adds this step's e y^T to the sums. */
TPS_FN void tps_sum_codes(const tps_layer *layer, const tps_local *l, const float *y, float *sums)
{
    uint32_t c, k;
    if (!tps_learned_codes(layer, l->classes)) return;
    for (sums += layer->summed, c = 0; c < l->classes; c++)
        for (k = 0; k < layer->block->units; k++) *sums++ += l->e[c] * y[k];
}

/* The local loss of y; readouts put the derivatives of their logits into l->e. */
TPS_FN void tps_look_at(tps_local *l, const tps_reader *r, const tps_layer *layer, const float *weights,
                        const float *gains, const float *y, uint32_t label, uint32_t step)
{
    const tps_block *b = layer->block;
    l->block = b;
    l->codes = *b->codes;
    l->weights = weights;
    l->label = label;
    l->classes = r->head.classes;
    l->e = r->head.arena + r->head.logits;
    l->loss = 0.0f;
    if (layer->per_step) {
        l->stream = tps_stream(layer->seed, layer->key, step, label);
        l->codes.streams = &l->stream;
        l->label = 0;
    }
#ifdef TPS_WITH_READOUT
    if (b->local == TPS_READOUT) {
        float gain = tps_gain(b, gains);
        tps_read_out(b, weights, gain, y, l->e, l->classes);
        l->loss = tps_loss(b->loss, l->e, l->classes, label, gain);
    }
#endif
    (void)weights;
    (void)gains;
    (void)y;
}

/* The derivative of that loss with respect to output i; the loss of targets is added up. */
TPS_FN float tps_pull(tps_local *l, uint32_t i, float y)
{
    float dy = 0.0f, code, rest;
    if (l->block->local == TPS_READOUT) {
        uint32_t c;
        for (c = 0; c < l->classes; c++) dy += l->e[c] * tps_code_now(l->block, l->weights, c, i);
        return dy;
    }
    code = tps_code(&l->codes, l->label, i);
    rest = y - code;
    if (l->block->local == TPS_L2) {
        l->loss += 0.5f * rest * rest;
        return rest;
    }
    if (l->block->local == TPS_L1) {
        dy = rest > 0.0f ? 1.0f : rest < 0.0f ? -1.0f : 0.0f;
        l->loss += rest * dy;
        return dy;
    }
    l->loss -= y * code;
    return -code;
}

#ifdef TPS_WITH_CELLS
/* c = sigma(W_X x + W_H h + b), new = (1 - leak) h + leak c */
TPS_FN void tps_cell_state(const tps_layer *layer, const float *weights, const float *x, const float *h,
                           float *c, float *new_h)
{
    const tps_block *b = layer->block;
    const float *w_x = weights + b->weight, *w_h = weights + layer->weight_h;
    float leak = layer->leak;
    uint32_t unit, k;
    for (unit = 0; unit < b->units; unit++, w_x += b->inputs, w_h += b->units) {
        float z = 0.0f, rest;
        for (k = 0; k < b->inputs; k++) z += TPS_OF(b, w_x + k) * x[k];
        if (b->bias != TPS_NOWHERE)
            z += TPS_OF(b, weights + (b->bias + unit)) + TPS_OF(b, weights + (layer->bias_h + unit));
        for (k = 0; k < b->units; k++) z += TPS_OF(b, w_h + k) * h[k];
        c[unit] = tps_activate(b, z);
        rest = c[unit] - h[unit];
        new_h[unit] = leak < 0.5f ? h[unit] + leak * rest : c[unit] - (1.0f - leak) * rest;
    }
}

/* Adds this step's gradients to the sums: d x^T, d h^T, d, with d = dL/dnew * leak * sigma'. */
TPS_FN void tps_cell_learn(const tps_layer *layer, tps_local *l, const float *x, const float *h,
                           const float *c, const float *new_h, float *sums)
{
    const tps_block *b = layer->block;
    float *of_x = sums, *of_h = of_x + b->units * b->inputs, *of_bias = of_h + b->units * b->units;
    uint32_t unit, k;
    for (unit = 0; unit < b->units; unit++, of_x += b->inputs, of_h += b->units) {
        float d = tps_pull(l, unit, new_h[unit]) * tps_slope(b, c[unit]) * layer->leak;
        for (k = 0; k < b->inputs; k++) of_x[k] += d * x[k];
        for (k = 0; k < b->units; k++) of_h[k] += d * h[k];
        if (b->bias != TPS_NOWHERE) of_bias[unit] += d;
    }
    tps_sum_codes(layer, l, new_h, sums);
}
#endif
