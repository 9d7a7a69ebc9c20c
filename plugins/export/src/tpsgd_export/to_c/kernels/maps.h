/* ---- feature maps: convolutions and pools, channels first ---- */

/* The first and the last + 1 of `count` places, `step` apart from `start` on, that are in [0, size) */
typedef struct { int32_t first, end; } tps_range;

TPS_HOT tps_range tps_inside(int32_t start, int32_t step, int32_t count, int32_t size)
{
    tps_range r = {0, count};
    if (start < 0) r.first = (step - 1 - start) / step;
    if (start + (count - 1) * step >= size) r.end = size > start ? (size - 1 - start) / step + 1 : 0;
    if (r.end < r.first) r.end = r.first;
    return r;
}

/* What lies inside of the window that an output reads, in every map of its group */
typedef struct {
    const float *x;           /* the first pixel */
    int32_t rows, columns;    /* of weights that have a pixel */
    int32_t first, skip, gap; /* weights before them, after a row of them, and after the last row */
} tps_window_inside;

TPS_HOT tps_window_inside tps_window_at(const tps_convolution *c, const float *x, int32_t i, int32_t j)
{
    const int32_t top = i * c->stride_rows - c->pad_rows, left = j * c->stride_columns - c->pad_columns;
    const tps_range rows = tps_inside(top, c->step_rows, c->kernel_rows, c->rows);
    const tps_range columns = tps_inside(left, c->step_columns, c->kernel_columns, c->columns);
    tps_window_inside w;
    w.x = x + (top + rows.first * c->step_rows) * c->columns + left + columns.first * c->step_columns;
    w.rows = rows.end - rows.first;
    w.columns = columns.end - columns.first;
    w.first = rows.first * c->kernel_columns + columns.first;
    w.skip = c->kernel_columns - w.columns;
    w.gap = (c->kernel_rows - w.rows) * c->kernel_columns;
    return w;
}

/* z: sums of four filters over a window, each in the order of its weights */
TPS_HOT void tps_four_filters(const tps_convolution *c, const tps_window_inside *at, const float *map,
                              const float *w, int32_t fan_in, float *z)
{
    const float *w1 = w + fan_in, *w2 = w1 + fan_in, *w3 = w2 + fan_in;
    const int32_t step = c->step_columns, skip = at->skip, gap = at->gap;
    float z0 = 0.0f, z1 = 0.0f, z2 = 0.0f, z3 = 0.0f;
    int32_t k, u, v;
    for (k = c->channels / c->groups; k; k--, map += c->rows * c->columns) {
        const float *row = map;
        for (u = at->rows; u; u--, row += c->step_rows * c->columns) {
            const float *p = row;
            for (v = at->columns; v; v--, p += step) {
                float value = *p;
                z0 += *w++ * value;
                z1 += *w1++ * value;
                z2 += *w2++ * value;
                z3 += *w3++ * value;
            }
            w += skip, w1 += skip, w2 += skip, w3 += skip;
        }
        w += gap, w1 += gap, w2 += gap, w3 += gap;
    }
    z[0] = z0;
    z[1] = z1;
    z[2] = z2;
    z[3] = z3;
}

TPS_HOT float tps_one_filter(const tps_convolution *c, const tps_window_inside *at, const float *map,
                             const float *w)
{
    float z = 0.0f;
    int32_t k, u, v;
    for (k = c->channels / c->groups; k; k--, map += c->rows * c->columns, w += at->gap) {
        const float *row = map;
        for (u = at->rows; u; u--, row += c->step_rows * c->columns, w += at->skip) {
            const float *p = row;
            for (v = at->columns; v; v--, p += c->step_columns) z += *w++ * *p;
        }
    }
    return z;
}

/* The same of weights in flash */
TPS_FN float tps_fixed_filter(const tps_convolution *c, const tps_window_inside *at, const float *map,
                              const float *w)
{
    float z = 0.0f;
    int32_t k, u;
    for (k = c->channels / c->groups; k; k--, map += c->rows * c->columns, w += at->gap) {
        const float *row = map;
        for (u = at->rows; u; u--, row += c->step_rows * c->columns, w += at->columns + at->skip) {
            int32_t v;
            for (v = 0; v < at->columns; v++) z += TPS_NUMBER(w + v) * row[v * c->step_columns];
        }
    }
    return z;
}

/* y = sigma(x * W + b) of one sample: four filters of a group read each pixel together. */
TPS_HOT void tps_convolve(const tps_block *b, const float *weights, const float *x, float *y)
{
    const tps_convolution *c = b->convolution;
    const uint32_t group = b->units / c->groups;
    const int32_t maps = c->channels / c->groups * c->rows * c->columns;
    uint32_t unit, lanes, l;
    int32_t i, j;
    float z[4];
    for (i = 0; i < c->out_rows; i++)
        for (j = 0; j < c->out_columns; j++, y++) {
            const tps_window_inside at = tps_window_at(c, x, i, j);
            for (unit = 0; unit < b->units; unit += lanes) {
                const float *w = weights + b->weight + unit * b->fan_in + at.first;
                const float *map = at.x + (int32_t)(unit / group) * maps;
                lanes = group % 4 == 0 || group - unit % group >= 4 ? 4 : 1;
                if (TPS_FIXED(b)) lanes = 1;
                if (lanes == 4) tps_four_filters(c, &at, map, w, (int32_t)b->fan_in, z);
                else if (TPS_FIXED(b)) z[0] = tps_fixed_filter(c, &at, map, w);
                else z[0] = tps_one_filter(c, &at, map, w);
                for (l = 0; l < lanes; l++) {
                    const float bias = b->bias == TPS_NOWHERE ? 0.0f : TPS_OF(b, weights + (b->bias + unit + l));
                    if (TPS_ADDS(b)) z[l] += y[(unit + l) * b->pixels];
                    y[(unit + l) * b->pixels] = tps_activate(b, z[l] + bias);
                }
            }
        }
}

/* The products of a map's pixels with dz whose sum is the gradient of weight (u, v) */
typedef struct { int32_t map, dz, rows, columns; } tps_products;

TPS_HOT tps_products tps_products_of(const tps_convolution *c, int32_t u, int32_t v)
{
    const int32_t top = u * c->step_rows - c->pad_rows, left = v * c->step_columns - c->pad_columns;
    const tps_range rows = tps_inside(top, c->stride_rows, c->out_rows, c->rows);
    const tps_range columns = tps_inside(left, c->stride_columns, c->out_columns, c->columns);
    tps_products p;
    p.map = (top + rows.first * c->stride_rows) * c->columns + left + columns.first * c->stride_columns;
    p.dz = rows.first * c->out_columns + columns.first;
    p.rows = rows.end - rows.first;
    p.columns = columns.end - columns.first;
    return p;
}

/* g += gradients of four weights, whose pixels lie `apart` */
TPS_HOT void tps_four_gradients(const tps_convolution *c, const tps_products *of, const float *map,
                                int32_t apart, const float *dz, float *g)
{
    const int32_t stride = c->stride_columns;
    float g0 = g[0], g1 = g[1], g2 = g[2], g3 = g[3];
    int32_t i, j;
    for (i = of->rows; i; i--, map += c->stride_rows * c->columns, dz += c->out_columns) {
        const float *d = dz, *p0 = map, *p1 = p0 + apart, *p2 = p1 + apart, *p3 = p2 + apart;
        for (j = of->columns; j; j--, p0 += stride, p1 += stride, p2 += stride, p3 += stride) {
            float value = *d++;
            g0 += value * *p0;
            g1 += value * *p1;
            g2 += value * *p2;
            g3 += value * *p3;
        }
    }
    g[0] = g0;
    g[1] = g1;
    g[2] = g2;
    g[3] = g3;
}

TPS_HOT void tps_one_gradient(const tps_convolution *c, const tps_products *of, const float *map,
                              const float *dz, float *g)
{
    int32_t i, j;
    float sum = *g;
    for (i = of->rows; i; i--, map += c->stride_rows * c->columns, dz += c->out_columns) {
        const float *d = dz, *p = map;
        for (j = of->columns; j; j--, p += c->stride_columns) sum += *d++ * *p;
    }
    *g = sum;
}

/* Four weights of a filter, or one, from dz in every sample of the batch */
TPS_HOT void tps_move_weights(const tps_block *b, const tps_rate *r, float *weights, uint32_t place,
                              const tps_products *of, const float *x, const float *dz, uint32_t batch,
                              uint32_t lanes, uint32_t apart, int32_t pixels_apart)
{
    float g[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    uint32_t n, l;
    for (n = 0; n < batch; n++) {
        const float *map = x + n * b->inputs + of->map, *d = dz + n * b->pixels + of->dz;
        if (lanes == 4) tps_four_gradients(b->convolution, of, map, pixels_apart, d, g);
        else tps_one_gradient(b->convolution, of, map, d, g);
    }
    for (l = 0; l < lanes; l++) tps_move(r, weights, place + l * apart, g[l]);
}

/* The weights and the bias of one filter; dz: a map for every sample of the batch. The weights of four
 * channels read dz together; of the channels that are left, those of four columns do. */
TPS_HOT void tps_move_filter(const tps_block *b, const tps_rate *r, float *weights, uint32_t unit,
                             const float *x, const float *dz, uint32_t batch)
{
    const tps_convolution *c = b->convolution;
    const int32_t channels = c->channels / c->groups, plane = c->rows * c->columns;
    const uint32_t kernel = (uint32_t)c->kernel_rows * c->kernel_columns;
    uint32_t n, place = b->weight + unit * b->fan_in;
    int32_t k, u, v, lanes;
    float g;
    x += (int32_t)(unit / (b->units / c->groups)) * channels * plane;
    for (u = 0; u < c->kernel_rows; u++)
        for (v = 0; v < c->kernel_columns; v++) {
            const tps_products of = tps_products_of(c, u, v);
            const uint32_t first = place + (uint32_t)(u * c->kernel_columns + v);
            for (k = 0; k + 4 <= channels; k += 4)
                tps_move_weights(b, r, weights, first + (uint32_t)k * kernel, &of, x + k * plane, dz, batch, 4,
                                 kernel, plane);
        }
    for (k = channels - channels % 4; k < channels; k++)
        for (u = 0; u < c->kernel_rows; u++)
            for (v = 0; v < c->kernel_columns; v += lanes) {
                const tps_products of = tps_products_of(c, u, v);
                const uint32_t first = place + (uint32_t)(u * c->kernel_columns + v) + (uint32_t)k * kernel;
                lanes = !c->pad_columns && v + 4 <= c->kernel_columns ? 4 : 1;
                tps_move_weights(b, r, weights, first, &of, x + k * plane, dz, batch, (uint32_t)lanes, 1,
                                 c->step_columns);
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
