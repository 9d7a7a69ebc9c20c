/* Rows of integer weights: sums of products with inputs, and moves by stochastic rounding.
 *
 * The program that includes this file defines TPS_WEIGHT (int8_t or int16_t) and TPS_INPUT (int8_t
 * or uint8_t). On processors with the DSP instructions of a Cortex-M4, four weights of a byte are read,
 * multiplied and moved as words; TPS_PLAIN keeps to plain C, which learns the same bits.
 * TPS_ROUND_TO_NEAREST turns stochastic rounding off: then a step below half a unit moves no weight. */

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
#define TPS_INT_LOOP static __attribute__((noinline, unused)) /* registers of its own */
#else
#define TPS_INT_HOT static
#define TPS_INT_LOOP static
#endif

TPS_INT_HOT int32_t tps_clip(int32_t v, int32_t limit)
{
    return v > limit ? limit : v < -limit ? -limit : v;
}

/* From -limit - 1 to limit, as integers of some bits saturate */
TPS_INT_HOT int32_t tps_within(int32_t v, int32_t limit)
{
    return v > limit ? limit : v < -limit - 1 ? -limit - 1 : v;
}

/* The same with one instruction: 17 bits, and 31 */
#if defined(__GNUC__) && defined(__ARM_FEATURE_SAT)
#define TPS_SATURATED(NAME, BITS, LIMIT)                       \
    TPS_INT_HOT int32_t NAME(int32_t v)                        \
    {                                                          \
        int32_t r;                                             \
        __asm__("ssat %0, #" BITS ", %1" : "=r"(r) : "r"(v));  \
        return r;                                              \
    }
#else
#define TPS_SATURATED(NAME, BITS, LIMIT) \
    TPS_INT_HOT int32_t NAME(int32_t v) { return tps_within(v, LIMIT); }
#endif
TPS_SATURATED(tps_within_17_bits, "17", 65535)
TPS_SATURATED(tps_within_31_bits, "31", 1073741823)

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

/* The random number after x: xorshift32, of a state that is never 0 */
TPS_INT_HOT uint32_t tps_xorshift(uint32_t x)
{
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    return x;
}

/* The noise of a row is a linear congruential generator from a random number on: each of its words
 * has 16 bits for a weight in its lower half, and 16 for another in its upper half. */
#ifdef TPS_ROUND_TO_NEAREST
#define TPS_AT_RANDOM 0
#define TPS_NOISE_FACTOR 0
#define TPS_NOISE_TERM UINT32_C(0x80008000)
#else
#define TPS_AT_RANDOM 1
#define TPS_NOISE_FACTOR UINT32_C(747796405)
#define TPS_NOISE_TERM UINT32_C(2891336453)
#endif
#define tps_next_noise(noise, factor, term) ((noise) * (factor) + (term))

/* A constant in a register, which a loop would load again each time */
#if defined(__GNUC__)
TPS_INT_HOT uint32_t tps_register(uint32_t v)
{
    __asm__("" : "+r"(v));
    return v;
}
#define TPS_REGISTER(v) tps_register(v)
#else
#define TPS_REGISTER(v) (v)
#endif

/* How rows of weights move: each against its d times the inputs, over 2^shift; the shift is 0 to 16.
 * No input is larger than 2^bits, no weight than the limit. */
typedef struct {
    uint32_t inputs;
    int32_t shift, bits, limit;
} tps_rows;

/* ---- words of four bytes and of two halves ---- */

#if defined(__GNUC__) && defined(__ARM_FEATURE_SIMD32) && !defined(__ARM_BIG_ENDIAN) && !defined(TPS_PLAIN)
#define TPS_WORDS
#define TPS_BY_WORDS(...) __VA_ARGS__
#define TPS_ONES UINT32_C(0x00010001)

typedef struct __attribute__((packed, may_alias)) { uint32_t word; } tps_anywhere;
#define TPS_LOAD(place) (((const tps_anywhere *)(const void *)(place))->word)
#define TPS_STORE(place, value) (((tps_anywhere *)(void *)(place))->word = (value))

#define TPS_OF_ONE(NAME, TEXT)                               \
    TPS_INT_HOT uint32_t NAME(uint32_t a)                    \
    {                                                        \
        uint32_t r;                                          \
        __asm__(TEXT : "=r"(r) : "r"(a));                    \
        return r;                                            \
    }
#define TPS_OF_TWO(NAME, TEXT)                               \
    TPS_INT_HOT uint32_t NAME(uint32_t a, uint32_t b)        \
    {                                                        \
        uint32_t r;                                          \
        __asm__(TEXT : "=r"(r) : "r"(a), "r"(b));            \
        return r;                                            \
    }
#define TPS_OF_THREE(NAME, OPERATION)                        \
    TPS_INT_HOT int32_t NAME(uint32_t a, uint32_t b, int32_t c) \
    {                                                        \
        int32_t r;                                           \
        __asm__(OPERATION " %0, %1, %2, %3" : "=r"(r) : "r"(a), "r"(b), "r"(c)); \
        return r;                                            \
    }
TPS_OF_ONE(tps_signed_02, "sxtb16 %0, %1")            /* bytes 0 and 2 as halves */
TPS_OF_ONE(tps_signed_13, "sxtb16 %0, %1, ror #8")    /* bytes 1 and 3 */
TPS_OF_ONE(tps_unsigned_02, "uxtb16 %0, %1")
TPS_OF_ONE(tps_unsigned_13, "uxtb16 %0, %1, ror #8")
TPS_OF_TWO(tps_lower_halves, "pkhbt %0, %1, %2, lsl #16") /* of a below, of b above */
TPS_OF_TWO(tps_upper_halves, "pkhtb %0, %2, %1, asr #16")
TPS_OF_TWO(tps_add_bytes, "qadd8 %0, %1, %2")         /* saturates */
TPS_OF_THREE(tps_two_products, "smlad")               /* a0 b0 + a1 b1 + c, of halves */
TPS_OF_THREE(tps_product_bb, "smlabb")                /* a0 b0 + c */
TPS_OF_THREE(tps_product_bt, "smlabt")                /* a0 b1 + c */

/* Two words with inputs 0 and 2, and 1 and 3, as halves */
typedef struct { uint32_t even, odd; } tps_quad;

TPS_INT_HOT tps_quad tps_quad_of_inputs(const TPS_INPUT *x)
{
    const uint32_t word = TPS_LOAD(x);
    tps_quad q;
    q.even = (TPS_INPUT)-1 < 0 ? tps_signed_02(word) : tps_unsigned_02(word);
    q.odd = (TPS_INPUT)-1 < 0 ? tps_signed_13(word) : tps_unsigned_13(word);
    return q;
}

TPS_INT_HOT tps_quad tps_quad_of_units(const int16_t *x)
{
    const uint32_t first = TPS_LOAD(x), second = TPS_LOAD(x + 2);
    tps_quad q;
    q.even = tps_lower_halves(first, second);
    q.odd = tps_upper_halves(first, second);
    return q;
}

TPS_INT_HOT int32_t tps_four_products(uint32_t weights, tps_quad x, int32_t sum)
{
    return tps_two_products(tps_signed_13(weights), x.odd,
                            tps_two_products(tps_signed_02(weights), x.even, sum));
}

/* Loops over quads of inputs, one at least: z += w x, of four rows that lie `inputs` apart and read x
 * together, or of one; and w + floor((g x + noise) / 2^16), a step within a byte. */
#define TPS_QUADS_OF(SUMS, MOVE, TYPE, QUAD)                                                    \
    TPS_INT_LOOP void SUMS##_4(const int8_t *w, const TYPE *x, uint32_t inputs, int32_t *z)     \
    {                                                                                           \
        const TYPE *const end = x + (inputs & ~3u);                                             \
        const int8_t *w2 = w + 2 * inputs;                                                      \
        int32_t z0 = z[0], z1 = z[1], z2 = z[2], z3 = z[3];                                     \
        do {                                                                                    \
            const tps_quad q = QUAD(x);                                                         \
            z1 = tps_four_products(TPS_LOAD(w + inputs), q, z1);                                \
            z0 = tps_four_products(TPS_LOAD(w), q, z0);                                         \
            z3 = tps_four_products(TPS_LOAD(w2 + inputs), q, z3);                               \
            z2 = tps_four_products(TPS_LOAD(w2), q, z2);                                        \
            x += 4, w += 4, w2 += 4;                                                            \
        } while (x != end);                                                                     \
        z[0] = z0;                                                                              \
        z[1] = z1;                                                                              \
        z[2] = z2;                                                                              \
        z[3] = z3;                                                                              \
    }                                                                                           \
    TPS_INT_LOOP int32_t SUMS##_1(const int8_t *w, const TYPE *x, uint32_t inputs, int32_t z)   \
    {                                                                                           \
        const TYPE *const end = x + (inputs & ~3u);                                             \
        do {                                                                                    \
            z = tps_four_products(TPS_LOAD(w), QUAD(x), z);                                     \
            x += 4, w += 4;                                                                     \
        } while (x != end);                                                                     \
        return z;                                                                               \
    }                                                                                           \
    TPS_INT_LOOP uint32_t MOVE(int8_t *w, const TYPE *x, uint32_t inputs, uint32_t g,           \
                               uint32_t noise)                                                  \
    {                                                                                           \
        const TYPE *const end = x + (inputs & ~3u);                                             \
        const uint32_t a = TPS_REGISTER(TPS_NOISE_FACTOR), c = TPS_REGISTER(TPS_NOISE_TERM);    \
        do {                                                                                    \
            const tps_quad q = QUAD(x);                                                         \
            int32_t v0, v1, v2, v3;                                                             \
            noise = tps_next_noise(noise, a, c);                                                \
            v0 = tps_product_bb(g, q.even, (int32_t)(noise & 0xFFFF));                          \
            v2 = tps_product_bt(g, q.even, (int32_t)(noise >> 16));                             \
            noise = tps_next_noise(noise, a, c);                                                \
            v1 = tps_product_bb(g, q.odd, (int32_t)(noise & 0xFFFF));                           \
            v3 = tps_product_bt(g, q.odd, (int32_t)(noise >> 16));                              \
            TPS_STORE(w, tps_add_bytes(TPS_LOAD(w),                                             \
                tps_unsigned_02(tps_upper_halves((uint32_t)v0, (uint32_t)v2))                   \
                | tps_unsigned_02(tps_upper_halves((uint32_t)v1, (uint32_t)v3)) << 8));         \
            x += 4, w += 4;                                                                     \
        } while (x != end);                                                                     \
        return noise;                                                                           \
    }
TPS_QUADS_OF(tps_quads_of_inputs, tps_move_quads_by_inputs, TPS_INPUT, tps_quad_of_inputs)
TPS_QUADS_OF(tps_quads_of_units, tps_move_quads_by_units, int16_t, tps_quad_of_units)
#else
#define TPS_BY_WORDS(...)
#endif

/* ---- sums ---- */

/* z += w x; four rows read x together. */
#define TPS_SUMS_OF(NAME, TYPE, QUADS)                                                          \
    TPS_INT_LOOP void NAME##_each(const TPS_WEIGHT *w, const TYPE *x, uint32_t inputs,          \
                                  uint32_t count, int32_t *z)                                   \
    {                                                                                           \
        const TPS_WEIGHT *w1 = w + inputs, *w2 = w1 + inputs, *w3 = w2 + inputs;                \
        int32_t z0 = z[0], z1 = z[1], z2 = z[2], z3 = z[3];                                     \
        do {                                                                                    \
            const int32_t value = *x++;                                                         \
            z0 += *w++ * value;                                                                 \
            z1 += *w1++ * value;                                                                \
            z2 += *w2++ * value;                                                                \
            z3 += *w3++ * value;                                                                \
        } while (--count);                                                                      \
        z[0] = z0;                                                                              \
        z[1] = z1;                                                                              \
        z[2] = z2;                                                                              \
        z[3] = z3;                                                                              \
    }                                                                                           \
    TPS_INT_FN void NAME(const TPS_WEIGHT *w, const TYPE *x, uint32_t inputs, uint32_t rows,    \
                         int32_t *z)                                                            \
    {                                                                                           \
        uint32_t first = 0, k;                                                                  \
        TPS_BY_WORDS(if (sizeof(TPS_WEIGHT) == 1) first = inputs & ~3u;)                        \
        for (; rows >= 4; rows -= 4, z += 4, w += 4 * inputs) {                                 \
            TPS_BY_WORDS(if (first) QUADS##_4((const int8_t *)w, x, inputs, z);)                \
            if (first < inputs) NAME##_each(w + first, x + first, inputs, inputs - first, z);   \
        }                                                                                       \
        for (; rows; rows--, z++, w += inputs) {                                                \
            TPS_BY_WORDS(if (first) *z = QUADS##_1((const int8_t *)w, x, inputs, *z);)          \
            for (k = first; k < inputs; k++) *z += (int32_t)w[k] * x[k]; /* an int may have 16 bits */ \
        }                                                                                       \
    }
TPS_SUMS_OF(tps_sums_of_inputs, TPS_INPUT, tps_quads_of_inputs)
TPS_SUMS_OF(tps_sums_of_units, int16_t, tps_quads_of_units)

/* ---- moves ---- */

/* How many bits a number has, its zeros in front left out */
TPS_INT_HOT int32_t tps_bits_of(uint32_t v)
{
#if defined(__GNUC__) && defined(__ARM_FEATURE_CLZ)
    return v ? 32 - __builtin_clz(v) : 0;
#else
    int32_t bits = 0;
    if (v >> 16) bits = 16, v >>= 16;
    if (v >> 8) bits += 8, v >>= 8;
    for (; v; v >>= 1) bits++;
    return bits;
#endif
}

/* v, or -v - 1 where that is above 0 */
TPS_INT_HOT uint32_t tps_size(int32_t v) { return (uint32_t)(v < 0 ? -1 - v : v); }

/* One weight of a row: 16 bits of noise round its move. */
TPS_INT_HOT void tps_move_weight(TPS_WEIGHT *w, int32_t x, int32_t d, const tps_rows *of, uint32_t noise)
{
    const int32_t step = tps_floor((int32_t)((noise & 0xFFFF) >> (16 - of->shift)) - d * x, of->shift);
    *w = (TPS_WEIGHT)tps_within(*w + step, of->limit);
}

/* Rows of weights, each with random numbers of its own.
 * - Where every weight moves by a unit or not at all, with a probability |d x| / 2^16 below 1 / 2^g,
 *   one random number is enough for 2^g of them: its upper bits choose a weight, and the others say
 *   with 2^g times its probability whether it moves. Not more than one of them does.
 * - Otherwise each weight is rounded. Those of four inputs share two words of noise. They are moved as
 *   words while no step leaves a byte: |d| times the largest input, 2^BITS, stays below 127 2^16. */
#define TPS_MOVE_OF(NAME, TYPE, BITS, QUADS)                                                    \
    TPS_INT_LOOP void NAME##_rarely(TPS_WEIGHT *w, const TYPE *x, int32_t d, int32_t g,         \
                                    const tps_rows *of, uint32_t noise)                         \
    {                                                                                           \
        const uint32_t a = TPS_REGISTER(TPS_NOISE_FACTOR), c = TPS_REGISTER(TPS_NOISE_TERM);    \
        const uint32_t inputs = of->inputs;                                                     \
        uint32_t first;                                                                         \
        for (first = 0; first < inputs; first += (uint32_t)1 << g) {                            \
            uint32_t k;                                                                         \
            int32_t p;                                                                          \
            noise = tps_next_noise(noise, a, c);                                                \
            k = first + (noise >> (32 - g));                                                    \
            if (k >= inputs) continue;                                                          \
            p = d * x[k];                                                                       \
            if (noise << g < (uint32_t)(p < 0 ? -p : p) << (16 + g))                            \
                w[k] = (TPS_WEIGHT)tps_within(p < 0 ? w[k] + 1 : w[k] - 1, of->limit);          \
        }                                                                                       \
    }                                                                                           \
    TPS_INT_LOOP void NAME##_each(TPS_WEIGHT *w, const TYPE *x, int32_t d, uint32_t inputs,     \
                                  const tps_rows *of, uint32_t noise)                           \
    {                                                                                           \
        for (;; inputs -= 4, w += 4, x += 4) {                                                  \
            const uint32_t even = tps_next_noise(noise, TPS_NOISE_FACTOR, TPS_NOISE_TERM);      \
            noise = tps_next_noise(even, TPS_NOISE_FACTOR, TPS_NOISE_TERM);                     \
            tps_move_weight(w, x[0], d, of, even);                                              \
            if (inputs == 1) return;                                                            \
            tps_move_weight(w + 1, x[1], d, of, noise);                                         \
            if (inputs == 2) return;                                                            \
            tps_move_weight(w + 2, x[2], d, of, even >> 16);                                    \
            if (inputs == 3) return;                                                            \
            tps_move_weight(w + 3, x[3], d, of, noise >> 16);                                   \
            if (inputs == 4) return;                                                            \
        }                                                                                       \
    }                                                                                           \
    TPS_INT_FN uint32_t NAME(TPS_WEIGHT *w, const TYPE *x, const tps_rows *of, const int32_t *D, \
                             uint32_t rows, uint32_t random)                                    \
    {                                                                                           \
        const uint32_t inputs = of->inputs;                                                     \
        const int32_t spare = of->shift < 16 ? 0 : 16 - of->bits;                               \
        for (; rows; rows--, w += inputs) {                                                     \
            const int32_t d = *D++, g = spare - tps_bits_of((uint32_t)(d < 0 ? -d : d));        \
            uint32_t first = 0, noise;                                                          \
            if (!d) continue;                                                                   \
            noise = random = tps_xorshift(random);                                              \
            if (g > 1) {                                                                        \
                if (TPS_AT_RANDOM) NAME##_rarely(w, x, d, g, of, noise);                        \
                continue;                                                                       \
            }                                                                                   \
            TPS_BY_WORDS(                                                                       \
                if (sizeof(TPS_WEIGHT) == 1 && of->limit == 127 && of->shift == 16 && inputs > 3 \
                    && d <= 127 << (16 - BITS) && d >= -(127 << (16 - BITS))) {                 \
                    noise = QUADS((int8_t *)w, x, inputs, (uint32_t)-d, noise);                 \
                    first = inputs & ~3u;                                                       \
                })                                                                              \
            if (first < inputs) NAME##_each(w + first, x + first, d, inputs - first, of, noise); \
        }                                                                                       \
        return random;                                                                          \
    }                                                                                           \
    /* bits, of which 2^bits is no less than any of the inputs */                               \
    TPS_INT_FN int32_t NAME##_bits(const TYPE *x, uint32_t inputs)                              \
    {                                                                                           \
        const TYPE *const end = x + inputs;                                                     \
        uint32_t all = 0;                                                                       \
        for (; end - x >= 4; x += 4)                                                            \
            all |= tps_size(x[0]) | tps_size(x[1]) | tps_size(x[2]) | tps_size(x[3]);           \
        for (; x != end; x++) all |= tps_size(*x);                                              \
        return tps_bits_of(all);                                                                \
    }
TPS_MOVE_OF(tps_move_by_inputs, TPS_INPUT, 8, tps_move_quads_by_inputs)
TPS_MOVE_OF(tps_move_by_units, int16_t, 11, tps_move_quads_by_units)
