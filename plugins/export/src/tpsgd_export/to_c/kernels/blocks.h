/* ---- a block: layer, activation, pools, local loss ---- */

#define TPS_NOWHERE UINT32_MAX

enum { TPS_NONE, TPS_RELU, TPS_LEAKY_RELU, TPS_TANH, TPS_SIGMOID };
enum { TPS_HEAD, TPS_FROZEN, TPS_READOUT, TPS_L2, TPS_L1, TPS_INNER, TPS_HIDDEN };
enum { TPS_CROSS_ENTROPY, TPS_BCE, TPS_MSE, TPS_L1_LOSS, TPS_HUBER };
enum { TPS_POOL_MAX, TPS_POOL_MEAN, TPS_POOL_CELLS };
enum { TPS_RELU6 = TPS_SIGMOID + 1 };

typedef struct {
    uint16_t channels, rows, columns; /* of the input */
    uint16_t out_rows, out_columns, kernel_rows, kernel_columns;
    uint16_t stride_rows, stride_columns, pad_rows, pad_columns, step_rows, step_columns;
    uint16_t groups;
} tps_convolution;

typedef struct {
    uint8_t kind;
    uint16_t channels, rows, columns, out_rows, out_columns;
    uint16_t kernel_rows, kernel_columns, stride_rows, stride_columns;
} tps_pool;

typedef struct {
    uint32_t inputs, units, pixels; /* of a sample; a map of `pixels` numbers for each unit */
    uint32_t fan_in;                /* weights of a unit */
    uint32_t weight, bias;          /* their places among the weights; bias may be TPS_NOWHERE */
    const float *fixed;             /* weights in flash, of a block that does not learn, or 0 */
    uint32_t output;                /* place of the output in the arena */
    uint32_t pooled;                /* numbers of a sample after the pools */
    uint8_t activation, local, loss, pools;
    float slope;
    const tps_convolution *convolution; /* or 0: dense */
    const tps_pool *pool;
    const tps_codes *codes;
    uint16_t rows, columns, grid_rows, grid_columns; /* of a map, and of the cells of a readout */
    float gain, target; /* of a readout's logits; gain 0: target over the size of its features */
    uint32_t slot;      /* of a measured gain, or TPS_NOWHERE */
    uint32_t learned;   /* place of codes that learn among the weights, or TPS_NOWHERE */
    const int8_t *small; /* weights of a byte, of a block that does not learn, or 0 */
    const float *scales; /* of their rows */
    uint32_t unpacked;   /* place in the arena where a few of them become floats */
#ifdef TPS_WITH_ROWS
    uint8_t adds; /* whether the output is added, before the activation, to what lies in its place */
#endif
} tps_block;

/* Weights of a block that does not learn lie in flash, from which an AVR reads one at a time; so do codes
 * that do not learn. On other processors both are 0. */
#define TPS_FIXED(b) (TPS_AVR && (b)->fixed)
#define TPS_FIXED_CODES(b) (TPS_AVR && (b)->learned == TPS_NOWHERE)
#define TPS_OF(b, place) (TPS_FIXED(b) ? TPS_NUMBER(place) : *(place))

/* z plus the products of x with numbers in flash, `apart` from one to the next, in the order of x */
TPS_FN float tps_fixed_sum(const float *w, uint32_t apart, const float *x, uint32_t count, float z)
{
    uint32_t k;
    for (k = 0; k < count; k++) z += TPS_NUMBER(w + k * apart) * x[k];
    return z;
}

/* Some sums of that kind, whose numbers begin `next` behind one another: z += W x, or W^T x */
TPS_FN void tps_add_fixed(const float *w, uint32_t next, uint32_t apart, uint32_t sums, const float *x,
                          uint32_t count, float *z)
{
    for (; sums; sums--, w += next, z++) *z = tps_fixed_sum(w, apart, x, count, *z);
}

/* Number i of the code of a class, as it was drawn or as it has been learned */
TPS_HOT float tps_code_now(const tps_block *b, const float *weights, uint32_t member, uint32_t i)
{
#ifdef TPS_WITH_LEARNED_CODES
    if (b->learned != TPS_NOWHERE) return weights[b->learned + member * b->codes->size + i];
#endif
    (void)weights;
    return tps_code(b->codes, member, i);
}

/* The codes of all classes, one behind the other, or 0 if they are computed */
TPS_HOT const float *tps_code_table(const tps_block *b, const float *weights)
{
#ifdef TPS_WITH_LEARNED_CODES
    if (b->learned != TPS_NOWHERE) return weights + b->learned;
#endif
    (void)weights;
    return b->codes->distribution == TPS_TABLE ? b->codes->table : 0;
}

TPS_HOT float tps_activate(const tps_block *b, float z)
{
    switch (b->activation) {
    case TPS_RELU: return z > 0.0f ? z : 0.0f;
    case TPS_LEAKY_RELU: return z > 0.0f ? z : z * b->slope;
    case TPS_RELU6: return z > 6.0f ? 6.0f : z > 0.0f ? z : 0.0f;
#ifdef TPS_WITH_TANH
    case TPS_TANH: return tps_tanh(z);
#endif
#ifdef TPS_WITH_SIGMOID
    case TPS_SIGMOID: return tps_sigmoid(z);
#endif
    default: return z;
    }
}

/* sigma'(z), from y = sigma(z) */
TPS_HOT float tps_slope(const tps_block *b, float y)
{
    switch (b->activation) {
    case TPS_RELU: return y > 0.0f ? 1.0f : 0.0f;
    case TPS_LEAKY_RELU: return y > 0.0f ? 1.0f : b->slope;
    case TPS_RELU6: return y > 0.0f && y < 6.0f ? 1.0f : 0.0f;
    case TPS_TANH: return 1.0f - y * y;
    case TPS_SIGMOID: return y * (1.0f - y);
    default: return 1.0f;
    }
}

/* z += W x, where the rows of W begin `apart` numbers apart. Four rows read x together; the sum of
 * each runs in the order of x, as if it were alone. No loop is empty. */
TPS_ONCE void tps_add_rows(const float *w, uint32_t apart, uint32_t rows, const float *x, uint32_t count,
                           float *z)
{
    for (; rows >= 4; rows -= 4, w += apart, z += 4) {
        const float *w0 = w, *w1 = w + apart, *w2 = w1 + apart, *w3 = w2 + apart, *p = x;
        float z0 = z[0], z1 = z[1], z2 = z[2], z3 = z[3];
        uint32_t k = count;
        w = w3;
        do {
            float value = *p++;
            z0 += *w0++ * value;
            z1 += *w1++ * value;
            z2 += *w2++ * value;
            z3 += *w3++ * value;
        } while (--k);
        z[0] = z0;
        z[1] = z1;
        z[2] = z2;
        z[3] = z3;
    }
    for (; rows; rows--, w += apart) {
        const float *w0 = w, *p = x;
        float z0 = *z;
        uint32_t k = count;
        do z0 += *w0++ * *p++;
        while (--k);
        *z++ = z0;
    }
}

/* z += W^T e: four columns at a time, each in the order of the rows */
TPS_ONCE void tps_add_columns(const float *w, uint32_t apart, uint32_t rows, const float *e, uint32_t count,
                              float *z)
{
    for (; count >= 4; count -= 4, w += 4, z += 4) {
        const float *p = e, *row = w;
        float z0 = z[0], z1 = z[1], z2 = z[2], z3 = z[3];
        uint32_t k = rows;
        do {
            float value = *p++;
            z0 += value * row[0];
            z1 += value * row[1];
            z2 += value * row[2];
            z3 += value * row[3];
            row += apart;
        } while (--k);
        z[0] = z0;
        z[1] = z1;
        z[2] = z2;
        z[3] = z3;
    }
    for (; count; count--, w++) {
        const float *p = e, *row = w;
        float z0 = *z;
        uint32_t k = rows;
        do {
            z0 += *p++ * *row;
            row += apart;
        } while (--k);
        *z++ = z0;
    }
}

#ifdef TPS_SGD
/* W -= steps x^T: four rows read x together. */
TPS_ONCE void tps_move_rows(float *w, uint32_t apart, uint32_t rows, const float *x, uint32_t count,
                            const float *steps)
{
    for (; rows >= 4; rows -= 4, w += apart, steps += 4) {
        const float s0 = steps[0], s1 = steps[1], s2 = steps[2], s3 = steps[3], *p = x;
        float *w0 = w, *w1 = w + apart, *w2 = w1 + apart, *w3 = w2 + apart;
        uint32_t k = count;
        w = w3;
        do {
            float value = *p++;
            *w0++ -= s0 * value;
            *w1++ -= s1 * value;
            *w2++ -= s2 * value;
            *w3++ -= s3 * value;
        } while (--k);
    }
    for (; rows; rows--, w += apart) {
        const float s0 = *steps++, *p = x;
        float *w0 = w;
        uint32_t k = count;
        do *w0++ -= s0 * *p++;
        while (--k);
    }
}
#endif

#ifdef TPS_WITH_ROWS
#define TPS_ADDS(b) ((b)->adds)
#else
#define TPS_ADDS(b) 0
#endif

/* y = sigma(W x + b) of one sample */
TPS_HOT void tps_dense(const tps_block *b, const float *weights, const float *x, float *y)
{
    uint32_t unit;
    for (unit = 0; unit < b->units && !TPS_ADDS(b); unit++) y[unit] = 0.0f;
    if (TPS_FIXED(b)) tps_add_fixed(weights + b->weight, b->inputs, 1, b->units, x, b->inputs, y);
    else tps_add_rows(weights + b->weight, b->inputs, b->units, x, b->inputs, y);
    for (unit = 0; unit < b->units; unit++)
        y[unit] = tps_activate(b, b->bias == TPS_NOWHERE ? y[unit] : y[unit] + TPS_OF(b, weights + (b->bias + unit)));
}

/* The weights and the bias of one unit, from its dz in every sample of the batch */
TPS_HOT void tps_move_dense(const tps_block *b, const tps_rate *r, float *weights, uint32_t unit,
                            const float *x, const float *dz, uint32_t batch)
{
    const uint32_t inputs = b->inputs, first = b->weight + unit * inputs;
    uint32_t k, l, n, lanes;
    float sums[8], g;
    if (batch <= 2)
        for (k = 0; k < inputs; k++) {
            for (g = 0.0f, n = 0; n < batch; n++) g += dz[n] * x[n * inputs + k];
            tps_move(r, weights, first + k, g);
        }
    else
        for (k = 0; k < inputs; k += lanes) {
            lanes = inputs - k < 8 ? inputs - k : 8;
            for (l = 0; l < lanes; l++) sums[l] = 0.0f;
            tps_add_columns(x + k, inputs, batch, dz, lanes, sums);
            for (l = 0; l < lanes; l++) tps_move(r, weights, first + k + l, sums[l]);
        }
    if (b->bias == TPS_NOWHERE) return;
    for (g = 0.0f, n = 0; n < batch; n++) g += dz[n];
    tps_move(r, weights, b->bias + unit, g);
}
