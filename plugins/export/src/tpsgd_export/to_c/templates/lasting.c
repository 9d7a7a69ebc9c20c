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

void net_save(const net_state *s, uint8_t *record)
{
    const uint32_t head[3] = {$fingerprint, $mask, NET_CLASSES};
    tps_save(record, head, net_classes(s), s->weights, $numbers);
}

int net_load(net_state *s, const uint8_t *record)
{
    const uint32_t head[3] = {$fingerprint, $mask, NET_CLASSES};
    uint32_t classes = tps_load(record, head, $classes, s->weights, $numbers);
    if (!classes) return NET_BAD_RECORD;
@spare     s->classes = classes;
    net_forget(s);
    return NET_OK;
}
