/* ---- feature maps of integers: convolutions that learn through a readout, and pools ----
 *
 * Channels first, one sample at a time. Gradients of a weight are summed over the pixels in 64 bits and
 * rounded once, at random. */

enum { TPS_POOL_MAX, TPS_POOL_MEAN, TPS_POOL_CELLS };

typedef struct {
    uint8_t kind;
    uint16_t channels, rows, columns, out_rows, out_columns;
    uint16_t kernel_rows, kernel_columns, stride_rows, stride_columns;
} tps_int_window;

struct tps_int_maps {
    uint16_t channels, rows, columns; /* of the input */
    uint16_t out_rows, out_columns, kernel_rows, kernel_columns;
    uint16_t stride_rows, stride_columns, pad_rows, pad_columns, step_rows, step_columns;
    uint16_t groups;
    uint16_t grid_rows, grid_columns; /* cells of a readout */
    int32_t least, overlap; /* pixels of the smallest cell, and cells of a pixel: `gain` has them */
    uint32_t pools;
    const tps_int_window *pool;
};

typedef struct { int32_t first, end; } tps_range;

TPS_INT_FN tps_range tps_inside(int32_t start, int32_t step, int32_t count, int32_t size)
{
    tps_range r = {0, 0};
    r.end = count;
    if (start < 0) r.first = (step - 1 - start) / step;
    if (start + (count - 1) * step >= size) r.end = size > start ? (size - 1 - start) / step + 1 : 0;
    return r;
}

TPS_INT_FN int32_t tps_int_input(tps_source x, int32_t i) { return x.bytes ? x.bytes[i] : x.units[i]; }

TPS_INT_FN int32_t tps_int_plane(const struct tps_int_maps *m) { return m->rows * m->columns; }
TPS_INT_FN int32_t tps_int_pixels(const struct tps_int_maps *m) { return m->out_rows * m->out_columns; }

/* Where the first map lies that a filter reads */
TPS_INT_FN int32_t tps_int_maps_of(const tps_int_layer *l, int32_t unit)
{
    const struct tps_int_maps *m = l->maps;
    return unit / (l->outputs / m->groups) * (m->channels / m->groups) * tps_int_plane(m);
}

TPS_INT_FN void tps_int_convolve(const tps_int_layer *l, const TPS_WEIGHT *w, const int32_t *b,
                                 tps_source x, int16_t *y)
{
    const struct tps_int_maps *m = l->maps;
    int32_t unit, i, j, k, u, v, across = m->kernel_columns;
    for (unit = 0; unit < l->outputs; unit++, w += l->inputs)
        for (i = 0; i < m->out_rows; i++) {
            int32_t top = i * m->stride_rows - m->pad_rows, left = -(int32_t)m->pad_columns;
            tps_range rows = tps_inside(top, m->step_rows, m->kernel_rows, m->rows);
            for (j = 0; j < m->out_columns; j++, left += m->stride_columns) {
                tps_range columns = tps_inside(left, m->step_columns, across, m->columns);
                int32_t z = b ? TPS_INT_OF(l, b + unit) : 0, map = tps_int_maps_of(l, unit);
                for (k = 0; k < m->channels / m->groups; k++, map += tps_int_plane(m))
                    for (u = rows.first; u < rows.end; u++) {
                        const TPS_WEIGHT *weight = w + (k * m->kernel_rows + u) * across;
                        int32_t at = map + (top + u * m->step_rows) * m->columns + left;
                        for (v = columns.first; v < columns.end; v++)
                            z += TPS_INT_OF(l, weight + v) * tps_int_input(x, at + v * m->step_columns);
                    }
                *y++ = tps_int_activate(l, z);
            }
        }
}

/* Rows, or columns, of cell i of `cells` over `size`, as adaptive average pooling cuts them */
TPS_INT_FN tps_range tps_int_cell(int32_t i, int32_t cells, int32_t size)
{
    tps_range r;
    r.first = i * size / cells;
    r.end = ((i + 1) * size + cells - 1) / cells;
    return r;
}

/* The sum of a part of a map, or its largest number */
TPS_INT_FN int32_t tps_int_over(const int16_t *map, int32_t width, tps_range rows, tps_range columns, int largest)
{
    int32_t i, j, sum = 0, most = map[rows.first * width + columns.first];
    for (i = rows.first; i < rows.end; i++)
        for (j = columns.first; j < columns.end; j++) {
            int32_t y = map[i * width + j];
            sum += y;
            if (y > most) most = y;
        }
    return largest ? most : sum;
}

TPS_INT_FN int32_t tps_int_count(tps_range rows, tps_range columns)
{
    return (rows.end - rows.first) * (columns.end - columns.first);
}

/* The pools of a layer, in place: what is written lies before what is still to be read */
TPS_INT_FN void tps_int_pool(const struct tps_int_maps *m, int16_t *y)
{
    uint32_t p, k;
    int32_t i, j;
    for (p = 0; p < m->pools; p++) {
        const tps_int_window *pool = m->pool + p;
        const int16_t *from = y;
        int16_t *to = y;
        for (k = 0; k < pool->channels; k++, from += pool->rows * pool->columns)
            for (i = 0; i < pool->out_rows; i++)
                for (j = 0; j < pool->out_columns; j++) {
                    tps_range rows = tps_int_cell(i, pool->out_rows, pool->rows);
                    tps_range columns = tps_int_cell(j, pool->out_columns, pool->columns);
                    if (pool->kind != TPS_POOL_CELLS) {
                        rows.first = i * pool->stride_rows;
                        rows.end = rows.first + pool->kernel_rows;
                        columns.first = j * pool->stride_columns;
                        columns.end = columns.first + pool->kernel_columns;
                    }
                    if (pool->kind == TPS_POOL_MAX)
                        *to++ = (int16_t)tps_int_over(from, pool->columns, rows, columns, 1);
                    else
                        *to++ = (int16_t)(tps_int_over(from, pool->columns, rows, columns, 0)
                                          / tps_int_count(rows, columns));
                }
    }
}

TPS_INT_FN int tps_int_bit(const tps_int_layer *l, uint32_t c, int32_t n)
{
    uint32_t i = c * ((uint32_t)l->outputs * l->maps->grid_rows * l->maps->grid_columns) + (uint32_t)n;
    return (TPS_BYTE(l->codes + (i >> 3)) >> (i & 7)) & 1;
}

/* The logits of a readout of means over cells, before their gain */
TPS_INT_FN void tps_int_read_maps(const tps_int_layer *l, const int16_t *y, uint32_t classes, int32_t *sums)
{
    const struct tps_int_maps *m = l->maps;
    int32_t unit, i, j, n = 0;
    uint32_t c;
    for (c = 0; c < classes; c++) sums[c] = 0;
    for (unit = 0; unit < l->outputs; unit++, y += tps_int_pixels(m))
        for (i = 0; i < m->grid_rows; i++)
            for (j = 0; j < m->grid_columns; j++, n++) {
                tps_range rows = tps_int_cell(i, m->grid_rows, m->out_rows);
                tps_range columns = tps_int_cell(j, m->grid_columns, m->out_columns);
                int32_t f = tps_int_over(y, m->out_columns, rows, columns, 0) / tps_int_count(rows, columns);
                for (c = 0; c < classes; c++) sums[c] += tps_int_bit(l, c, n) ? f : -f;
            }
}

/* d: the derivative with respect to z of every pixel of a map, over the gain by which it moves */
TPS_INT_FN void tps_int_read_back(const tps_int_layer *l, const int16_t *y, uint32_t classes,
                                  const int32_t *e, int32_t unit, int32_t *d)
{
    const struct tps_int_maps *m = l->maps;
    int32_t i, j, r, c, n = unit * m->grid_rows * m->grid_columns, pixels = tps_int_pixels(m);
    uint32_t k;
    for (i = 0; i < pixels; i++) d[i] = 0;
    for (i = 0; i < m->grid_rows; i++)
        for (j = 0; j < m->grid_columns; j++, n++) {
            tps_range rows = tps_int_cell(i, m->grid_rows, m->out_rows);
            tps_range columns = tps_int_cell(j, m->grid_columns, m->out_columns);
            int32_t D = 0;
            for (k = 0; k < classes; k++) D += tps_int_bit(l, k, n) ? e[k] : -e[k];
            D = tps_clip(D, 65535) * m->least / (tps_int_count(rows, columns) * m->overlap);
            for (r = rows.first; r < rows.end; r++)
                for (c = columns.first; c < columns.end; c++) d[r * m->out_columns + c] += D;
        }
    for (i = 0; i < pixels; i++) {
        d[i] = tps_clip(d[i], 65535);
        if (l->activation == TPS_INT_TANH) d[i] = tps_int_slope(l, y[i], d[i]);
        else if (y[i] <= 0) d[i] = tps_floor(d[i] * (int32_t)l->slope.mantissa, l->slope.point);
    }
}

/* sum * mantissa / 2^shift, rounded at random; 16 bits of the sum count */
TPS_INT_FN int32_t tps_int_moves(int64_t sum, tps_factor f, int32_t shift, uint32_t *random)
{
    int32_t v;
    for (; sum > 65535 || sum < -65535; shift--) sum = sum < 0 ? -((-sum) >> 1) : sum >> 1;
    v = (int32_t)sum * (int32_t)f.mantissa;
    return shift < 0 ? tps_grow(v, -shift, TPS_BIAS_LIMIT) : tps_round_far(v, shift, random);
}

/* The sum over pixels of d times the input that weight (u, v) reads in a map */
TPS_INT_FN int64_t tps_int_gradient(const struct tps_int_maps *m, tps_source x, int32_t map, const int32_t *d,
                                    int32_t u, int32_t v)
{
    int32_t top = u * m->step_rows - m->pad_rows, left = v * m->step_columns - m->pad_columns, i, j;
    tps_range rows = tps_inside(top, m->stride_rows, m->out_rows, m->rows);
    tps_range columns = tps_inside(left, m->stride_columns, m->out_columns, m->columns);
    int64_t sum = 0;
    for (i = rows.first; i < rows.end; i++) {
        int32_t at = map + (top + i * m->stride_rows) * m->columns + left;
        for (j = columns.first; j < columns.end; j++)
            sum += (int64_t)d[i * m->out_columns + j] * tps_int_input(x, at + j * m->stride_columns);
    }
    return sum;
}

/* A convolution lowers the loss of its readout, which comes back. */
TPS_INT_FN int32_t tps_int_learn_maps(const tps_int_layer *l, TPS_WEIGHT *w, int32_t *b, tps_source x,
                                      const int16_t *y, uint32_t classes, uint32_t label, uint16_t rate,
                                      int32_t *e, int32_t *d, uint32_t *random)
{
    const struct tps_int_maps *m = l->maps;
    tps_factor f = tps_product(l->gain, tps_normalised(rate, 16));
    int32_t shift = TPS_ERROR_POINT + f.point + l->input_point - l->weight_point;
    int32_t unit, i, k, u, v, loss;
    int64_t sum;
    tps_int_read_maps(l, y, classes, e);
    loss = tps_int_softmax(e, classes, label, l->log_gain);
    for (unit = 0; unit < l->outputs; unit++, y += tps_int_pixels(m)) {
        int32_t map = tps_int_maps_of(l, unit);
        tps_int_read_back(l, y, classes, e, unit, d);
        for (k = 0; k < m->channels / m->groups; k++, map += tps_int_plane(m))
            for (u = 0; u < m->kernel_rows; u++)
                for (v = 0; v < m->kernel_columns; v++, w++) {
                    sum = tps_int_gradient(m, x, map, d, u, v);
                    *w = (TPS_WEIGHT)tps_clip(*w - tps_int_moves(sum, f, shift, random), l->limit);
                }
        for (sum = 0, i = 0; b && i < tps_int_pixels(m); i++) sum += d[i];
        if (b) b[unit] = tps_clip(
            b[unit] - tps_int_moves(sum, f, TPS_ERROR_POINT + f.point - l->weight_point - l->input_point, random),
            TPS_BIAS_LIMIT);
    }
    return loss;
}
