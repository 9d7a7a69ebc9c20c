/* ---- feature maps: convolutions and pools, channels first ---- */

/* The input of weight (u, v) at output pixel (i, j), or -1 in the padding */
TPS_FN int32_t tps_pixel(const tps_convolution *c, int32_t i, int32_t j, int32_t u, int32_t v)
{
    int32_t row = i * c->stride_rows - c->pad_rows + u * c->step_rows;
    int32_t column = j * c->stride_columns - c->pad_columns + v * c->step_columns;
    if (row < 0 || row >= c->rows || column < 0 || column >= c->columns) return -1;
    return row * c->columns + column;
}

/* y = sigma(x * W + b) of one sample */
TPS_FN void tps_convolve(const tps_block *b, const float *weights, const float *x, float *y)
{
    const tps_convolution *c = b->convolution;
    int32_t channels = c->channels / c->groups, plane = c->rows * c->columns, i, j, k, u, v, at;
    uint32_t unit;
    for (unit = 0; unit < b->units; unit++) {
        const float *w = weights + b->weight + unit * b->fan_in;
        const float *maps = x + (int32_t)(unit / (b->units / c->groups)) * channels * plane;
        for (i = 0; i < c->out_rows; i++)
            for (j = 0; j < c->out_columns; j++) {
                const float *weight = w;
                float z = 0.0f;
                for (k = 0; k < channels; k++)
                    for (u = 0; u < c->kernel_rows; u++)
                        for (v = 0; v < c->kernel_columns; v++, weight++)
                            if ((at = tps_pixel(c, i, j, u, v)) >= 0) z += *weight * maps[k * plane + at];
                if (b->bias != TPS_NOWHERE) z += weights[b->bias + unit];
                *y++ = tps_activate(b, z);
            }
    }
}

/* The weights and the bias of one filter; dz: a map for every sample of the batch */
TPS_FN void tps_move_filter(const tps_block *b, const tps_rate *r, float *weights, uint32_t unit,
                            const float *x, const float *dz, uint32_t batch)
{
    const tps_convolution *c = b->convolution;
    int32_t channels = c->channels / c->groups, plane = c->rows * c->columns, i, j, k, u, v, at;
    uint32_t n, place = b->weight + unit * b->fan_in;
    float g;
    x += (int32_t)(unit / (b->units / c->groups)) * channels * plane;
    for (k = 0; k < channels; k++)
        for (u = 0; u < c->kernel_rows; u++)
            for (v = 0; v < c->kernel_columns; v++, place++) {
                for (g = 0.0f, n = 0; n < batch; n++) {
                    const float *map = x + n * b->inputs + k * plane, *d = dz + n * b->pixels;
                    for (i = 0; i < c->out_rows; i++)
                        for (j = 0; j < c->out_columns; j++, d++)
                            if ((at = tps_pixel(c, i, j, u, v)) >= 0) g += *d * map[at];
                }
                tps_move(r, weights, place, g);
            }
    if (b->bias == TPS_NOWHERE) return;
    for (g = 0.0f, n = 0; n < batch * b->pixels; n++) g += dz[n];
    tps_move(r, weights, b->bias + unit, g);
}

#ifdef TPS_WITH_POOLS
typedef struct { int32_t top, bottom, left, right; } tps_window;

TPS_FN tps_window tps_window_of(const tps_pool *p, int32_t i, int32_t j)
{
    tps_window w;
    if (p->kind == TPS_POOL_CELLS) {
        w.top = i * p->rows / p->out_rows;
        w.bottom = ((i + 1) * p->rows + p->out_rows - 1) / p->out_rows;
        w.left = j * p->columns / p->out_columns;
        w.right = ((j + 1) * p->columns + p->out_columns - 1) / p->out_columns;
    } else {
        w.top = i * p->stride_rows;
        w.bottom = w.top + p->kernel_rows;
        w.left = j * p->stride_columns;
        w.right = w.left + p->kernel_columns;
    }
    return w;
}

TPS_FN float tps_pool_window(const tps_pool *p, const float *map, tps_window w)
{
    float sum = 0.0f, largest = map[w.top * p->columns + w.left];
    int32_t i, j;
    for (i = w.top; i < w.bottom; i++)
        for (j = w.left; j < w.right; j++) {
            float y = map[i * p->columns + j];
            sum += y;
            if (y > largest) largest = y;
        }
    if (p->kind == TPS_POOL_MAX) return largest;
    return sum / (float)((w.bottom - w.top) * (w.right - w.left));
}
#endif
