/* ---- blocks of several layers: what each layer reads and adds, and the way back inside of a block ---- */

#define TPS_SAMPLE (TPS_NOWHERE - 1u) /* the place of what the net reads */

/* A layer of a block: places in the arena, or TPS_NOWHERE */
typedef struct {
    uint32_t x, added; /* what it reads, and what is added to its output before the activation */
    uint32_t pooled;   /* its output after the pools; where the output is: they write over it */
    uint32_t error, error_of_x, error_of_added; /* derivatives */
    uint8_t clears; /* 1: those of x begin here, on the way back; 2: those of what is added */
} tps_row;

TPS_FN const float *tps_at(const tps_net *net, uint32_t place, const float *sample)
{
    return place == TPS_SAMPLE ? sample : net->arena + place;
}

/* Outputs of layer i for some samples, before the pools: what is added to them goes to their place first,
 * if it is not there. */
TPS_FN float *tps_row_outputs(const tps_net *net, const tps_row *row, uint32_t i, const float *weights,
                              const float *sample, uint32_t samples)
{
    const tps_block *b = net->blocks + i;
    float *y = net->arena + b->output;
    uint32_t k;
    if (b->adds && row->added != b->output) {
        const float *added = tps_at(net, row->added, sample);
        for (k = 0; k < samples * b->units * b->pixels; k++) y[k] = added[k];
    }
    return tps_outputs(net, b, weights, tps_at(net, row->x, sample), samples);
}

/* The pools of a layer, whose output stays as it is if a derivative has to pass them */
TPS_FN void tps_pool_row(const tps_net *net, const tps_row *row, const tps_block *b, uint32_t samples)
{
    float *y = net->arena + b->output;
#ifdef TPS_WITH_UNPOOL
    if (row->pooled != b->output) {
        const tps_pool *p = b->pool;
        float *to = net->arena + row->pooled;
        uint32_t k;
        int32_t i, j;
        for (k = 0; k < samples * b->units; k++, y += b->pixels)
            for (i = 0; i < p->out_rows; i++)
                for (j = 0; j < p->out_columns; j++) *to++ = tps_pool_window(p, y, tps_window_of(p, i, j));
        return;
    }
#endif
    (void)row;
    tps_pool_outputs(b, y, samples);
}

#ifdef TPS_WITH_CARRY
#ifdef TPS_WITH_UNPOOL
/* Derivatives of a map, from those of what a pool made of it: of equal numbers the first is the largest. */
TPS_FN void tps_unpool(const tps_pool *p, const float *map, const float *error, float *d)
{
    int32_t i, j, u, v, at;
    for (i = 0; i < (int32_t)p->rows * p->columns; i++) d[i] = 0.0f;
    for (i = 0; i < p->out_rows; i++)
        for (j = 0; j < p->out_columns; j++, error++) {
            const tps_window w = tps_window_of(p, i, j);
            const float share = *error / (float)((w.bottom - w.top) * (w.right - w.left));
            int32_t largest = w.top * p->columns + w.left;
            for (u = w.top; u < w.bottom; u++)
                for (v = w.left; v < w.right; v++) {
                    at = u * p->columns + v;
                    if (p->kind != TPS_POOL_MAX) d[at] += share;
                    else if (map[at] > map[largest]) largest = at;
                }
            if (p->kind == TPS_POOL_MAX) d[largest] += *error;
        }
}
#endif

/* dz of one unit of a layer inside of a block, for every sample */
TPS_FN void tps_row_unit(const tps_net *net, const tps_row *row, const tps_block *b, uint32_t unit, float *dz)
{
    const float *y = net->arena + b->output + unit * b->pixels;
    const float *e = net->arena + row->error + unit * (b->pooled / b->units);
    uint32_t n, i;
    for (n = 0; n < net->batch; n++, dz += b->pixels, y += b->units * b->pixels, e += b->pooled) {
#ifdef TPS_WITH_UNPOOL
        if (b->pools) tps_unpool(b->pool, y, e, dz);
        else
#endif
            for (i = 0; i < b->pixels; i++) dz[i] = e[i];
        for (i = 0; i < b->pixels; i++) dz[i] *= tps_slope(b, y[i]);
    }
}

/* Layer i on the way back, one unit after another: derivatives of what it reads, from weights that have
 * not moved yet, then the weights. The loss of targets comes back. */
TPS_FN float tps_learn_row(const tps_net *net, const tps_row *row, uint32_t i, const tps_rate *r, float *weights,
                           const float *sample, const tps_label *labels)
{
    const tps_block *b = net->blocks + i;
    const float *x = tps_at(net, row->x, sample), *y = net->arena + b->output;
    const uint32_t units = b->local == TPS_HEAD ? net->classes : b->units, numbers = b->units * b->pixels;
    float *dz = net->arena + net->dz, loss = 0.0f;
    float *of_x = row->error_of_x == TPS_NOWHERE ? 0 : net->arena + row->error_of_x;
    float *of_added = row->error_of_added == TPS_NOWHERE ? 0 : net->arena + row->error_of_added;
    uint32_t unit, n, k;
    for (k = 0; k < net->batch * b->inputs && row->clears & 1u; k++) of_x[k] = 0.0f;
    for (k = 0; k < net->batch * numbers && row->clears & 2u; k++) of_added[k] = 0.0f;
    for (unit = 0; unit < units; unit++) {
        if (row->error != TPS_NOWHERE) tps_row_unit(net, row, b, unit, dz);
        else loss += tps_unit(net, b, weights, y, labels, unit, dz);
        for (n = 0; n < net->batch; n++) {
            const float *d = dz + n * b->pixels;
            for (k = 0; k < b->pixels && of_added; k++) of_added[n * numbers + unit * b->pixels + k] += d[k];
            if (!of_x) continue;
#ifdef TPS_WITH_CONVOLUTIONS
            if (b->convolution) tps_carry_filter(b, weights, unit, d, of_x + n * b->inputs);
            else
#endif
                tps_carry_unit(b, weights, unit, *d, of_x + n * b->inputs);
        }
#ifdef TPS_WITH_CONVOLUTIONS
        if (b->convolution) tps_move_filter(b, r, weights, unit, x, dz, net->batch);
        else
#endif
            tps_move_dense(b, r, weights, unit, x, dz, net->batch);
    }
    return loss;
}

/* A block of the layers from `first` up to `end` learns from the loss of its output. */
TPS_FN float tps_learn_rows(const tps_net *net, const tps_row *rows, uint32_t first, uint32_t end,
                            const tps_rate *r, float *weights, float *gains, const float *sample,
                            const tps_label *labels)
{
    const tps_block *b = net->blocks + end - 1;
    float *y = net->arena + b->output, loss = tps_block_loss(net, b, weights, gains, y, labels);
    uint32_t i;
    for (i = end; i-- > first;) loss += tps_learn_row(net, rows + i, i, r, weights, sample, labels);
#ifdef TPS_WITH_LEARNED_CODES
    if (b->learned != TPS_NOWHERE) tps_move_codes(net, b, r, weights, y);
#endif
    return loss;
}
#endif

/* The part of a block in a step, its layers those from `first` up to `end`: `tps_pass` */
TPS_FN int tps_pass_rows(const tps_net *net, const tps_row *rows, uint32_t first, uint32_t end, int learns,
                         float *weights, float *moments, float *ticks, float *gains, const float *sample,
                         const tps_label *labels, float lr, float *loss)
{
    const tps_block *b = net->blocks + end - 1;
    uint32_t i;
    for (i = first; i < end; i++) {
        const tps_block *own = net->blocks + i;
        float *y = tps_row_outputs(net, rows + i, i, weights, sample, net->batch);
        if (!tps_usable(y, net->batch * own->units * own->pixels)) return TPS_DIVERGED;
        if (i + 1 < end) tps_pool_row(net, rows + i, own, net->batch);
    }
    if (b->local != TPS_FROZEN && learns) {
#ifdef TPS_ADAM
        tps_rate r = tps_tick(lr, ticks, moments, net->params);
#else
        tps_rate r = {lr, 1.0f, moments, net->params};
#endif
#ifdef TPS_WITH_CARRY
        if (end - first > 1) *loss = tps_learn_rows(net, rows, first, end, &r, weights, gains, sample, labels);
        else
#endif
            *loss = tps_learn(net, b, &r, weights, gains, tps_at(net, rows[first].x, sample),
                              net->arena + b->output, labels);
    }
    tps_pool_row(net, rows + end - 1, b, net->batch);
    (void)ticks;
    return TPS_OK;
}
