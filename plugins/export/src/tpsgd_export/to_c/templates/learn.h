/* Logits of one sample, as many as there are classes now. */
int net_forward(const net_state *s, net_arena *a, const float *x, float *logits);

/* Learn from NET_BATCH samples, one after another in x, and their labels, from 0 on. Bit i of
 * `blocks`: block i + 1 learns; NET_ALL_BLOCKS: all. `loss` gets a number for every block.
 * Numbers that are not finite or above 1e9, a rate below 0 or above 1,000, and a label that is no
 * class are refused, and the weights stay as they were. NET_DIVERGED: a block's output left that
 * range, and neither it nor a later block learned. */
int net_step(net_state *s, net_arena *a, const float *x, const uint16_t *labels, float lr,
             uint32_t blocks, float *loss);
