/* ---- a block: layer, activation, pools, local loss ---- */

#define TPS_NOWHERE UINT32_MAX

enum { TPS_NONE, TPS_RELU, TPS_LEAKY_RELU, TPS_TANH, TPS_SIGMOID };
enum { TPS_HEAD, TPS_FROZEN, TPS_READOUT, TPS_L2, TPS_L1, TPS_INNER };
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
} tps_block;

/* Number i of the code of a class, as it was drawn or as it has been learned */
TPS_FN float tps_code_now(const tps_block *b, const float *weights, uint32_t member, uint32_t i)
{
#ifdef TPS_WITH_LEARNED_CODES
    if (b->learned != TPS_NOWHERE) return weights[b->learned + member * b->codes->size + i];
#endif
    (void)weights;
    return tps_code(b->codes, member, i);
}

TPS_FN float tps_activate(const tps_block *b, float z)
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
TPS_FN float tps_slope(const tps_block *b, float y)
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

/* y = sigma(W x + b) of one sample */
TPS_FN void tps_dense(const tps_block *b, const float *weights, const float *x, float *y)
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

/* The weights and the bias of one unit, from its dz in every sample of the batch */
TPS_FN void tps_move_dense(const tps_block *b, const tps_rate *r, float *weights, uint32_t unit,
                           const float *x, const float *dz, uint32_t batch)
{
    uint32_t k, n, first = b->weight + unit * b->inputs;
    float g;
    for (k = 0; k < b->inputs; k++) {
        for (g = 0.0f, n = 0; n < batch; n++) g += dz[n] * x[n * b->inputs + k];
        tps_move(r, weights, first + k, g);
    }
    if (b->bias == TPS_NOWHERE) return;
    for (g = 0.0f, n = 0; n < batch; n++) g += dz[n];
    tps_move(r, weights, b->bias + unit, g);
}
