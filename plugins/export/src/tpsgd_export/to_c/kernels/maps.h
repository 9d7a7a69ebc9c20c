/* ---- feature maps: convolutions and pools, channels first ---- */

/* The first and the last + 1 of `count` places, `step` apart from `start` on, that are in [0, size) */
typedef struct { int32_t first, end; } tps_range;

TPS_FN tps_range tps_inside(int32_t start, int32_t step, int32_t count, int32_t size)
{
    tps_range r = {0, count};
    if (start < 0) r.first = (step - 1 - start) / step;
    if (start + (count - 1) * step >= size) r.end = size > start ? (size - 1 - start) / step + 1 : 0;
    return r;
}

/* y = sigma(x * W + b) of one sample */
TPS_FN void tps_convolve(const tps_block *b, const float *weights, const float *x, float *y)
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
TPS_FN float tps_weight_gradient(const tps_convolution *c, const float *map, const float *dz, int32_t u,
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
TPS_FN void tps_move_filter(const tps_block *b, const tps_rate *r, float *weights, uint32_t unit,
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
                    g += tps_weight_gradient(c, x + n * b->inputs + k * plane, dz + n * b->pixels, u, v);
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
