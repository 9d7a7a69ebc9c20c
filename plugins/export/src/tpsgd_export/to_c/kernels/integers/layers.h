/* Integer kernels: dense layers that learn through a readout in int8 or int16 weights.
 *
 * A number v with binary point p is v / 2^p. Weights saturate at the limit of their layer, which is
 * so small that no sum of products leaves 2^30; biases have the point of these sums and saturate at
 * 2^30. So nothing overflows an int32. No float, no libc, no 64-bit division. */

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

struct tps_int_maps; /* of a convolution: kernels/integers/maps.h */

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

/* v 2^shift within the limit, for a shift of 0 or more */
TPS_INT_FN int32_t tps_grow(int32_t v, int32_t shift, int32_t limit)
{
    const int32_t most = shift > 30 ? 0 : limit >> shift;
    return v > most ? limit : v < -most ? -limit : v ? v * ((int32_t)1 << shift) : 0;
}

/* v / 2^shift, rounded up with the probability of its fraction by a random number; |v| <= 2^30, and
 * the shift is 1 to 30 */
TPS_INT_HOT int32_t tps_rounded(int32_t v, int32_t shift, uint32_t number)
{
#ifdef TPS_ROUND_TO_NEAREST
    number = UINT32_C(0x80000000);
#endif
    return tps_floor(v + (int32_t)(number >> (32 - shift)), shift);
}

TPS_INT_FN int32_t tps_round(int32_t v, int32_t shift, uint32_t *random)
{
    for (; v && shift > 0; shift -= 30) v = tps_rounded(v, shift < 30 ? shift : 30, *random = tps_xorshift(*random));
    return v;
}

TPS_INT_FN tps_factor tps_normalised(uint32_t value, int32_t point)
{
    const int32_t bits = tps_bits_of(value);
    tps_factor f;
    f.mantissa = (uint16_t)(bits > 14 ? value >> (bits - 14) : value << (14 - bits));
    f.point = (int16_t)(value ? point + 14 - bits : point);
    return f;
}

TPS_INT_FN tps_factor tps_product(tps_factor a, tps_factor b)
{
    return tps_normalised((uint32_t)a.mantissa * b.mantissa, a.point + b.point);
}

/* ---- forward ---- */

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
                             tps_source x, uint32_t units, int32_t *z)
{
    uint32_t j;
    for (j = 0; j < units; j++) z[j] = b ? TPS_INT_OF(l, b + j) : 0;
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
    uint32_t left, units, j;
    int32_t z[8];
    for (left = l->outputs; left; left -= units) {
        units = left < 8 ? left : 8;
        tps_int_sums(l, w, b, x, units, z);
        for (j = 0; j < units; j++) *y++ = tps_int_activate(l, z[j]);
        w += units * l->inputs;
        if (b) b += units;
    }
}

TPS_INT_FN void tps_int_logits(const tps_int_layer *l, const TPS_WEIGHT *w, const int32_t *b,
                               tps_source x, uint32_t classes, int32_t *z)
{
    tps_int_sums(l, w, b, x, classes, z);
}

/* A tanh shrinks D by 1 - y^2; the derivative of a ReLU is in the factors of units above 0 and below. */
TPS_INT_FN int32_t tps_int_slope(int32_t y, int32_t D)
{
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
    for (c = 0; c < classes; c++) {
        e[c] = (int32_t)((((uint32_t)e[c] << 15) + total / 2) / total);
        if (e[c] > 32767 && c != label) e[c] = 32767; /* an error has 16 bits */
    }
    e[label] -= (int32_t)1 << TPS_ERROR_POINT;
    log = (int32_t)right + tps_log2(total);
    return (log * 2839) >> 12; /* times ln 2 */
}

/* ---- the class codes of a readout ---- */

/* Bit i of the codes and seven more; behind the last code lies a byte more. */
TPS_INT_HOT uint32_t tps_bits(const uint8_t *codes, uint32_t i)
{
    codes += i >> 3;
    return (TPS_BYTE(codes) | (uint32_t)TPS_BYTE(codes + 1) << 8) >> (i & 7);
}

#define TPS_BIT(bits, k) ((int32_t)((bits) >> (k) & 1))

/* The sum of those y whose codes, from bit i on, are +1; as words, two at a time */
TPS_INT_LOOP int32_t tps_int_chosen(const uint8_t *codes, uint32_t i, const int16_t *y, uint32_t count)
{
    int32_t sum = 0;
    uint32_t bits;
    for (; count >= 8; count -= 8, i += 8, y += 8) {
        bits = tps_bits(codes, i);
#ifdef TPS_WORDS
        bits = (bits & 0xFF) | bits << 15;
        sum = tps_two_products(TPS_LOAD(y), bits & TPS_ONES, sum);
        sum = tps_two_products(TPS_LOAD(y + 2), bits >> 2 & TPS_ONES, sum);
        sum = tps_two_products(TPS_LOAD(y + 4), bits >> 4 & TPS_ONES, sum);
        sum = tps_two_products(TPS_LOAD(y + 6), bits >> 6 & TPS_ONES, sum);
#else
        sum += y[0] * TPS_BIT(bits, 0);
        sum += y[1] * TPS_BIT(bits, 1);
        sum += y[2] * TPS_BIT(bits, 2);
        sum += y[3] * TPS_BIT(bits, 3);
        sum += y[4] * TPS_BIT(bits, 4);
        sum += y[5] * TPS_BIT(bits, 5);
        sum += y[6] * TPS_BIT(bits, 6);
        sum += y[7] * TPS_BIT(bits, 7);
#endif
    }
    if (count) for (bits = tps_bits(codes, i); count; count--, bits >>= 1) sum += *y++ * TPS_BIT(bits, 0);
    return sum;
}

/* Sums over codes of +1 and -1: twice those over +1 less those over all */
TPS_INT_FN void tps_int_read_out(const tps_int_layer *l, const int16_t *y, uint32_t features,
                                 uint32_t classes, int32_t *sums)
{
    int32_t all = 0;
    uint32_t c, j;
    for (j = 0; j < features; j++) all += y[j];
    for (c = 0; c < classes; c++) sums[c] = 2 * tps_int_chosen(l->codes, c * features, y, features) - all;
}

/* D: the derivatives by eight features, whose codes begin at bit i; as words, of two classes at a time */
TPS_INT_LOOP void tps_int_feedback(const uint8_t *codes, uint32_t i, uint32_t features,
                                   const int32_t *e, uint32_t classes, int32_t *D)
{
    int32_t D0 = 0, D1 = 0, D2 = 0, D3 = 0, D4 = 0, D5 = 0, D6 = 0, D7 = 0, all = 0;
#ifdef TPS_WORDS
    for (; classes > 1; classes -= 2, i += 2 * features, e += 2) {
        const uint32_t bits = (tps_bits(codes, i) & 0xFF) | tps_bits(codes, i + features) << 16;
        const uint32_t errors = tps_lower_halves((uint32_t)e[0], (uint32_t)e[1]);
        all = tps_two_products(errors, TPS_ONES, all);
        D0 = tps_two_products(errors, bits & TPS_ONES, D0);
        D1 = tps_two_products(errors, bits >> 1 & TPS_ONES, D1);
        D2 = tps_two_products(errors, bits >> 2 & TPS_ONES, D2);
        D3 = tps_two_products(errors, bits >> 3 & TPS_ONES, D3);
        D4 = tps_two_products(errors, bits >> 4 & TPS_ONES, D4);
        D5 = tps_two_products(errors, bits >> 5 & TPS_ONES, D5);
        D6 = tps_two_products(errors, bits >> 6 & TPS_ONES, D6);
        D7 = tps_two_products(errors, bits >> 7 & TPS_ONES, D7);
    }
#endif
    for (; classes; classes--, i += features) {
        const uint32_t bits = tps_bits(codes, i);
        const int32_t error = *e++;
        all += error;
        D0 += error * TPS_BIT(bits, 0);
        D1 += error * TPS_BIT(bits, 1);
        D2 += error * TPS_BIT(bits, 2);
        D3 += error * TPS_BIT(bits, 3);
        D4 += error * TPS_BIT(bits, 4);
        D5 += error * TPS_BIT(bits, 5);
        D6 += error * TPS_BIT(bits, 6);
        D7 += error * TPS_BIT(bits, 7);
    }
    D[0] = 2 * D0 - all;
    D[1] = 2 * D1 - all;
    D[2] = 2 * D2 - all;
    D[3] = 2 * D3 - all;
    D[4] = 2 * D4 - all;
    D[5] = 2 * D5 - all;
    D[6] = 2 * D6 - all;
    D[7] = 2 * D7 - all;
}

/* ---- the update ---- */

/* A derivative D becomes d = D mantissa / 2^down, rounded at random. */
typedef struct {
    int32_t mantissa, down;
} tps_pace;

/* What the units of a layer learn with: the input, how rows move, and the pace of units above 0 and
 * below. Where steps are small, as most are, rows have a shift of 16; of a large rate, less. */
typedef struct {
    tps_source x;
    tps_rows rows;
    tps_pace above, below;
    int32_t bits; /* of an input, at most */
    uint32_t *random;
} tps_int_lesson;

TPS_INT_FN tps_int_lesson tps_int_lesson_of(const tps_int_layer *l, tps_source x, tps_factor above,
                                            uint32_t *random)
{
    const tps_factor below = tps_product(above, l->slope);
    const int32_t point = TPS_ERROR_POINT + l->input_point - l->weight_point;
    tps_int_lesson of;
    of.x = x;
    of.bits = x.bytes ? 8 : 11;
    of.rows.inputs = l->inputs;
    of.rows.limit = l->limit;
    of.rows.bits = x.bytes ? tps_move_by_inputs_bits(x.bytes, l->inputs) : tps_move_by_units_bits(x.units, l->inputs);
    of.rows.shift = tps_clip(above.point + point - of.bits, 16);
    if (of.rows.shift < 0) of.rows.shift = 0;
    of.above.mantissa = above.mantissa;
    of.below.mantissa = below.mantissa;
    of.above.down = above.point + point - of.rows.shift;
    of.below.down = below.point + point - of.rows.shift;
    of.random = random;
    return of;
}

/* d of a move; |d| times an input stays below 2^30, where an input has so many bits. */
TPS_INT_HOT int32_t tps_int_d(int32_t D, const tps_pace *pace, int32_t bits, uint32_t *random)
{
    const int32_t v = tps_within_17_bits(D) * pace->mantissa;
    if (!v) return 0;
    if (pace->down >= bits && pace->down <= 30)
        return tps_rounded(v, pace->down, *random = tps_xorshift(*random));
    return pace->down <= 0 ? tps_grow(v, -pace->down, TPS_BIAS_LIMIT >> bits)
                           : tps_clip(tps_round(v, pace->down, random), TPS_BIAS_LIMIT >> bits);
}

/* Units learn: D are the derivatives of the loss by their outputs y, over the gain; they become d of
 * the moves. Without y, all units count as above 0. */
TPS_INT_FN void tps_int_learn(const tps_int_layer *l, TPS_WEIGHT *w, int32_t *b, const tps_int_lesson *of,
                              uint32_t units, int32_t *D, const int16_t *y)
{
    const int32_t shift = of->rows.shift - 2 * l->input_point;
    uint32_t j, random = *of->random;
    for (j = 0; j < units; j++) {
        int32_t d = tps_int_d(D[j], y && y[j] <= 0 ? &of->below : &of->above, of->bits, &random);
        D[j] = d;
        if (!b || !d) continue;
        if (shift > 0) d = tps_rounded(d, shift, random = tps_xorshift(random));
        else if (shift < 0) d = tps_grow(d, -shift, TPS_BIAS_LIMIT);
        b[j] = tps_within_31_bits(b[j] - d);
    }
    if (of->x.bytes) random = tps_move_by_inputs(w, of->x.bytes, &of->rows, D, units, random);
    else random = tps_move_by_units(w, of->x.units, &of->rows, D, units, random);
    *of->random = random;
}

/* A hidden layer lowers the loss of its readout; the loss comes back. */
TPS_INT_FN int32_t tps_int_learn_hidden(const tps_int_layer *l, TPS_WEIGHT *w, int32_t *b,
                                        tps_source x, const int16_t *y, uint32_t classes,
                                        uint32_t label, uint16_t rate, int32_t *e, uint32_t *random)
{
    const tps_factor up = tps_product(l->gain, tps_normalised(rate, 16));
    const tps_int_lesson lesson = tps_int_lesson_of(l, x, up, random);
    int32_t D[8], loss;
    uint32_t j, k, units;
    tps_int_read_out(l, y, l->outputs, classes, e);
    loss = tps_int_softmax(e, classes, label, l->log_gain);
    for (j = 0; j < l->outputs; j += units, w += units * l->inputs, y += units) {
        units = l->outputs - j < 8 ? l->outputs - j : 8;
        tps_int_feedback(l->codes, j, l->outputs, e, classes, D);
        if (l->activation == TPS_INT_TANH)
            for (k = 0; k < units; k++) D[k] = tps_int_slope(y[k], D[k]);
        tps_int_learn(l, w, b ? b + j : 0, &lesson, units, D, y);
    }
    return loss;
}

/* The last layer lowers the cross-entropy of its logits, which lie in e. */
TPS_INT_FN int32_t tps_int_learn_head(const tps_int_layer *l, TPS_WEIGHT *w, int32_t *b,
                                      tps_source x, uint32_t classes, uint32_t label, uint16_t rate, int32_t *e,
                                      uint32_t *random)
{
    const tps_int_lesson lesson = tps_int_lesson_of(l, x, tps_normalised(rate, 16), random);
    const int32_t loss = tps_int_softmax(e, classes, label, l->log_gain);
    tps_int_learn(l, w, b, &lesson, classes, e, 0);
    return loss;
}

/* A number of some low bytes, with its sign */
TPS_INT_FN int32_t tps_signed(uint32_t number, uint32_t bytes)
{
    uint32_t sign = UINT32_C(1) << (8 * bytes - 1), v = (number ^ sign) - sign;
    return v > UINT32_C(0x7FFFFFFF) ? -1 - (int32_t)~v : (int32_t)v;
}
