/* ---- feature maps of integers: convolutions that learn through a readout, and pools ----
 *
 * Channels first, one sample at a time. What a filter reads at a pixel is laid out as a row, and so are
 * the inputs that a weight meets at all pixels: both are multiplied as dense layers are. Gradients of a
 * weight are summed over the pixels and rounded once, at random. */

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
    uint16_t together; /* filters that learn together, eight at most */
    uint16_t pools;
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

TPS_INT_FN int32_t tps_int_plane(const struct tps_int_maps *m) { return m->rows * m->columns; }
TPS_INT_FN int32_t tps_int_pixels(const struct tps_int_maps *m) { return m->out_rows * m->out_columns; }

/* Filters of a group, which read the same maps */
TPS_INT_FN uint32_t tps_int_of_a_group(const tps_int_layer *l) { return l->outputs / (uint32_t)l->maps->groups; }

/* Where the first map lies that a filter reads */
TPS_INT_FN int32_t tps_int_map_of(const tps_int_layer *l, uint32_t unit)
{
    const struct tps_int_maps *m = l->maps;
    return (int32_t)(unit / tps_int_of_a_group(l)) * (m->channels / m->groups) * tps_int_plane(m);
}

/* A part of a map: `count` rows from `top` on and columns from `left` on, each a step apart. Columns
 * `inside` are of the map; beside it there are zeros. */
typedef struct {
    int32_t height, width, top, down, rows, left, right, columns;
    tps_range inside;
    int whole; /* nothing of it is beside the map */
} tps_part;

/* The part that a filter reads at pixel (i, j), or the part that weight (i, j) meets at all pixels */
TPS_INT_FN tps_part tps_part_of(const struct tps_int_maps *m, int32_t i, int32_t j, int of_a_weight)
{
    tps_part p;
    p.height = m->rows;
    p.width = m->columns;
    p.down = of_a_weight ? m->stride_rows : m->step_rows;
    p.rows = of_a_weight ? m->out_rows : m->kernel_rows;
    p.top = i * (of_a_weight ? m->step_rows : m->stride_rows) - m->pad_rows;
    p.right = of_a_weight ? m->stride_columns : m->step_columns;
    p.columns = of_a_weight ? m->out_columns : m->kernel_columns;
    p.left = j * (of_a_weight ? m->step_columns : m->stride_columns) - m->pad_columns;
    p.inside = tps_inside(p.left, p.right, p.columns, p.width);
    if (p.inside.end < p.inside.first) p.inside.end = p.inside.first;
    p.whole = p.inside.end - p.inside.first == p.columns && p.top >= 0 && p.top + (p.rows - 1) * p.down < p.height;
    return p;
}

/* Lay the same part of some maps out, one row after another. */
#define TPS_LAY_OUT(NAME, TYPE)                                                                     \
    TPS_INT_LOOP void NAME##_in_part(const tps_part *p, const TYPE *x, int32_t maps, int16_t *to)   \
    {                                                                                               \
        int32_t i, j;                                                                               \
        for (; maps; maps--, x += p->height * p->width)                                             \
            for (i = 0; i < p->rows; i++) {                                                         \
                const int32_t row = p->top + i * p->down, at = row * p->width + p->left;            \
                for (j = 0; j < p->columns; j++)                                                    \
                    *to++ = row < 0 || row >= p->height || j < p->inside.first || j >= p->inside.end \
                                ? (int16_t)0 : x[at + j * p->right];                                \
            }                                                                                       \
    }                                                                                               \
    TPS_INT_LOOP void NAME(const tps_part *p, const TYPE *x, int32_t maps, int16_t *to)             \
    {                                                                                               \
        const int32_t right = p->right, columns = p->columns, line = p->down * p->width;            \
        const TYPE *map = x + p->top * p->width + p->left;                                          \
        for (; maps; maps--, map += p->height * p->width) {                                         \
            int32_t i = p->rows;                                                                    \
            x = map;                                                                                \
            do {                                                                                    \
                const TYPE *from = x;                                                               \
                int32_t j = columns;                                                                \
                TPS_BY_WORDS(                                                                       \
                    if (sizeof(TYPE) == 2 && right == 1)                                            \
                        for (; j > 1; j -= 2, from += 2, to += 2) TPS_STORE(to, TPS_LOAD(from));)   \
                for (; j; j--, from += right) *to++ = *from;                                        \
                x += line;                                                                          \
            } while (--i);                                                                          \
        }                                                                                           \
    }
TPS_LAY_OUT(tps_lay_out_inputs, TPS_INPUT)
TPS_LAY_OUT(tps_lay_out_units, int16_t)

TPS_INT_FN void tps_lay_out(const tps_part *p, tps_source x, int32_t map, int32_t maps, int16_t *to)
{
    if (x.bytes) (p->whole ? tps_lay_out_inputs : tps_lay_out_inputs_in_part)(p, x.bytes + map, maps, to);
    else (p->whole ? tps_lay_out_units : tps_lay_out_units_in_part)(p, x.units + map, maps, to);
}

/* `lines` has room for what a filter reads. */
TPS_INT_FN void tps_int_convolve(const tps_int_layer *l, const TPS_WEIGHT *w, const int32_t *b,
                                 tps_source x, int16_t *y, int16_t *lines)
{
    const struct tps_int_maps *m = l->maps;
    const uint32_t of_a_group = tps_int_of_a_group(l);
    const int32_t pixels = tps_int_pixels(m);
    uint32_t group, unit, units, j;
    int32_t pixel, z[8];
    tps_source laid_out;
    laid_out.bytes = 0;
    laid_out.units = lines;
    for (group = 0; group < l->outputs; group += of_a_group)
        for (pixel = 0; pixel < pixels; pixel++) {
            const tps_part part = tps_part_of(m, pixel / m->out_columns, pixel % m->out_columns, 0);
            tps_lay_out(&part, x, tps_int_map_of(l, group), m->channels / m->groups, lines);
            for (unit = group; unit < group + of_a_group; unit += units) {
                units = group + of_a_group - unit < 8 ? group + of_a_group - unit : 8;
                tps_int_sums(l, w + unit * l->inputs, b ? b + unit : 0, laid_out, units, z);
                for (j = 0; j < units; j++)
                    y[(int32_t)(unit + j) * pixels + pixel] = tps_int_activate(l, z[j]);
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

TPS_INT_FN int32_t tps_int_cells(const struct tps_int_maps *m) { return m->grid_rows * m->grid_columns; }

/* The means of a map over its cells */
TPS_INT_FN void tps_int_means(const struct tps_int_maps *m, const int16_t *y, int16_t *means)
{
    int32_t i, j;
    for (i = 0; i < m->grid_rows; i++) {
        const tps_range rows = tps_int_cell(i, m->grid_rows, m->out_rows);
        for (j = 0; j < m->grid_columns; j++) {
            const tps_range columns = tps_int_cell(j, m->grid_columns, m->out_columns);
            *means++ = (int16_t)(tps_int_over(y, m->out_columns, rows, columns, 0) / tps_int_count(rows, columns));
        }
    }
}

/* The logits of a readout of means over cells, before their gain; `means` has room for a map. */
TPS_INT_FN void tps_int_read_maps(const tps_int_layer *l, const int16_t *y, uint32_t classes, int32_t *sums,
                                  int16_t *means)
{
    const uint32_t cells = (uint32_t)tps_int_cells(l->maps), features = l->outputs * cells;
    uint32_t n, c, k;
    if (features == (uint32_t)l->outputs * (uint32_t)tps_int_pixels(l->maps)) {
        tps_int_read_out(l, y, features, classes, sums);
        return;
    }
    for (c = 0; c < classes; c++) sums[c] = 0;
    for (n = 0; n < features; n += cells, y += tps_int_pixels(l->maps)) {
        int32_t all = 0;
        tps_int_means(l->maps, y, means);
        for (k = 0; k < cells; k++) all += means[k];
        for (c = 0; c < classes; c++) sums[c] += 2 * tps_int_chosen(l->codes, c * features + n, means, cells) - all;
    }
}

/* d += half of D, the derivatives by the means of a map, for every pixel */
TPS_INT_FN void tps_int_spread(const struct tps_int_maps *m, const int32_t *D, int32_t first, int32_t count, int16_t *d)
{
    int32_t n, r, c;
    if (tps_int_cells(m) == tps_int_pixels(m)) {
        for (d += first; count; count--) *d++ = (int16_t)(tps_clip(*D++, 65535) / 2);
        return;
    }
    for (n = first; n < first + count; n++, D++) {
        const tps_range rows = tps_int_cell(n / m->grid_columns, m->grid_rows, m->out_rows);
        const tps_range columns = tps_int_cell(n % m->grid_columns, m->grid_columns, m->out_columns);
        const int32_t v = tps_clip(*D, 65535) * m->least / (2 * tps_int_count(rows, columns) * m->overlap);
        for (r = rows.first; r < rows.end; r++)
            for (c = columns.first; c < columns.end; c++)
                d[r * m->out_columns + c] = (int16_t)(d[r * m->out_columns + c] + v);
    }
}

/* d: half the derivatives with respect to z of every pixel of a map, over the gain by which they move */
TPS_INT_FN void tps_int_read_back(const tps_int_layer *l, const int16_t *y, uint32_t classes,
                                  const int32_t *e, uint32_t unit, int16_t *d)
{
    const int32_t cells = tps_int_cells(l->maps), pixels = tps_int_pixels(l->maps), first = (int32_t)unit * cells;
    const int32_t mantissa = l->slope.mantissa, point = l->slope.point; /* of a ReLU both are 0 */
    const int32_t half = point ? (int32_t)1 << (point - 1) : 0;
    int32_t n, i, D[8];
    for (i = 0; i < pixels; i++) d[i] = 0;
    for (n = 0; n < cells; n += 8) {
        tps_int_feedback(l->codes, (uint32_t)(first + n), (uint32_t)(l->outputs * cells), e, classes, D);
        tps_int_spread(l->maps, D, n, cells - n < 8 ? cells - n : 8, d);
    }
    y += (int32_t)unit * pixels;
    if (l->activation == TPS_INT_TANH)
        for (i = 0; i < pixels; i++) d[i] = (int16_t)tps_int_slope(y[i], d[i]);
    else
        for (i = 0; i < pixels; i++)
            if (y[i] <= 0) d[i] = (int16_t)tps_floor(d[i] * mantissa + half, point);
}

/* g: sums over the pixels of d times x, of four maps of d */
TPS_INT_LOOP void tps_four_gradients(const int16_t *d, const int16_t *x, uint32_t pixels, int32_t *g)
{
    const int16_t *d2 = d + 2 * pixels;
    int32_t g0 = 0, g1 = 0, g2 = 0, g3 = 0;
    const int16_t *const end = x + pixels;
    TPS_BY_WORDS(
        const int16_t *const pairs = x + (pixels & ~1u);
        if (pixels > 1) do {
            const uint32_t two = TPS_LOAD(x);
            g1 = tps_two_products(TPS_LOAD(d + pixels), two, g1);
            g0 = tps_two_products(TPS_LOAD(d), two, g0);
            g3 = tps_two_products(TPS_LOAD(d2 + pixels), two, g3);
            g2 = tps_two_products(TPS_LOAD(d2), two, g2);
            x += 2, d += 2, d2 += 2;
        } while (x != pairs);)
    for (; x != end; x++, d++, d2++) {
        g0 += (int32_t)*d * *x;
        g1 += (int32_t)d[pixels] * *x;
        g2 += (int32_t)*d2 * *x;
        g3 += (int32_t)d2[pixels] * *x;
    }
    g[0] = g0;
    g[1] = g1;
    g[2] = g2;
    g[3] = g3;
}

TPS_INT_LOOP int32_t tps_one_gradient(const int16_t *d, const int16_t *x, uint32_t pixels)
{
    const int16_t *const end = x + pixels;
    int32_t sum = 0;
    TPS_BY_WORDS(for (; end - x > 1; x += 2, d += 2) sum = tps_two_products(TPS_LOAD(d), TPS_LOAD(x), sum);)
    while (x != end) sum += (int32_t)*d++ * *x++;
    return sum;
}

/* The floor of g mantissa / 2^14, for a g below 2^30 */
TPS_INT_HOT int32_t tps_int_scaled(int32_t g, int32_t mantissa)
{
#if defined(__GNUC__) && defined(__ARM_FEATURE_SAT) /* 64 bits in one instruction */
    return (int32_t)(((int64_t)(2 * g) * (mantissa * 131072)) >> 32);
#else
    const int32_t high = tps_floor(g, 14);
    return high * mantissa + tps_floor((g - high * 16384) * mantissa, 14);
#endif
}

/* How far a weight moves: against v / 2^shift, rounded at random */
TPS_INT_FN int32_t tps_int_moved(int32_t v, int32_t shift, uint32_t *random)
{
    return shift < 0 ? tps_grow(v, -shift, TPS_BIAS_LIMIT) : tps_round(v, shift, random);
}

typedef struct { int32_t mantissa, shift, limit; } tps_int_pace;

/* The same weight of some filters, whose gradients are g */
TPS_INT_LOOP uint32_t tps_int_move_filters(TPS_WEIGHT *w, uint32_t inputs, const int32_t *g, uint32_t filters,
                                           const tps_int_pace *pace, uint32_t random)
{
    const int32_t mantissa = pace->mantissa, shift = pace->shift, limit = pace->limit;
    uint32_t state = random;
    if (shift > 0 && shift <= 30)
        for (; filters; filters--, w += inputs) {
            random = tps_xorshift(random);
            *w = (TPS_WEIGHT)tps_within(*w - tps_rounded(tps_int_scaled(*g++, mantissa), shift, random), limit);
        }
    else
        for (; filters; filters--, w += inputs, random = state)
            *w = (TPS_WEIGHT)tps_within(*w - tps_int_moved(tps_int_scaled(*g++, mantissa), shift, &state), limit);
    return random;
}

/* Maps of d divided by a power of two, by so much that no sum of their products with inputs up to
 * 2^bits, or with 1, reaches 2^30; the logarithm of that power. */
TPS_INT_FN int32_t tps_int_fitted(int16_t *d, uint32_t maps, uint32_t pixels, int32_t bits)
{
    int32_t most = 0, all, v, shrink;
    uint32_t i, j;
    for (j = 0; j < maps; j++) {
        for (all = 0, i = 0; i < pixels; i++) {
            v = d[j * pixels + i];
            all += v < 0 ? -v : v;
        }
        if (all > most) most = all;
    }
    shrink = tps_bits_of((uint32_t)most + pixels) + bits - 29;
    if (shrink <= 0) return 0;
    for (i = 0; i < maps * pixels; i++) d[i] = (int16_t)tps_floor(tps_floor(d[i], shrink - 1) + 1, 1);
    return shrink;
}

/* Some filters of a group learn, eight at most; d has room for their maps, and for the inputs of one. */
TPS_INT_FN void tps_int_learn_filters(const tps_int_layer *l, TPS_WEIGHT *w, int32_t *b, tps_source x,
                                      uint32_t unit, uint32_t units, int32_t bits, tps_factor f, int16_t *d,
                                      uint32_t *random)
{
    const struct tps_int_maps *m = l->maps;
    const int32_t kernel = m->kernel_rows * m->kernel_columns, plane = tps_int_plane(m), map = tps_int_map_of(l, unit);
    const uint32_t pixels = (uint32_t)tps_int_pixels(m), inputs = l->inputs;
    const int32_t shrink = tps_int_fitted(d, units, pixels, bits);
    const int32_t shift = TPS_ERROR_POINT - 15 - shrink + f.point - l->weight_point;
    tps_int_pace pace;
    int32_t i, k, g[8];
    uint32_t j, state = *random;
    pace.mantissa = f.mantissa;
    pace.shift = shift + l->input_point;
    pace.limit = l->limit;
    w += unit * inputs;
    for (i = 0; i < kernel; i++) {
        const tps_part part = tps_part_of(m, i / m->kernel_columns, i % m->kernel_columns, 1);
        for (k = 0; k < m->channels / m->groups; k++) {
            tps_lay_out(&part, x, map + k * plane, 1, d + units * pixels);
            for (j = 0; j + 4 <= units; j += 4) tps_four_gradients(d + j * pixels, d + units * pixels, pixels, g + j);
            for (; j < units; j++) g[j] = tps_one_gradient(d + j * pixels, d + units * pixels, pixels);
            state = tps_int_move_filters(w + k * kernel + i, inputs, g, units, &pace, state);
        }
    }
    for (j = 0; b && j < units; j++) {
        int32_t all = 0;
        for (i = 0; i < (int32_t)pixels; i++) all += *d++;
        b[unit + j] = tps_within_31_bits(b[unit + j] - tps_int_moved(tps_int_scaled(all, f.mantissa), shift - l->input_point, &state));
    }
    *random = state;
}

/* A convolution lowers the loss of its readout, which comes back. */
TPS_INT_FN int32_t tps_int_learn_maps(const tps_int_layer *l, TPS_WEIGHT *w, int32_t *b, tps_source x,
                                      const int16_t *y, uint32_t classes, uint32_t label, uint16_t rate,
                                      int32_t *e, int16_t *lines, uint32_t *random)
{
    const struct tps_int_maps *m = l->maps;
    const uint32_t of_a_group = tps_int_of_a_group(l), all = (uint32_t)(m->channels * tps_int_plane(m));
    const int32_t bits = x.bytes ? tps_move_by_inputs_bits(x.bytes, all) : tps_move_by_units_bits(x.units, all);
    const tps_factor f = tps_product(l->gain, tps_normalised(rate, 16));
    uint32_t unit, units, j;
    int32_t loss;
    tps_int_read_maps(l, y, classes, e, lines);
    loss = tps_int_softmax(e, classes, label, l->log_gain);
    for (unit = 0; unit < l->outputs; unit += units) {
        units = of_a_group - unit % of_a_group;
        if (units > m->together) units = m->together;
        for (j = 0; j < units; j++)
            tps_int_read_back(l, y, classes, e, unit + j, lines + (int32_t)j * tps_int_pixels(m));
        tps_int_learn_filters(l, w, b, x, unit, units, bits, f, lines, random);
    }
    return loss;
}
