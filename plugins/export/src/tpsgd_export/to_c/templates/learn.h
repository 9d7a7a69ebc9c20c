@!of_numbers /* Logits of one sample, as many as there are classes now. */
@of_numbers /* The NET_NUMBERS numbers of one sample, in the units of the labels. */
int net_forward(const net_state *s, net_arena *a, const float *x, float *logits);

@!of_numbers /* Learn from NET_BATCH samples, one after another in x, and their labels, from 0 on. Bit i of
@of_numbers /* Learn from NET_BATCH samples, one after another in x, and NET_NUMBERS numbers of each. Bit i of
 * `blocks`: block i + 1 learns; NET_ALL_BLOCKS: all. `loss` gets a number for every block.
@!of_numbers  * Numbers that are not finite or above 1e9, a rate below 0 or above 1,000, and a label that is no
@!of_numbers  * class are refused, and the weights stay as they were. NET_DIVERGED: a block's output left that
@!of_numbers  * range, and neither it nor a later block learned. */
@of_numbers  * The loss is of standardised numbers. Numbers that are not finite or above 1e9, and a rate below 0
@of_numbers  * or above 1,000, are refused, and the weights stay as they were. NET_DIVERGED: a block's output
@of_numbers  * left that range, and neither it nor a later block learned. */
int net_step(net_state *s, net_arena *a, const float *x, const $label *labels, float lr,
             uint32_t blocks, float *loss);

/* One block's part of net_step, so that a watchdog, or something else, can be served in between.
 * Begin with *part = 0, and call it with the same arguments until it returns another number than
 * NET_MORE: that of net_step. In between nothing else may be done with the arena. NET_BAD_ORDER:
 * *part was no number of it. */
#define NET_BAD_ORDER 8
#define NET_MORE 10
int net_step_part(net_state *s, net_arena *a, const float *x, const $label *labels, float lr,
                  uint32_t blocks, float *loss, uint32_t *part);
