$licence
/* $sizes, learns in $numbers by $rule, one sample a step.
 *
 * Functions, errors and their numbers are those of a net of floats, but for these:
 * - An input is a net_input, $kind: v stands for v / 2^NET_INPUT_POINT. net_quantise computes
 *   it, and saturates numbers that are out of range. Every input is valid: no NET_BAD_INPUT.
 * - The rate is a whole number of 65,536ths. NET_RATE(0.01) computes it while compiling, and
 *   saturates at 65535; rates that round to 0, or are no number, become 0: NET_BAD_RATE.
 * - A logit z stands for z / 2^NET_LOGIT_POINT, a loss for loss / 2^NET_LOSS_POINT nats.
 * - Weights saturate: no NET_DIVERGED. Those in net_state are integers.
 * The RAM is sizeof(net_state) + sizeof(net_arena) = NET_RAM_BYTES. */
#ifndef NET_H
#define NET_H

#include <stdint.h>

#define NET_INPUT $inputs /* numbers of a sample */
#define NET_INPUT_POINT $input_point
#define NET_CLASSES $outputs /* at most */
#define NET_BATCH 1 /* samples of a step */
#define NET_BLOCKS $blocks
#define NET_ALL_BLOCKS $all_blocks
#define NET_PARAMS $parameters
#define NET_WEIGHTS $weight_count
#define NET_BIASES $bias_count
#define NET_LOGIT_POINT $logit_point
#define NET_LOSS_POINT 12
#define NET_RAM_BYTES $ram /* of net_state and net_arena */
#define NET_RECORD_BYTES ${record_bytes}ul
#define NET_RATE(rate) \
    ((uint16_t)((rate) > 0.0 ? (rate) < 0.99999 ? (rate) * 65536.0 + 0.5 : 65535.0 : 0.0))

/* What a function returns */
$errors

typedef $kind net_input;

typedef struct {
@bias_count     int32_t biases[$bias_count];
    uint32_t random;  /* the state of xorshift32, never 0 */
    uint32_t classes; /* how many there are now */
    ${numbers}_t weights[$padded_weights];
} net_state;

typedef struct {
    int32_t e[NET_CLASSES];
@lines     int16_t lines[$lines];
@padded_outputs     int16_t y[$padded_outputs];
} net_arena;

typedef char net_ram_is_as_planned[sizeof(net_state) + sizeof(net_arena) == NET_RAM_BYTES ? 1 : -1];

#ifdef __cplusplus
extern "C" {
#endif

/* The weights that the model came with. Call it first. */
void net_begin(net_state *s);

/* Numbers to inputs, rounded and saturated; the only function with floats. NaN becomes 0. */
void net_quantise(const float *values, net_input *x);

/* Logits of one sample, as many as there are classes now. */
int net_forward(const net_state *s, net_arena *a, const net_input *x, int32_t *logits);

/* Learn from a sample and its label, from 0 on. Bit i of `blocks`: block i + 1 learns;
 * NET_ALL_BLOCKS: all. `loss` gets a number for every block, or is 0. A rate of 0 and a label that
 * is no class are refused, and the weights stay as they were. */
int net_step(net_state *s, net_arena *a, const net_input *x, const uint16_t *labels,
             uint16_t rate, uint32_t blocks, int32_t *loss);

/* One block's part of net_step, so that a watchdog, or something else, can be served in between.
 * Begin with *part = 0, and call it with the same arguments until it returns another number than
 * NET_MORE: that of net_step. In between nothing else may be done with the arena. NET_BAD_ORDER:
 * *part was no number of it. */
#define NET_BAD_ORDER 8
#define NET_MORE 10
int net_step_part(net_state *s, net_arena *a, const net_input *x, const uint16_t *labels,
                  uint16_t rate, uint32_t blocks, int32_t *loss, uint32_t *part);

/* How many classes there are now, and one more, up to NET_CLASSES: NET_NO_SPACE. The new class
 * changes no output of the others. */
uint32_t net_classes(const net_state *s);
int net_add_class(net_state *s);

$best$records
#ifdef __cplusplus
}
#endif

#endif
