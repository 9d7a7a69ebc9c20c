/* x <- (x - shift) / scale for the NET_INPUT numbers of $what, in place: from
 * numbers as they are measured to numbers as the model was trained on. Call it before any function
 * that reads x. */
void net_scale(float *x);

