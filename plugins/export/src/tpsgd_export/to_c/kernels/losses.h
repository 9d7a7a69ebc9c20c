/* ---- losses: of outputs, and local ones of a block's output ---- */

#ifdef TPS_WITH_NUMBERS
typedef float tps_label; /* `count` of them for each sample */
typedef struct { const float *numbers, *mean, *deviation; uint32_t count; } tps_truth;

/* Number c of a sample's label, standardised */
TPS_FN float tps_number(tps_truth t, uint32_t c)
{
    return (t.numbers[c] - t.mean[c]) / t.deviation[c];
}

/* e: outputs for one sample, which become the derivative of the loss, times a factor */
TPS_FN float tps_loss(uint8_t kind, float *e, uint32_t count, tps_truth truth, float factor)
{
    uint32_t c;
    float loss = 0.0f;
    for (c = 0; c < count; c++) {
        float rest = e[c] - tps_number(truth, c), d = rest;
        if (kind == TPS_L1_LOSS) d = rest > 0.0f ? 1.0f : rest < 0.0f ? -1.0f : 0.0f;
        if (kind == TPS_HUBER) d = rest > 1.0f ? 1.0f : rest < -1.0f ? -1.0f : rest;
        loss += d * (kind == TPS_L1_LOSS ? rest : rest - 0.5f * d);
        e[c] = d * factor;
    }
    return loss;
}

/* Number i of the projected label P y* */
TPS_FN float tps_aim(const tps_codes *p, tps_truth truth, uint32_t i)
{
    uint32_t c;
    float sum = 0.0f;
    for (c = 0; c < truth.count; c++) sum += tps_number(truth, c) * tps_code(p, c, i);
    return sum;
}
#else
typedef uint16_t tps_label;
typedef uint32_t tps_truth; /* a class */

/* e: logits of one sample, which become the derivative of the loss, times a factor.
 * With one output and TPS_BCE the label is 0 or 1. */
TPS_FN float tps_loss(uint8_t kind, float *e, uint32_t classes, tps_truth label, float factor)
{
    uint32_t c;
    float largest = e[0], sum = 0.0f, loss = 0.0f;
    if (kind == TPS_CROSS_ENTROPY) {
        for (c = 1; c < classes; c++)
            if (e[c] > largest) largest = e[c];
        loss = largest - e[label];
        for (c = 0; c < classes; c++) {
            e[c] = tps_exp(e[c] - largest);
            sum += e[c];
        }
        loss += tps_log(sum);
    }
    for (c = 0; c < classes; c++) {
        float truth = (classes == 1 ? label == 1u : c == label) ? 1.0f : 0.0f;
        if (kind == TPS_CROSS_ENTROPY) e[c] = e[c] / sum - truth;
#ifdef TPS_WITH_SIGMOID
        else if (kind == TPS_BCE) {
            float size = e[c] < 0.0f ? -e[c] : e[c];
            loss += (e[c] > 0.0f ? e[c] : 0.0f) - truth * e[c] + tps_log(1.0f + tps_exp(-size));
            e[c] = tps_sigmoid(e[c]) - truth;
        }
#endif
        else {
            e[c] -= truth;
            loss += 0.5f * e[c] * e[c];
        }
        e[c] *= factor;
    }
    return loss;
}

TPS_FN float tps_aim(const tps_codes *p, tps_truth label, uint32_t i) { return tps_code(p, label, i); }
#endif

#ifdef TPS_WITH_TARGETS
/* dz of one unit of one sample, from the distance to its class code; `share`: 1 / batch */
TPS_FN float tps_towards_code(const tps_block *b, tps_truth label, uint32_t unit, const float *y,
                              float share, float *dz)
{
    uint32_t i;
    float loss = 0.0f;
    for (i = 0; i < b->pixels; i++) {
        float code = tps_aim(b->codes, label, unit * b->pixels + i), rest = y[i] - code, dy;
        if (b->local == TPS_L2) {
            dy = rest * share;
            loss += 0.5f * rest * dy;
        } else if (b->local == TPS_L1) {
            dy = rest > 0.0f ? share : rest < 0.0f ? -share : 0.0f;
            loss += rest * dy;
        } else {
            dy = -code * share;
            loss += y[i] * dy;
        }
        dz[i] = dy * tps_slope(b, y[i]);
    }
    return loss;
}
#endif

#ifdef TPS_WITH_READOUT
typedef struct { uint32_t top, bottom, left, right; } tps_cell;

/* Cell (i, j) of the grid over a feature map, as adaptive average pooling cuts it */
TPS_HOT tps_cell tps_cell_of(const tps_block *b, uint32_t i, uint32_t j)
{
    tps_cell c = {0, 1, 0, 1};
    if (b->pixels == 1) return c;
    c.top = i * b->rows / b->grid_rows;
    c.bottom = ((i + 1u) * b->rows + b->grid_rows - 1u) / b->grid_rows;
    c.left = j * b->columns / b->grid_columns;
    c.right = ((j + 1u) * b->columns + b->grid_columns - 1u) / b->grid_columns;
    return c;
}

TPS_HOT float tps_mean(const tps_block *b, const float *map, tps_cell c)
{
    uint32_t i, j;
    float sum = 0.0f;
    if (b->pixels == 1) return *map;
    for (i = c.top; i < c.bottom; i++)
        for (j = c.left; j < c.right; j++) sum += map[i * b->columns + j];
    return sum / (float)((c.bottom - c.top) * (c.right - c.left));
}

/* The mean square of the features of a batch */
TPS_FN float tps_mean_square(const tps_block *b, const float *y, uint32_t batch)
{
    uint32_t map, i, j;
    float sum = 0.0f;
    for (map = 0; map < batch * b->units; map++, y += b->pixels)
        for (i = 0; i < b->grid_rows; i++)
            for (j = 0; j < b->grid_columns; j++) {
                float f = tps_mean(b, y, tps_cell_of(b, i, j));
                sum += f * f;
            }
    return sum / (float)(batch * b->codes->size);
}

/* f: the features of one map, means of its cells */
TPS_HOT void tps_map_features(const tps_block *b, const float *map, float *f)
{
    uint32_t i, j;
    for (i = 0; i < b->grid_rows; i++)
        for (j = 0; j < b->grid_columns; j++) *f++ = tps_mean(b, map, tps_cell_of(b, i, j));
}

/* e: the logits of one sample, gain * P f(y) */
TPS_HOT void tps_read_out(const tps_block *b, const float *weights, float gain, const float *y, float *e,
                          uint32_t classes)
{
    const uint32_t cells = (uint32_t)b->grid_rows * b->grid_columns, size = b->codes->size;
    const float *table = tps_code_table(b, weights);
    uint32_t unit, c, n;
    float f[TPS_CELLS];
    for (c = 0; c < classes; c++) e[c] = 0.0f;
    if (TPS_FIXED_CODES(b) && table && cells == b->pixels) tps_add_fixed(table, size, 1, classes, y, size, e);
    else if (table && cells == b->pixels) tps_add_rows(table, size, classes, y, size, e);
    else
        for (unit = 0; unit < b->units; unit++, y += b->pixels) {
            tps_map_features(b, y, f);
            if (TPS_FIXED_CODES(b) && table) tps_add_fixed(table + unit * cells, size, 1, classes, f, cells, e);
            else if (table) tps_add_rows(table + unit * cells, size, classes, f, cells, e);
            else
                for (n = 0; n < cells; n++)
                    for (c = 0; c < classes; c++) e[c] += f[n] * tps_code(b->codes, c, unit * cells + n);
        }
    for (c = 0; c < classes; c++) e[c] *= gain;
}

/* df: derivatives of `count` features from number `first` on, P^T e */
TPS_HOT void tps_feature_derivatives(const tps_block *b, const float *weights, const float *e,
                                     uint32_t classes, uint32_t first, uint32_t count, float *df)
{
    const float *table = tps_code_table(b, weights);
    uint32_t n, c;
    for (n = 0; n < count; n++) df[n] = 0.0f;
    if (TPS_FIXED_CODES(b) && table) tps_add_fixed(table + first, 1, b->codes->size, count, e, classes, df);
    else if (table) tps_add_columns(table + first, b->codes->size, classes, e, count, df);
    else
        for (n = 0; n < count; n++)
            for (c = 0; c < classes; c++) df[n] += e[c] * tps_code(b->codes, c, first + n);
}

/* dz of one unit of one sample, from e, the derivative with respect to P f(y) */
TPS_HOT void tps_read_back(const tps_block *b, const float *weights, const float *e, uint32_t unit,
                           const float *y, float *dz, uint32_t classes)
{
    const uint32_t cells = (uint32_t)b->grid_rows * b->grid_columns;
    uint32_t i, j, k, l, n = 0;
    float df[TPS_CELLS];
    if (cells == b->pixels) tps_feature_derivatives(b, weights, e, classes, unit * cells, cells, dz);
    else {
        tps_feature_derivatives(b, weights, e, classes, unit * cells, cells, df);
        for (i = 0; i < b->pixels; i++) dz[i] = 0.0f;
        for (i = 0; i < b->grid_rows; i++)
            for (j = 0; j < b->grid_columns; j++, n++) {
                const tps_cell cell = tps_cell_of(b, i, j);
                const float d = df[n] / (float)((cell.bottom - cell.top) * (cell.right - cell.left));
                for (k = cell.top; k < cell.bottom; k++)
                    for (l = cell.left; l < cell.right; l++) dz[k * b->columns + l] += d;
            }
    }
    for (i = 0; i < b->pixels; i++) dz[i] *= tps_slope(b, y[i]);
}
#endif
