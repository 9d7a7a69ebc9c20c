/* Integer kernels: dense layers that learn through a readout in int8 or int16 weights.
 *
 * A number v with binary point p is v / 2^p. Weights saturate at the limit of their layer, which is
 * so small that no sum of products leaves 2^30; biases have the point of these sums and saturate at
 * 2^30. So nothing overflows an int32. No float, no libc, no 64-bit division.
 * The program that includes this file defines TPS_WEIGHT (int8_t or int16_t) and TPS_INPUT (int8_t
 * or uint8_t). TPS_ROUND_TO_NEAREST turns stochastic rounding off: then a step below half a unit
 * moves no weight. On digits (64-32-10) int8 weights reached 94.8 % with stochastic rounding, 83.8 %
 * with nearest rounding, and 77.6 % with a hidden layer that does not learn. */

#ifndef TPS_UNUSED
#if defined(__GNUC__)
#define TPS_UNUSED __attribute__((unused))
#else
#define TPS_UNUSED
#endif
#endif
#define TPS_INT_FN static TPS_UNUSED
#if defined(__GNUC__)
#define TPS_INT_HOT static inline __attribute__((always_inline, unused)) /* a few instructions */
#else
#define TPS_INT_HOT static
#endif

#define TPS_BIAS_LIMIT 1073741823   /* 2^30 - 1 */
#define TPS_ACTIVATION_LIMIT 2047   /* of hidden units: 11 bits and a sign */
#define TPS_ERROR_POINT 15          /* of softmax(z) - y* */
#define TPS_LOG_POINT 12            /* of logarithms and of the loss */
#define TPS_FAR 131072              /* 32 powers of two: a probability of 0 */

enum { TPS_INT_NONE, TPS_INT_LEAKY, TPS_INT_TANH };

/* mantissa / 2^point, with a mantissa of 14 bits, 8192 to 16383, or 0 */
typedef struct {
    uint16_t mantissa;
    int16_t point;
} tps_factor;

struct tps_int_maps; /* of a convolution: kernels/integer_maps.h */

/* The constants of a layer. They lie in flash. */
typedef struct {
    uint16_t inputs, outputs;
    int16_t limit;        /* of a weight, or 0: it does not learn, and lies in flash */
    uint8_t activation;
    int8_t weight_point, input_point, output_point;
    tps_factor slope;     /* below 0; the mantissa of a ReLU is 0 */
    tps_factor gain;      /* of the logits */
    tps_factor log_gain;  /* gain log2(e) 2^TPS_LOG_POINT, for sums instead of logits */
    const uint8_t *codes; /* a bit for each class and unit: 1 is +1, 0 is -1 */
    const struct tps_int_maps *maps; /* or 0: dense */
} tps_int_layer;

/* How far the weights of a layer move: d times an input, over 2^shift. */
typedef struct {
    int32_t d;
    int32_t shift;
} tps_move;

TPS_INT_HOT int32_t tps_clip(int32_t v, int32_t limit)
{
    return v > limit ? limit : v < -limit ? -limit : v;
}

/* The floor of v / 2^shift for a shift below 31; C leaves >> of negative numbers open, gcc and clang
 * shift the sign in. */
TPS_INT_HOT int32_t tps_floor(int32_t v, int32_t shift)
{
#if defined(__GNUC__)
    return v >> shift;
#else
    return v < 0 ? -1 - ((-1 - v) >> shift) : v >> shift;
#endif
}

/* v 2^shift within the limit */
TPS_INT_FN int32_t tps_grow(int32_t v, int32_t shift, int32_t limit)
{
    for (; shift > 0 && v <= limit && v >= -limit; shift--) v *= 2;
    return tps_clip(v, limit);
}

TPS_INT_HOT uint32_t tps_xorshift(uint32_t *random)
{
    uint32_t x = *random;
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    return *random = x;
}

/* v / 2^shift, rounded up with the probability of its fraction; |v| <= 2^30, shift from 0 to 30 */
TPS_INT_HOT int32_t tps_round(int32_t v, int32_t shift, uint32_t *random)
{
    if (!shift) return v;
#ifdef TPS_ROUND_TO_NEAREST
    (void)random;
    return tps_floor(v + ((int32_t)1 << (shift - 1)), shift);
#else
    return tps_floor(v + (int32_t)(tps_xorshift(random) >> (32 - shift)), shift);
#endif
}

TPS_INT_FN int32_t tps_round_far(int32_t v, int32_t shift, uint32_t *random)
{
    for (; v && shift > 30; shift -= 30) v = tps_round(v, 30, random);
    return v ? tps_round(v, shift, random) : 0;
}

TPS_INT_FN tps_factor tps_normalised(uint32_t value, int32_t point)
{
    tps_factor f;
    for (; value > 16383; value >>= 1) point--;
    for (; value && value < 8192; value <<= 1) point++;
    f.mantissa = (uint16_t)value;
    f.point = (int16_t)point;
    return f;
}

TPS_INT_FN tps_factor tps_product(tps_factor a, tps_factor b)
{
    return tps_normalised((uint32_t)a.mantissa * b.mantissa, a.point + b.point);
}

/* ---- forward ---- */

/* z += w x; four rows read x together. */
#define TPS_SUMS_OF(NAME, TYPE)                                                                 \
    TPS_INT_FN void NAME(const TPS_WEIGHT *w, const TYPE *x, uint32_t inputs, uint32_t rows,    \
                         int32_t *z)                                                            \
    {                                                                                           \
        for (; rows >= 4; rows -= 4, z += 4) {                                                  \
            const TPS_WEIGHT *w1 = w + inputs, *w2 = w1 + inputs, *w3 = w2 + inputs;            \
            int32_t z0 = z[0], z1 = z[1], z2 = z[2], z3 = z[3];                                 \
            const TYPE *p = x;                                                                  \
            uint32_t k = inputs;                                                                \
            do {                                                                                \
                const int32_t value = *p++;                                                     \
                z0 += *w++ * value;                                                             \
                z1 += *w1++ * value;                                                            \
                z2 += *w2++ * value;                                                            \
                z3 += *w3++ * value;                                                            \
            } while (--k);                                                                      \
            w = w3;                                                                             \
            z[0] = z0;                                                                          \
            z[1] = z1;                                                                          \
            z[2] = z2;                                                                          \
            z[3] = z3;                                                                          \
        }                                                                                       \
        for (; rows; rows--) {                                                                  \
            const TYPE *p = x;                                                                  \
            uint32_t k = inputs;                                                                \
            int32_t z0 = *z;                                                                    \
            do z0 += (int32_t)*w++ * *p++; /* an int may have 16 bits */                        \
            while (--k);                                                                        \
            *z++ = z0;                                                                          \
        }                                                                                       \
    }
TPS_SUMS_OF(tps_sums_of_inputs, TPS_INPUT)
TPS_SUMS_OF(tps_sums_of_units, int16_t)

/* Weights of a layer that does not learn lie in flash, from which an AVR reads one at a time. On other
 * processors the first is 0. */
#define TPS_INT_FIXED(l) (TPS_AVR && !(l)->limit)
#define TPS_INT_OF(l, place) (TPS_INT_FIXED(l) ? TPS_INTEGER(place) : *(place))

/* What a layer reads: the bytes of a sample, or the units of the layer before it. */
typedef struct {
    const TPS_INPUT *bytes;
    const int16_t *units;
} tps_source;

/* z += w x of weights in flash */
TPS_INT_FN void tps_fixed_sums(const TPS_WEIGHT *w, tps_source x, uint32_t inputs, uint32_t rows, int32_t *z)
{
    uint32_t k;
    for (; rows; rows--, w += inputs, z++)
        for (k = 0; k < inputs; k++)
            *z += (int32_t)TPS_INTEGER(w + k) * (x.bytes ? x.bytes[k] : x.units[k]);
}

/* z of some units, b + w x */
TPS_INT_FN void tps_int_sums(const tps_int_layer *l, const TPS_WEIGHT *w, const int32_t *b,
                             tps_source x, uint32_t first, uint32_t units, int32_t *z)
{
    uint32_t j;
    for (j = 0; j < units; j++) z[j] = b ? TPS_INT_OF(l, b + (first + j)) : 0;
    w += first * l->inputs;
    if (TPS_INT_FIXED(l)) tps_fixed_sums(w, x, l->inputs, units, z);
    else if (x.bytes) tps_sums_of_inputs(w, x.bytes, l->inputs, units, z);
    else tps_sums_of_units(w, x.units, l->inputs, units, z);
}

/* tanh(k / 16) 2^15 */
static const uint16_t tps_tanh_table[65] TPS_UNUSED TPS_IN_FLASH = {
    0, 2045, 4075, 6073, 8025, 9919, 11743, 13486, 15143, 16706, 18173, 19542, 20813, 21986,
    23066, 24054, 24956, 25776, 26519, 27191, 27797, 28341, 28830, 29268, 29660, 30010, 30322,
    30600, 30847, 31067, 31262, 31435, 31589, 31726, 31846, 31953, 32048, 32132, 32206, 32271,
    32329, 32381, 32426, 32466, 32501, 32532, 32560, 32584, 32606, 32625, 32642, 32657, 32670,
    32681, 32691, 32700, 32708, 32715, 32721, 32727, 32732, 32736, 32740, 32743, 32746};

TPS_INT_FN int32_t tps_int_tanh(int32_t z, int32_t point) /* the result has point 11 */
{
    int32_t u = z < 0 ? -z : z, k, y;
    u = point >= 12 ? u >> (point - 12) : tps_grow(u, 12 - point, 16384);
    if (u > 16383) u = 16383;
    k = u >> 8;
    y = TPS_SHORT(&tps_tanh_table[k]);
    y = y * 256 + (TPS_SHORT(&tps_tanh_table[k + 1]) - y) * (u & 255);
    y = (y + 2048) >> 12;
    if (y > TPS_ACTIVATION_LIMIT) y = TPS_ACTIVATION_LIMIT;
    return z < 0 ? -y : y;
}

/* A sum of products to the output of a unit. Below 0 a leaky ReLU rounds down: its sign stays. */
TPS_INT_FN int16_t tps_int_activate(const tps_int_layer *l, int32_t z)
{
    int32_t point = l->weight_point + l->input_point, shift = point - l->output_point;
    if (l->activation == TPS_INT_TANH) return (int16_t)tps_int_tanh(z, point);
    if (z < 0 && l->activation == TPS_INT_LEAKY) {
        z = tps_floor(z, shift);
        z = z < -65535 ? -65535 : z;
        z = tps_floor(z * l->slope.mantissa, l->slope.point);
    } else if (shift) {
        z = tps_floor(z, shift - 1);
        z = tps_floor(z + 1, 1);
    }
    return (int16_t)tps_clip(z, TPS_ACTIVATION_LIMIT);
}

TPS_INT_FN void tps_int_forward(const tps_int_layer *l, const TPS_WEIGHT *w, const int32_t *b,
                                tps_source x, int16_t *y)
{
    uint32_t first, units, j;
    int32_t z[4];
    for (first = 0; first < l->outputs; first += units) {
        units = l->outputs - first < 4 ? l->outputs - first : 4;
        tps_int_sums(l, w, b, x, first, units, z);
        for (j = 0; j < units; j++) *y++ = tps_int_activate(l, z[j]);
    }
}

TPS_INT_FN void tps_int_logits(const tps_int_layer *l, const TPS_WEIGHT *w, const int32_t *b,
                               tps_source x, uint32_t classes, int32_t *z)
{
    tps_int_sums(l, w, b, x, 0, classes, z);
}

/* The derivative of the activation is `up` or `down` for a ReLU; a tanh shrinks D by 1 - y^2. */
TPS_INT_FN int32_t tps_int_slope(const tps_int_layer *l, int32_t y, int32_t D)
{
    if (l->activation != TPS_INT_TANH) return D;
    return tps_floor(D * ((4194304 - y * y) >> 10) + 2048, 12);
}

/* ---- softmax of a few classes ---- */

/* 2^(-k / 32) 2^15 */
static const uint16_t tps_exp2_table[33] TPS_UNUSED TPS_IN_FLASH = {
    32768, 32066, 31379, 30706, 30048, 29405, 28774, 28158, 27554, 26964, 26386, 25821, 25268,
    24726, 24196, 23678, 23170, 22674, 22188, 21713, 21247, 20792, 20347, 19911, 19484, 19066,
    18658, 18258, 17867, 17484, 17109, 16743, 16384};

TPS_INT_FN uint32_t tps_exp2(uint32_t t) /* 2^-t, t with point 12; the result has point 15 */
{
    uint32_t k = (t >> 7) & 31, high = TPS_SHORT(&tps_exp2_table[k]), low = TPS_SHORT(&tps_exp2_table[k + 1]);
    high -= ((high - low) * (t & 127) + 64) >> 7;
    return t >= UINT32_C(16) << 12 ? 0 : high >> (t >> 12);
}

/* The logarithm, with point 12, of a v of 1 or more, with point 15. */
TPS_INT_FN int32_t tps_log2(uint32_t v)
{
    int32_t bit, log = 0;
    for (; v >= UINT32_C(65536); v >>= 1) log += (int32_t)1 << TPS_LOG_POINT;
    for (bit = (int32_t)1 << (TPS_LOG_POINT - 1); bit; bit >>= 1) {
        v = (v * v) >> 15;
        if (v >= UINT32_C(65536)) {
            v >>= 1;
            log += bit;
        }
    }
    return log;
}

/* How far a sum lies below the largest, as a logarithm to base 2 with point 12. */
TPS_INT_FN uint32_t tps_below(int32_t top, int32_t sum, tps_factor scale)
{
    uint64_t t = (uint32_t)top - (uint32_t)sum;
    t = (t * scale.mantissa) >> scale.point;
    return t > TPS_FAR ? TPS_FAR : (uint32_t)t;
}

/* Sums of products in e; softmax - y* comes back in e. The loss, in nats, has point 12. */
TPS_INT_FN int32_t tps_int_softmax(int32_t *e, uint32_t classes, uint32_t label, tps_factor scale)
{
    uint32_t c, total = 0, right;
    int32_t top = e[0], log;
    for (c = 1; c < classes; c++) top = e[c] > top ? e[c] : top;
    right = tps_below(top, e[label], scale);
    for (c = 0; c < classes; c++) {
        e[c] = (int32_t)tps_exp2(tps_below(top, e[c], scale));
        total += (uint32_t)e[c];
    }
    for (c = 0; c < classes; c++) e[c] = (int32_t)((((uint32_t)e[c] << 15) + total / 2) / total);
    e[label] -= (int32_t)1 << TPS_ERROR_POINT;
    log = (int32_t)right + tps_log2(total);
    return (log * 2839) >> 12; /* times ln 2 */
}

/* ---- the class codes of a readout ---- */

TPS_INT_FN void tps_int_read_out(const tps_int_layer *l, const int16_t *y,
                                 uint32_t classes, int32_t *sums)
{
    const uint32_t units = l->outputs;
    uint32_t c, j, i = 0;
    for (c = 0; c < classes; c++) {
        int32_t sum = 0;
        for (j = 0; j < units; j++, i++) sum += (TPS_BYTE(l->codes + (i >> 3)) >> (i & 7)) & 1 ? y[j] : -y[j];
        sums[c] = sum;
    }
}

TPS_INT_FN int32_t tps_int_feedback(const tps_int_layer *l, const int32_t *e,
                                    uint32_t classes, uint32_t unit)
{
    const uint32_t units = l->outputs;
    int32_t D = 0;
    for (; classes; classes--, unit += units, e++)
        D += (TPS_BYTE(l->codes + (unit >> 3)) >> (unit & 7)) & 1 ? *e : -*e;
    return D;
}

/* ---- the update ---- */

/* D times a factor as a move of weights whose inputs have `bits` bits. */
TPS_INT_FN tps_move tps_int_move(const tps_int_layer *l, int32_t D, tps_factor f, int32_t bits,
                                 uint32_t *random)
{
    tps_move m;
    m.d = tps_floor(tps_clip(D, 65535) * (int32_t)f.mantissa + ((int32_t)1 << (bits - 1)), bits);
    m.shift = TPS_ERROR_POINT + f.point + l->input_point - l->weight_point - bits;
    if (m.shift > 30) {
        m.d = tps_round_far(m.d, m.shift - 30, random);
        m.shift = 30;
    } else if (m.shift < 0) {
        m.d = tps_grow(m.d, -m.shift, TPS_BIAS_LIMIT >> bits);
        m.shift = 0;
    }
    return m;
}

TPS_INT_FN int32_t tps_int_bias(const tps_int_layer *l, int32_t b, tps_move m, uint32_t *random)
{
    int32_t shift = m.shift - 2 * l->input_point;
    int32_t d = shift < 0 ? tps_grow(m.d, -shift, TPS_BIAS_LIMIT) : tps_round(m.d, shift, random);
    return tps_clip(b - d, TPS_BIAS_LIMIT);
}

/* Move a row of weights against d times the inputs; inputs of 0 cost no random number. What does not
 * change is copied: a weight of a byte could be a part of anything that a pointer leads to. */
#define TPS_MOVE_OF(NAME, TYPE)                                                                 \
    TPS_INT_FN void NAME(const tps_int_layer *l, TPS_WEIGHT *w, const TYPE *x, tps_move m,      \
                         uint32_t *random)                                                      \
    {                                                                                           \
        const int32_t limit = l->limit;                                                         \
        uint32_t k, state = *random;                                                            \
        if (!m.d) return;                                                                       \
        for (k = l->inputs; k; k--, w++) {                                                      \
            const int32_t value = *x++;                                                         \
            if (value)                                                                          \
                *w = (TPS_WEIGHT)tps_clip(*w - tps_round(m.d * value, m.shift, &state), limit); \
        }                                                                                       \
        *random = state;                                                                        \
    }
TPS_MOVE_OF(tps_move_by_inputs, TPS_INPUT)
TPS_MOVE_OF(tps_move_by_units, int16_t)

/* One unit learns: D is the derivative of the loss by its output, over the gain. */
TPS_INT_FN void tps_int_learn(const tps_int_layer *l, TPS_WEIGHT *w, int32_t *b, tps_source x,
                              uint32_t unit, int32_t D, tps_factor f, uint32_t *random)
{
    tps_move m = tps_int_move(l, D, f, x.bytes ? 8 : 11, random);
    w += unit * l->inputs;
    if (x.bytes) tps_move_by_inputs(l, w, x.bytes, m, random);
    else tps_move_by_units(l, w, x.units, m, random);
    if (b && m.d) b[unit] = tps_int_bias(l, b[unit], m, random);
}

/* A hidden layer lowers the loss of its readout; the loss comes back. */
TPS_INT_FN int32_t tps_int_learn_hidden(const tps_int_layer *l, TPS_WEIGHT *w, int32_t *b,
                                        tps_source x, const int16_t *y, uint32_t classes,
                                        uint32_t label, uint16_t rate, int32_t *e, uint32_t *random)
{
    uint32_t j;
    tps_factor up = tps_product(l->gain, tps_normalised(rate, 16));
    tps_factor down = tps_product(up, l->slope);
    int32_t loss;
    tps_int_read_out(l, y, classes, e);
    loss = tps_int_softmax(e, classes, label, l->log_gain);
    for (j = 0; j < l->outputs; j++) {
        int32_t D = tps_int_slope(l, y[j], tps_int_feedback(l, e, classes, j));
        tps_int_learn(l, w, b, x, j, D, y[j] > 0 ? up : down, random);
    }
    return loss;
}

/* The last layer lowers the cross-entropy of its logits, which lie in e. */
TPS_INT_FN int32_t tps_int_learn_head(const tps_int_layer *l, TPS_WEIGHT *w, int32_t *b,
                                      tps_source x, uint32_t classes, uint32_t label, uint16_t rate, int32_t *e,
                                      uint32_t *random)
{
    uint32_t c;
    tps_factor f = tps_normalised(rate, 16);
    int32_t loss = tps_int_softmax(e, classes, label, l->log_gain);
    for (c = 0; c < classes; c++) tps_int_learn(l, w, b, x, c, e[c], f, random);
    return loss;
}

/* A number of some low bytes, with its sign */
TPS_INT_FN int32_t tps_signed(uint32_t number, uint32_t bytes)
{
    uint32_t sign = UINT32_C(1) << (8 * bytes - 1), v = (number ^ sign) - sign;
    return v > UINT32_C(0x7FFFFFFF) ? -1 - (int32_t)~v : (int32_t)v;
}
