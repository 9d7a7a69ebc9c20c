$licence
#include "$n.h"
@flash 
@flash $flash
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off", "no-tree-loop-distribute-patterns") /* no memset */
#endif

static float ${n}_dot(const float *a, const float *b, uint32_t count)
{
    float even = 0.0f, odd = 0.0f;
    for (; count >= 4; count -= 4, a += 4, b += 4) {
        even += a[0] * b[0];
        odd += a[1] * b[1];
        even += a[2] * b[2];
        odd += a[3] * b[3];
    }
    if (count >= 2) {
        even += *a++ * *b++;
        odd += *a++ * *b++;
    }
    return count & 1u ? even + odd + *a * *b : even + odd;
}

typedef union { float f; uint32_t u; } ${n}_bits;

static int ${n}_usable(const float *x, uint32_t count)
{
    uint32_t i;
    ${n}_bits limit, number;
    limit.f = 1.0e9f;
    for (i = 0; i < count; i++) {
        number.f = x[i];
        if ((number.u & 0x7FFFFFFFu) > limit.u) return 0;
    }
    return 1;
}

@named #if defined(__AVR__)
@named const char ${n}_class_names[${N}_CLASSES][$width] TPS_IN_FLASH = {
@named #else
@named const char *const ${n}_class_names[${N}_CLASSES] = {
@named #endif
@named $names
@named 
@scaled $tables
@scaled void ${n}_scale(float *x)
@scaled {
@scaled     uint32_t i;
@scaled     for (i = 0; i < $inputs; i++)
@scaled         x[i] = (x[i] - TPS_NUMBER(${n}_shift + $index)) / TPS_NUMBER(${n}_scales + $index);
@scaled }
@scaled 
@random /* 32 signs of the projection: they are computed again for each sample, and stored nowhere */
@random static uint32_t ${n}_signs(uint32_t word)
@random {
@random     uint32_t z = word + $stream;
@random     z = (z ^ z >> 16) * 0x7FEB352Du;
@random     z = (z ^ z >> 15) * 0x846CA68Bu;
@random     return z ^ z >> 16;
@random }
@random 
@random /* x, or -x if the first of the signs is set */
@random static inline float ${n}_signed(float x, uint32_t signs)
@random {
@random     ${n}_bits number;
@random     number.f = x;
@random     number.u ^= signs & 0x80000000u;
@random     return number.f;
@random }
@random 
@random /* ReLUs of sums of the inputs, each with a random sign; then a 1 */
@random static int ${n}_features(const float *x, float *h)
@random {
@random     uint32_t unit, word = 0;
@random     if (!${n}_usable(x, ${read}u)) return 0;
@random     for (unit = 0; unit < ${N}_UNITS - 1u; unit++) {
@random         const float *from = x, *end = x + $read;
@random         float z = 0.0f;
@random         while (from < end) {
@random             uint32_t signs = ${n}_signs(word++), left = (uint32_t)(end - from);
@random             for (left = left < 32u ? left : 32u; left >= 4u; left -= 4u, from += 4, signs <<= 4) {
@random                 z += ${n}_signed(from[0], signs);
@random                 z += ${n}_signed(from[1], signs << 1);
@random                 z += ${n}_signed(from[2], signs << 2);
@random                 z += ${n}_signed(from[3], signs << 3);
@random             }
@random             for (; left; left--, signs <<= 1) z += ${n}_signed(*from++, signs);
@random         }
@random         h[unit] = z > 0.0f ? z * $scale : 0.0f;
@random     }
@random     h[unit] = 1.0f;
@random     return ${n}_usable(h, ${N}_UNITS);
@random }
@!random /* The inputs, then a 1 */
@!random static int ${n}_features(const float *x, float *h)
@!random {
@!random     uint32_t i;
@!random     for (i = 0; i < ${N}_UNITS - 1u; i++) h[i] = x[i] * $scale;
@!random     h[i] = 1.0f;
@!random     return ${n}_usable(x, ${N}_UNITS - 1u) && ${n}_usable(h, ${N}_UNITS);
@!random }

/* Fills a->h. */
static int ${n}_read(${n}_arena *a, const float *x)
{
@encoder     float unused[1];
@encoder     ${n}_net_begin(&a->encoder);
@encoder     if (${n}_net_forward(&a->encoder, &a->net, x, unused)) return ${N}_BAD_INPUT;
@encoder     x = a->net.numbers + $output;
    return ${n}_features(x, a->h) ? ${N}_OK : ${N}_BAD_INPUT;
}

void ${n}_begin(${n}_state *s)
{
    uint32_t i, j;
    float *u = s->triangle;
    for (j = 0; j < ${N}_UNITS; j++) {
        for (i = 0; i < j; i++) *u++ = 0.0f;
        *u++ = $start;
    }
    for (i = 0; i < sizeof s->weights / sizeof(float); i++) s->weights[i] = 0.0f;
    s->fingerprint = $fingerprint;
    s->classes = ${classes}u;
    s->samples = s->checksum = 0;
}

static inline void ${n}_turn(float *u, float *gain, float back, float v)
{
    const float old = *u;
    *u = old + *gain * back;
    *gain += old * v;
}

/* U D U^T after the features h, by Bierman: D stays above 0 whatever float32 rounds. Older samples count
 * `kept` of what they did, and this one `weight`. D never grows beyond $most: it would, in directions that
 * no sample shows any more. Fills a->gain, which is divided by the result, kept / weight + h^T U D U^T h. */
static float ${n}_update(${n}_state *s, ${n}_arena *a, float kept, float weight)
{
    const float *h = a->h;
    float sum = kept / weight, *u = s->triangle, *gain = a->gain;
    uint32_t i, j;
    for (j = 0; j < ${N}_UNITS; u += ++j) {
        const float f = h[j] + ${n}_dot(u, h, j), v = u[j] * f, next = sum + f * v, back = -f / sum;
        for (i = 0; i + 4 <= j; i += 4) {
            ${n}_turn(u + i, gain + i, back, v);
            ${n}_turn(u + i + 1, gain + i + 1, back, v);
            ${n}_turn(u + i + 2, gain + i + 2, back, v);
            ${n}_turn(u + i + 3, gain + i + 3, back, v);
        }
        for (; i < j; i++) ${n}_turn(u + i, gain + i, back, v);
        gain[j] = v;
        u[j] *= sum / (next * kept);
        if (u[j] > $most) u[j] = $most;
        sum = next;
    }
    return sum;
}

/* The scores of the features, less 1 for the sample's class; their squares add up to the result. */
static float ${n}_errors(const ${n}_state *s, ${n}_arena *a, uint32_t label)
{
    float squares = 0.0f;
    uint32_t c;
    for (c = 0; c < s->classes; c++) {
        const float e = ${n}_dot(s->weights + c * ${N}_UNITS, a->h, ${N}_UNITS) - (c == label ? 1.0f : 0.0f);
        a->errors[c] = e;
        squares += e * e;
    }
    return squares;
}

/* Whether a weight is from 1e-6 to 1e6, by its bits: a NaN is refused whatever a compiler assumes. */
static int ${n}_counts(float weight)
{
    ${n}_bits low, high, number;
    low.f = 1.0e-6f;
    high.f = 1.0e6f;
    number.f = weight;
    return number.u >= low.u && number.u <= high.u;
}

int ${n}_learn(${n}_state *s, ${n}_arena *a, const float *x, uint16_t label, float weight)
{
    uint32_t c, i;
    float *w = s->weights, wrong, sum;
    if (label >= s->classes) return ${N}_BAD_LABEL;
    if (!${n}_counts(weight)) return ${N}_BAD_WEIGHT;
    if (${n}_read(a, x)) return ${N}_BAD_INPUT;
    wrong = ${n}_errors(s, a, label);
    sum = ${n}_update(s, a, 1.0f - (1.0f - ${N}_FORGETTING) * (wrong < 1.0f ? wrong : 1.0f), weight);
    for (c = 0; c < s->classes; c++, w += ${N}_UNITS) {
        const float e = a->errors[c] / sum;
        for (i = 0; i < ${N}_UNITS; i++) w[i] -= e * a->gain[i];
    }
    s->samples++;
    return ${N}_OK;
}

int ${n}_scores(const ${n}_state *s, ${n}_arena *a, const float *x, float *scores)
{
    uint32_t c;
    if (${n}_read(a, x)) return ${N}_BAD_INPUT;
    for (c = 0; c < s->classes; c++) scores[c] = ${n}_dot(s->weights + c * ${N}_UNITS, a->h, ${N}_UNITS);
    return ${N}_OK;
}

uint32_t ${n}_classes(const ${n}_state *s) { return s->classes; }

int ${n}_add_class(${n}_state *s)
{
    if (s->classes >= ${N}_CLASSES) return ${N}_NO_SPACE;
    s->classes++;
    return ${N}_OK;
}

/* CRC-32 of a state without its checksum */
static uint32_t ${n}_crc(const ${n}_state *s)
{
    const uint8_t *byte = (const uint8_t *)s, *end = (const uint8_t *)&s->checksum;
    uint32_t crc = 0xFFFFFFFFu;
    int bit;
    for (; byte < end; byte++)
        for (crc ^= *byte, bit = 0; bit < 8; bit++) crc = crc & 1u ? crc >> 1 ^ 0xEDB88320u : crc >> 1;
    return ~crc;
}

void ${n}_seal(${n}_state *s) { s->checksum = ${n}_crc(s); }

int ${n}_check(const ${n}_state *s)
{
    return s->fingerprint == $fingerprint && s->classes >= ${classes}u && s->classes <= ${N}_CLASSES &&
           s->checksum == ${n}_crc(s);
}
