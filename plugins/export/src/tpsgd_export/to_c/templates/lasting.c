/* The optimizer begins anew. */
static void net_forget(net_state *s)
{
@moments     uint32_t i;
@moments     for (i = 0; i < sizeof s->moments / sizeof(float); i++) s->moments[i] = 0.0f;
@ticks     for (i = 0; i < sizeof s->ticks / sizeof(float); i++) s->ticks[i] = 0.0f;
@!moments     (void)s;
}

void net_begin(net_state *s)
{
    uint32_t i;
@codes     for (i = 0; i < ${initial}u; i++) s->weights[i < ${parameters}u ? i : i + ${codes}u] = initial[i];
@!codes     for (i = 0; i < ${initial}u; i++) s->weights[i] = initial[i];
@draw_codes $draw_codes
@spare     s->classes = ${classes}u;
    net_forget(s);
}

void net_save(const net_state *s, uint8_t *record)
{
    const uint32_t head[3] = {$fingerprint, $mask, ${outputs}u};
    tps_save(record, head, $classes_now, s->weights, $numbers);
}

int net_load(net_state *s, const uint8_t *record)
{
    const uint32_t head[3] = {$fingerprint, $mask, ${outputs}u};
    uint32_t classes = tps_load(record, head, $classes, s->weights, $numbers);
    if (!classes) return NET_BAD_RECORD;
@spare     s->classes = classes;
    net_forget(s);
    return NET_OK;
}
