uint32_t net_classes(const net_state *s)
{
    (void)s;
@spare     return s->classes;
@!spare     return ${classes}u;
}

int net_add_class(net_state *s)
{
@spare     if (s->classes >= NET_CLASSES) return NET_NO_SPACE;
@spare     s->classes++;
@spare     return NET_OK;
@!spare     (void)s;
@!spare     return NET_NO_SPACE;
}

uint16_t net_best(const net_state *s, const float *logits)
{
    uint32_t c, count = net_classes(s), best = 0;
    if (count == 1) return logits[0] > 0; /* yes or no */
    for (c = 1; c < count; c++)
        if (logits[c] > logits[best]) best = c;
    return (uint16_t)best;
}

@!recurrent int net_predict(const net_state *s, net_arena *a, const float *x, float *logits, uint16_t *label)
@!recurrent {
@!recurrent     int error = net_forward(s, a, x, logits);
@!recurrent     *label = error ? 0 : net_best(s, logits);
@!recurrent     return error;
@!recurrent }
@!recurrent 
