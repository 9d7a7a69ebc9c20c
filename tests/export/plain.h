/* The kernels written plainly: one row, one filter, one weight and one sample after another. Put in
 * front of the net's functions, they take the place of the fast ones, for every optimizer. */

/* y = sigma(W x + b) of one sample */
TPS_FN void plain_dense(const tps_block *b, const float *weights, const float *x, float *y)
{
    const float *w = weights + b->weight;
    uint32_t unit, k;
    for (unit = 0; unit < b->units; unit++, w += b->inputs) {
        float z = 0.0f;
        for (k = 0; k < b->inputs; k++) z += w[k] * x[k];
        if (b->bias != TPS_NOWHERE) z += weights[b->bias + unit];
        y[unit] = tps_activate(b, z);
    }
}

#define tps_dense plain_dense

#ifdef TPS_WITH_CONVOLUTIONS
/* y = sigma(x * W + b) of one sample */
TPS_FN void plain_convolve(const tps_block *b, const float *weights, const float *x, float *y)
{
    const tps_convolution *c = b->convolution;
    int32_t channels = c->channels / c->groups, plane = c->rows * c->columns, i, j, k, u, v;
    int32_t across = c->kernel_columns, step = c->step_columns;
    uint32_t unit;
    for (unit = 0; unit < b->units; unit++) {
        const float *w = weights + b->weight + unit * b->fan_in;
        const float *maps = x + (int32_t)(unit / (b->units / c->groups)) * channels * plane;
        float bias = b->bias == TPS_NOWHERE ? 0.0f : weights[b->bias + unit];
        for (i = 0; i < c->out_rows; i++) {
            int32_t top = i * c->stride_rows - c->pad_rows, left = -(int32_t)c->pad_columns;
            tps_range rows = tps_inside(top, c->step_rows, c->kernel_rows, c->rows);
            for (j = 0; j < c->out_columns; j++, left += c->stride_columns) {
                tps_range columns = tps_inside(left, step, across, c->columns);
                float z = 0.0f;
                for (k = 0; k < channels; k++)
                    for (u = rows.first; u < rows.end; u++) {
                        const float *weight = w + (k * c->kernel_rows + u) * across;
                        int32_t at = k * plane + (top + u * c->step_rows) * c->columns + left;
                        for (v = columns.first; v < columns.end; v++) z += weight[v] * maps[at + v * step];
                    }
                *y++ = tps_activate(b, z + bias);
            }
        }
    }
}

/* The gradient of weight (u, v) of a filter, from one sample's dz and the map that it reads */
TPS_FN float plain_weight_gradient(const tps_convolution *c, const float *map, const float *dz, int32_t u,
                                 int32_t v)
{
    int32_t top = u * c->step_rows - c->pad_rows, left = v * c->step_columns - c->pad_columns, i, j;
    tps_range rows = tps_inside(top, c->stride_rows, c->out_rows, c->rows);
    tps_range columns = tps_inside(left, c->stride_columns, c->out_columns, c->columns);
    float g = 0.0f;
    for (i = rows.first; i < rows.end; i++) {
        const float *d = dz + i * c->out_columns;
        int32_t at = (top + i * c->stride_rows) * c->columns + left;
        for (j = columns.first; j < columns.end; j++) g += d[j] * map[at + j * c->stride_columns];
    }
    return g;
}

/* The weights and the bias of one filter; dz: a map for every sample of the batch */
TPS_FN void plain_move_filter(const tps_block *b, const tps_rate *r, float *weights, uint32_t unit,
                            const float *x, const float *dz, uint32_t batch)
{
    const tps_convolution *c = b->convolution;
    int32_t channels = c->channels / c->groups, plane = c->rows * c->columns, k, u, v;
    uint32_t n, place = b->weight + unit * b->fan_in;
    float g;
    x += (int32_t)(unit / (b->units / c->groups)) * channels * plane;
    for (k = 0; k < channels; k++)
        for (u = 0; u < c->kernel_rows; u++)
            for (v = 0; v < c->kernel_columns; v++, place++) {
                for (g = 0.0f, n = 0; n < batch; n++)
                    g += plain_weight_gradient(c, x + n * b->inputs + k * plane, dz + n * b->pixels, u, v);
                tps_move(r, weights, place, g);
            }
    if (b->bias == TPS_NOWHERE) return;
    for (g = 0.0f, n = 0; n < batch * b->pixels; n++) g += dz[n];
    tps_move(r, weights, b->bias + unit, g);
}
#define tps_convolve plain_convolve
#define tps_move_filter plain_move_filter
#endif

#ifdef TPS_WITH_READOUT
/* e: the logits of one sample, gain * P f(y) */
TPS_FN void plain_read_out(const tps_block *b, const float *weights, float gain, const float *y, float *e,
                         uint32_t classes)
{
    uint32_t unit, i, j, c, n = 0;
    for (c = 0; c < classes; c++) e[c] = 0.0f;
    for (unit = 0; unit < b->units; unit++, y += b->pixels)
        for (i = 0; i < b->grid_rows; i++)
            for (j = 0; j < b->grid_columns; j++, n++) {
                float f = tps_mean(b, y, tps_cell_of(b, i, j));
                for (c = 0; c < classes; c++) e[c] += f * tps_code_now(b, weights, c, n);
            }
    for (c = 0; c < classes; c++) e[c] *= gain;
}

/* dz of one unit of one sample, from e, the derivative with respect to P f(y) */
TPS_FN void plain_read_back(const tps_block *b, const float *weights, const float *e, uint32_t unit,
                          const float *y, float *dz, uint32_t classes)
{
    uint32_t i, j, k, l, c, n = unit * b->grid_rows * b->grid_columns;
    for (i = 0; i < b->pixels; i++) dz[i] = 0.0f;
    for (i = 0; i < b->grid_rows; i++)
        for (j = 0; j < b->grid_columns; j++, n++) {
            tps_cell cell = tps_cell_of(b, i, j);
            float df = 0.0f;
            for (c = 0; c < classes; c++) df += e[c] * tps_code_now(b, weights, c, n);
            if (b->pixels > 1) df /= (float)((cell.bottom - cell.top) * (cell.right - cell.left));
            for (k = cell.top; k < cell.bottom; k++)
                for (l = cell.left; l < cell.right; l++) dz[k * b->columns + l] += df;
        }
    for (i = 0; i < b->pixels; i++) dz[i] *= tps_slope(b, y[i]);
}
#define tps_read_out plain_read_out
#define tps_read_back plain_read_back
#endif

#undef TPS_SGD /* one unit after another, as with every optimizer */
