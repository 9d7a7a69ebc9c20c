/* ---- numbers: small polynomials, the same bits on every IEEE 754 machine ---- */

#include <stdint.h>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off", "no-tree-loop-distribute-patterns") /* no memset */
#endif
#if defined(__GNUC__)
#define TPS_FN static __attribute__((unused))
#else
#define TPS_FN static
#endif
/* In a net of few blocks, what is TPS_HOT is written out for each block, with its constants. */
#if defined(__GNUC__) && defined(TPS_WITH_CONSTANTS) && !defined(__AVR__)
#define TPS_HOT static inline __attribute__((always_inline, unused))
#define TPS_ONCE static __attribute__((noinline, unused))
#else
#define TPS_HOT TPS_FN
#define TPS_ONCE TPS_FN
#endif

typedef union { float f; uint32_t u; } tps_bits;

#define TPS_LARGEST 1.0e9f /* of an input or an output */
#define TPS_FASTEST 1.0e3f /* learning rate */

/* Whether every number of x is between -TPS_LARGEST and TPS_LARGEST; NaN is not. */
TPS_FN int tps_usable(const float *x, uint32_t count)
{
    tps_bits limit, number;
    limit.f = TPS_LARGEST;
    for (; count; count--) {
        number.f = *x++;
        if ((number.u & 0x7FFFFFFFu) > limit.u) return 0;
    }
    return 1;
}

/* Whether a learning rate is from 0 to TPS_FASTEST. NaN is not, by its bits: under -Ofast a compiler
 * takes comparisons with NaN for true. */
TPS_FN int tps_is_rate(float lr)
{
    tps_bits limit, number;
    limit.f = TPS_FASTEST;
    number.f = lr;
    return number.u <= limit.u || number.u == 0x80000000u;
}

TPS_FN float tps_exp(float x)
{
    tps_bits power;
    float n, z;
    int32_t k;
    if (x < -87.0f) return 0.0f;
    if (x > 88.0f) x = 88.0f;
    n = x * 1.44269504f;
    k = (int32_t)(n + (n < 0.0f ? -0.5f : 0.5f));
    n = (float)k;
    x -= n * 0.693359375f; /* log 2 in two numbers, of which the first has few digits */
    x -= n * -2.12194440e-4f;
    z = 1.9875691500e-4f * x + 1.3981999507e-3f;
    z = z * x + 8.3334519073e-3f;
    z = z * x + 4.1665795894e-2f;
    z = z * x + 1.6666665459e-1f;
    z = z * x + 5.0000001201e-1f;
    z = z * (x * x) + x + 1.0f;
    power.u = (uint32_t)(k + 127) << 23;
    return z * power.f;
}

TPS_FN float tps_log(float x) /* of a positive number that is not denormal */
{
    tps_bits number;
    float e, z, y;
    number.f = x;
    e = (float)((int32_t)(number.u >> 23) - 126);
    number.u = (number.u & 0x007FFFFFu) | 0x3F000000u; /* in [0.5, 1) */
    x = number.f;
    if (x < 0.70710678f) {
        e -= 1.0f;
        x += x;
    }
    x -= 1.0f;
    z = x * x;
    y = 7.0376836292e-2f * x - 1.1514610310e-1f;
    y = y * x + 1.1676998740e-1f;
    y = y * x - 1.2420140846e-1f;
    y = y * x + 1.4249322787e-1f;
    y = y * x - 1.6668057665e-1f;
    y = y * x + 2.0000714765e-1f;
    y = y * x - 2.4999993993e-1f;
    y = y * x + 3.3333331174e-1f;
    y = y * x * z + e * -2.12194440e-4f - 0.5f * z;
    return x + y + e * 0.693359375f;
}

TPS_FN float tps_tanh(float x)
{
    float a = x < 0.0f ? -x : x, z;
    if (a > 9.0f) return x < 0.0f ? -1.0f : 1.0f;
    if (a < 0.625f) {
        z = x * x;
        a = -5.70498872745e-3f * z + 2.06390887954e-2f;
        a = a * z - 5.37397155531e-2f;
        a = a * z + 1.33314422036e-1f;
        a = a * z - 3.33332819422e-1f;
        return a * z * x + x;
    }
    z = 1.0f - 2.0f / (tps_exp(2.0f * a) + 1.0f);
    return x < 0.0f ? -z : z;
}

TPS_FN float tps_sigmoid(float x) { return 1.0f / (1.0f + tps_exp(-x)); }

TPS_FN float tps_sqrt(float x)
{
    tps_bits number;
    float r, unit = 1.0f;
    int i;
    if (x <= 0.0f) return 0.0f;
    for (; x < 1.0e-30f; x *= 1.0e12f) unit *= 1.0e-6f; /* its inverse would be too large */
    number.f = x;
    number.u = 0x5F3759DFu - (number.u >> 1);
    for (r = number.f, i = 0; i < 3; i++) r *= 1.5f - 0.5f * x * r * r;
    return x * r * unit;
}
