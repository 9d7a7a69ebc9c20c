/* A sequence begins. Call it before the first time step, also after an error. */
void net_start(net_arena *a);

/* Learn from a sequence: net_read for each time step, as soon as its NET_INPUT numbers are there,
 * then net_finish, which moves the weights. The label is from 0 on; bit i of `blocks`: block i + 1
 * learns; NET_ALL_BLOCKS: all. Both are the same in all calls for a sequence. `loss` gets a number
 * for every block.
 * Numbers that are not finite or above 1e9, a rate below 0 or above 1,000, and a label that is no
 * class are refused: the error stays until net_start, and the weights stay as they were.
 * NET_DIVERGED: a number left that range, and no block learned. NET_BAD_ORDER: net_look and
 * net_read in one sequence, or no net_start.
 * NET_MEASURED: a readout first measures the size of its states over a whole sequence. The weights
 * stay as they were; read the same sequence again, or go on with the next. */
int net_read(const net_state *s, net_arena *a, const float *x, uint16_t label, uint32_t blocks);
int net_finish(net_state *s, net_arena *a, uint16_t label, float lr, uint32_t blocks, float *loss);

/* Read a time step without learning, and the logits after the steps so far (while learning, too):
 * as many as there are classes now. */
int net_look(const net_state *s, net_arena *a, const float *x);
int net_logits(const net_state *s, net_arena *a, float *logits);
