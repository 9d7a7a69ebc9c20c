/* The class with the largest logit; of one output 1 if it is above 0, else 0. */
uint16_t net_best(const net_state *s, const $number *logits);

@!recurrent /* net_forward, and the class with the largest logit. */
@!recurrent int net_predict(const net_state *s, net_arena *a, const $input *x, $number *logits, uint16_t *label);
@!recurrent 
