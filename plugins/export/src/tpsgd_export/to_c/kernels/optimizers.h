/* ---- optimizers: a parameter moves as soon as its gradient is there; no gradient is stored ---- */

/* What a block's optimizer needs in this step; moments lie `params` behind one another */
typedef struct { float lr, scale; float *moments; uint32_t params; } tps_rate;

#if defined(TPS_ADAM)
/* `ticks`: 1 - beta^t of both moments, by recursion: the power would lose five digits */
TPS_FN tps_rate tps_tick(float lr, float *ticks, float *moments, uint32_t params)
{
    tps_rate r;
    ticks[0] = 0.9f * ticks[0] + 0.1f;
    ticks[1] = 0.999f * ticks[1] + 0.001f;
    r.lr = lr / ticks[0];
    r.scale = 1.0f / tps_sqrt(ticks[1]);
    r.moments = moments;
    r.params = params;
    return r;
}

TPS_HOT void tps_move(const tps_rate *r, float *weights, uint32_t i, float g)
{
    float *m = r->moments + i, *v = m + r->params;
    *m += (g - *m) * 0.1f;
    *v = 0.999f * *v + 0.001f * g * g;
    weights[i] -= r->lr * *m / (tps_sqrt(*v) * r->scale + 1e-8f);
}
#elif defined(TPS_MOMENTUM)
TPS_HOT void tps_move(const tps_rate *r, float *weights, uint32_t i, float g)
{
    r->moments[i] = 0.9f * r->moments[i] + g;
    weights[i] -= r->lr * r->moments[i];
}
#else
#define TPS_SGD
TPS_HOT void tps_move(const tps_rate *r, float *weights, uint32_t i, float g)
{
    weights[i] -= r->lr * g;
}
#endif
