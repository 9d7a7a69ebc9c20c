/* ---- a recurrent net: read a time step, look, and learn after the last step ---- */

/* Weights in flash, of a layer that does not learn, or those that do */
TPS_FN const float *tps_weights_of(const tps_layer *layer, const float *weights)
{
    const tps_block *b = layer->block;
    return (b->fixed ? b->fixed : weights) + (layer->diagonal ? b->weight : 0u);
}

/* Whether the size of a layer's outputs must be measured before it can learn. A loss of the last
 * output alone is measured after the last step, just before the layer learns. */
TPS_FN int tps_unmeasured(const tps_layer *layer, const float *gains)
{
    const tps_block *b = layer->block;
    int at_end = layer->diagonal && layer->diagonal->loss_at == TPS_LAST;
    return b->local != TPS_FROZEN && !at_end && b->slot != TPS_NOWHERE && gains[b->slot] == 0.0f;
}

#ifdef TPS_WITH_CELLS
TPS_FN void tps_cell_step(const tps_reader *r, const tps_layer *layer, const float *weights,
                          const float *gains, const float *x, const tps_progress *p, uint32_t learns,
                          float *loss)
{
    const tps_block *b = layer->block;
    float *h = r->head.arena + b->output, *c = r->head.arena + r->scratch, *new_h = c + b->units;
    uint32_t unit;
    tps_cell_state(layer, weights, x, h, c, new_h);
    if (learns && p->measures) {
        *loss += tps_square_mean(new_h, b->units);
    } else if (learns) {
        tps_local l;
        tps_look_at(&l, r, layer, weights, gains, new_h, p->label, p->steps);
        tps_cell_learn(layer, &l, x, h, c, new_h, r->head.arena + layer->sums);
        *loss += l.loss;
    }
    for (unit = 0; unit < b->units; unit++) h[unit] = new_h[unit];
}
#endif

/* One time step through all recurrent layers */
TPS_FN void tps_time_step(const tps_reader *r, const float *weights, const float *gains, const float *x,
                          tps_progress *p, float *loss)
{
    uint32_t i;
    for (i = 0; i < r->count; i++) {
        const tps_layer *layer = r->layers + i;
        const float *w = tps_weights_of(layer, weights);
        uint32_t learns = p->blocks >> i & (layer->block->local != TPS_FROZEN);
#ifdef TPS_WITH_DIAGONAL
        if (layer->diagonal) tps_diagonal_step(r, layer, w, gains, x, p, learns, loss + i);
#endif
#ifdef TPS_WITH_CELLS
        if (!layer->diagonal) tps_cell_step(r, layer, w, gains, x, p, learns, loss + i);
#endif
        x = r->head.arena + layer->block->output;
    }
    p->steps++;
}

/* A sequence begins: `count` numbers of the arena are the states and sums. */
TPS_FN void tps_start(float *arena, uint32_t count, tps_progress *p, float *loss, uint32_t blocks)
{
    uint32_t i;
    for (i = 0; i < count; i++) arena[i] = 0.0f;
    for (i = 0; i < blocks; i++) loss[i] = 0.0f;
    p->mode = TPS_READY;
    p->steps = p->label = p->blocks = p->error = p->measures = 0;
}

/* An error stays until the next sequence begins. */
TPS_FN int tps_fail(tps_progress *p, int error)
{
    p->error = (uint32_t)error;
    return error;
}

/* One time step without learning */
TPS_FN int tps_look(const tps_reader *r, const float *weights, const float *x, tps_progress *p,
                    float *loss)
{
    if (p->error) return (int)p->error;
    if (p->mode > TPS_LOOKING) return tps_fail(p, TPS_BAD_ORDER);
    if (!tps_usable(x, r->layers->block->inputs)) return tps_fail(p, TPS_BAD_INPUT);
    p->mode = TPS_LOOKING;
    tps_time_step(r, weights, 0, x, p, loss);
    return TPS_OK;
}

/* One time step, from which the layers in `blocks` learn; all steps have the same label and blocks. */
TPS_FN int tps_read(const tps_reader *r, const float *weights, const float *gains, const float *x,
                    uint32_t label, uint32_t blocks, tps_progress *p, float *loss)
{
    uint32_t i;
    if (p->error) return (int)p->error;
    if (label >= (r->head.classes == 1 ? 2u : r->head.classes)) return tps_fail(p, TPS_BAD_LABEL);
    if (!tps_usable(x, r->layers->block->inputs)) return tps_fail(p, TPS_BAD_INPUT);
    if (p->mode == TPS_READY) {
        p->mode = TPS_LEARNING;
        p->label = label;
        p->blocks = blocks;
        for (i = 0; i < r->count; i++)
            if (blocks >> i & 1u && tps_unmeasured(r->layers + i, gains)) p->measures = 1;
    }
    if (p->mode != TPS_LEARNING || p->label != label || p->blocks != blocks)
        return tps_fail(p, TPS_BAD_ORDER);
    tps_time_step(r, weights, gains, x, p, loss);
    return TPS_OK;
}

/* The output of the last recurrent layer, or 0 if a number in it has grown beyond use */
TPS_FN const float *tps_last_output(const tps_reader *r, const float *weights, const tps_progress *p)
{
    const tps_layer *last = r->layers + r->count - 1;
    const float *y = r->head.arena + last->block->output;
#ifdef TPS_WITH_DIAGONAL
    if (last->diagonal) tps_diagonal_output(r, last, tps_weights_of(last, weights), p);
#endif
    (void)weights;
    (void)p;
    return tps_usable(y, last->block->units) ? y : 0;
}

/* The logits after the steps that have been read */
TPS_FN int tps_logits(const tps_reader *r, const float *weights, const tps_progress *p, float *logits)
{
    const float *y;
    if (p->error) return (int)p->error;
    if (!p->steps || p->mode == TPS_ENDED) return TPS_BAD_ORDER;
    y = tps_last_output(r, weights, p);
    if (!y || tps_forward(&r->head, weights, y, logits)) return TPS_DIVERGED;
    return TPS_OK;
}

/* The layers whose outputs this sequence has measured can learn from the next. */
TPS_FN int tps_measured(const tps_reader *r, float *gains, const tps_progress *p, float *loss)
{
    uint32_t i;
    for (i = 0; i < r->count; i++) {
        const tps_layer *layer = r->layers + i;
        if (p->blocks >> i & 1u && tps_unmeasured(layer, gains))
            tps_calibrate(layer->block, gains, loss[i] / (float)p->steps);
        loss[i] = 0.0f;
    }
    return TPS_MEASURED;
}

/* A layer's weights move by the means over time of its gradients. */
TPS_FN void tps_move_layer(const tps_layer *layer, const tps_rate *r, float *weights, const float *sums,
                           uint32_t codes, float share)
{
    uint32_t i, shared = layer->params - layer->summed; /* both biases of a cell have one sum */
    for (i = 0; i < layer->params; i++)
        tps_move(r, weights, layer->block->weight + i,
                 sums[i < layer->summed ? i : i - shared] * share);
    for (i = 0; i < codes; i++)
        tps_move(r, weights, layer->block->learned + i, sums[layer->summed + i] * share);
}

/* Gradients of all layers that learn, in their sums; whether all numbers can be used */
TPS_FN int tps_gradients(const tps_reader *r, const float *weights, float *gains, const tps_progress *p,
                         float *loss)
{
    uint32_t i;
    for (i = 0; i < r->count; i++) {
        const tps_layer *layer = r->layers + i;
        uint32_t codes = tps_learned_codes(layer, r->head.classes);
        if (layer->block->local == TPS_FROZEN || !(p->blocks >> i & 1u)) continue;
#ifdef TPS_WITH_DIAGONAL
        if (layer->diagonal) {
            const float *w = tps_weights_of(layer, weights);
            tps_diagonal_gradients(r, layer, w, gains, p, loss + i);
        }
#endif
        if (!layer->diagonal || layer->diagonal->loss_at == TPS_EVERY) loss[i] /= (float)p->steps;
        if (!tps_usable(r->head.arena + layer->sums, layer->summed + codes)) return 0;
    }
    (void)weights;
    (void)gains;
    return tps_usable(loss, r->count);
}

/* Whether the layers after the recurrent ones give numbers that can be used */
TPS_FN int tps_head_usable(const tps_reader *r, const float *weights, const float *x)
{
    uint32_t i;
    for (i = 0; i < r->head.count; i++) {
        const tps_block *b = r->head.blocks + i;
        float *y = tps_outputs(&r->head, b, weights, x, 1);
        if (!tps_usable(y, b->units)) return 0;
        x = y;
    }
    return 1;
}

TPS_FN void tps_move_layers(const tps_reader *r, float *weights, float *moments, float *ticks, float lr,
                            const tps_progress *p)
{
    uint32_t i;
    for (i = 0; i < r->count; i++) {
        const tps_layer *layer = r->layers + i;
        int at_end = layer->diagonal && layer->diagonal->loss_at == TPS_LAST;
        float share = at_end ? 1.0f : 1.0f / (float)p->steps;
        if (layer->block->local != TPS_FROZEN && p->blocks >> i & 1u) {
#ifdef TPS_ADAM
            tps_rate rate = tps_tick(lr, ticks + 2 * i, moments, r->head.params);
#else
            tps_rate rate = {lr, 1.0f, moments, r->head.params};
#endif
            tps_move_layer(layer, &rate, weights, r->head.arena + layer->sums,
                           tps_learned_codes(layer, r->head.classes), share);
        }
    }
    (void)ticks;
}

/* The sequence has ended: weights move, if every number on the way can be used. */
TPS_FN int tps_finish(const tps_reader *r, float *weights, float *moments, float *ticks, float *gains,
                      uint16_t label, float lr, uint32_t blocks, tps_progress *p, float *loss)
{
    const float *y;
    if (p->error) return (int)p->error;
    if (!tps_is_rate(lr)) return tps_fail(p, TPS_BAD_RATE);
    if (p->mode != TPS_LEARNING || p->label != label || p->blocks != blocks)
        return tps_fail(p, TPS_BAD_ORDER);
    p->mode = TPS_ENDED;
    if (p->measures) return tps_measured(r, gains, p, loss);
    y = tps_last_output(r, weights, p);
    if (!y || !tps_head_usable(r, weights, y) || !tps_gradients(r, weights, gains, p, loss))
        return tps_fail(p, TPS_DIVERGED);
    tps_move_layers(r, weights, moments, ticks, lr, p);
#ifdef TPS_ADAM
    ticks += 2 * r->count;
#endif
    return tps_step(&r->head, weights, moments, ticks, gains, y, &label, lr, blocks >> r->count,
                    loss + r->count);
}
