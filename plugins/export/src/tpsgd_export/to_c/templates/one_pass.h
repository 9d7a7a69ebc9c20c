$licence
$summary
#ifndef ${N}_H
#define ${N}_H

#include <stdint.h>
@encoder #include "${n}_net.h" /* the frozen encoder, whose weights are in flash */

#define ${N}_INPUT $inputs /* numbers of a sample */
@encoder #define ${N}_ENCODED $encoded /* numbers that the encoder gives */
#define ${N}_UNITS $units /* features, and a 1 */
#define ${N}_CLASSES $outputs /* at most */
#define ${N}_RAM_BYTES $ram /* of ${n}_state and ${n}_arena */

/* 1: all samples count the same. Below 1, older samples count that much less after a sample whose scores are
 * all wrong, and as much as before after one whose scores are right. It may be defined on the compiler's
 * command line, too. */
#ifndef ${N}_FORGETTING
#define ${N}_FORGETTING $forgetting
#endif

/* What a function returns */
#define ${N}_OK 0
#define ${N}_BAD_INPUT 1
#define ${N}_BAD_LABEL 2
#define ${N}_BAD_WEIGHT 3
#define ${N}_NO_SPACE 4

typedef struct { /* all that lasts */
    float triangle[$triangle]; /* column j: U[0..j-1][j], then D[j]; the inverse of the features' sums is U D U^T */
    float weights[$numbers]; /* class by class, a number for every unit */
    uint32_t fingerprint, classes, samples, checksum;
} ${n}_state;

typedef struct { /* scratch: nothing in it lasts */
    float h[${N}_UNITS], gain[${N}_UNITS], errors[${N}_CLASSES];
@encoder     ${n}_net_state encoder;
@encoder     ${n}_net_arena net;
} ${n}_arena;

/* A compiler refuses this line if the bytes are not those that were planned. */
typedef char ${n}_ram_is_as_planned[sizeof(${n}_state) + sizeof(${n}_arena) == ${N}_RAM_BYTES ? 1 : -1];

#ifdef __cplusplus
extern "C" {
#endif

/* Nothing has been learned. Call it first, or ${n}_check. */
void ${n}_begin(${n}_state *s);

@scaled $columns
@scaled /* x <- (x - shift) / scale, in place: from numbers as they are measured to numbers as the head reads them.
@scaled  * Call it before ${n}_learn and ${n}_scores. */
@scaled void ${n}_scale(float *x);
@scaled 
/* Learn from one sample, and need it never again: the weights are those of ridge regression over all
 * samples so far. There is no learning rate. The sample counts as `weight` samples, 1 as a rule: a class
 * that came late has few samples, and is recognised sooner if these count more. Numbers that are not finite
 * or above 1e9, a label that is no class and a weight below 1e-6 or above 1e6 are refused, and nothing
 * changes. */
int ${n}_learn(${n}_state *s, ${n}_arena *a, const float *x, uint16_t label, float weight);

/* Scores of one sample, as many as there are classes now, near 1 for its class and near 0 for others. */
int ${n}_scores(const ${n}_state *s, ${n}_arena *a, const float *x, float *scores);

/* How many classes there are now, and one more, up to ${N}_CLASSES: ${N}_NO_SPACE. A new class changes no
 * score of the others, and learns as if it had been there from the start. */
uint32_t ${n}_classes(const ${n}_state *s);
int ${n}_add_class(${n}_state *s);

/* The scores of one sample, and the class of the largest one. */
static inline int ${n}_predict(const ${n}_state *s, ${n}_arena *a, const float *x, float *scores, uint16_t *label)
{
    const uint32_t count = ${n}_classes(s);
    uint32_t c, best = 0;
    const int error = ${n}_scores(s, a, x, scores);
    for (c = 1; c < count && !error; c++)
        if (scores[c] > scores[best]) best = c;
    *label = (uint16_t)best;
    return error;
}

@named /* Names of the classes by their labels, "" for those that may come; on an AVR in flash, where strcpy_P
@named  * reads them */
@named #if defined(__AVR__)
@named extern const char ${n}_class_names[${N}_CLASSES][$width];
@named #else
@named extern const char *const ${n}_class_names[${N}_CLASSES];
@named #endif
@named 
/* Call ${n}_seal before the bytes of a state are written to flash, and ${n}_check after they were read: 1 if
 * they are whole and belong to this head, else 0. */
void ${n}_seal(${n}_state *s);
int ${n}_check(const ${n}_state *s);

#ifdef __cplusplus
}
#endif
#endif
