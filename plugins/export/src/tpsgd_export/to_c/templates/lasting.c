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
@codes     for (i = 0; i < ${initial}u; i++) s->weights[i < ${parameters}u ? i : i + ${codes}u] = TPS_NUMBER(initial + i);
@!codes     for (i = 0; i < ${initial}u; i++) s->weights[i] = TPS_NUMBER(initial + i);
@draw_codes $draw_codes
@spare     s->classes = ${classes}u;
    net_forget(s);
}

/* The head of a record */
static const uint32_t net_head[4] TPS_IN_FLASH = {0x31535054u, $fingerprint, $mask, ${outputs}u};

static void net_emit(const net_state *s, tps_writer *w)
{
    tps_bits number;
    uint32_t i;
    w->crc = 0xFFFFFFFFu;
    for (i = 0; i < 4; i++) tps_emit(w, TPS_WORD(net_head + i), 4);
    tps_emit(w, $classes_now, 4);
    for (i = 0; i < $numbers; i++) {
        number.f = s->weights[i];
        tps_emit(w, number.u, 4);
    }
    tps_emit(w, ~w->crc, 4);
}

/* Whether a record is of this net, and whole */
static int net_accept(tps_intake *in)
{
    uint32_t i, same = 1, classes;
    tps_open(in, NET_RECORD_BYTES);
    for (i = 0; i < 4; i++) same &= tps_next(in, 4) == TPS_WORD(net_head + i);
    classes = tps_next(in, 4);
    return same && classes >= ${classes}u && classes <= ${outputs}u && tps_checksum_fits(in);
}

/* The weights of a record that was accepted */
static int net_take(net_state *s, tps_intake *in)
{
    tps_bits number;
    uint32_t i, classes = 0;
    tps_open(in, NET_RECORD_BYTES);
    for (i = 0; i < 5; i++) classes = tps_next(in, 4);
    for (i = 0; i < $numbers; i++) {
        number.u = tps_next(in, 4);
        s->weights[i] = number.f;
    }
@spare     s->classes = classes;
@!spare     (void)classes;
    net_forget(s);
    return in->failed ? NET_BAD_FLASH : NET_OK;
}

@!recurrent int net_step_part(net_state *s, net_arena *a, const float *x, const $label *labels, float lr,
@!recurrent                   uint32_t learns, float *loss, uint32_t *part)
@!recurrent {
@!recurrent @!backprop     tps_net net = net_of(s, a);
@!recurrent     uint32_t i = *part;
@!recurrent @!backprop     int error;
@!recurrent     *part = 0;
@!recurrent     if (i >= NET_BLOCKS) return NET_BAD_ORDER;
@!recurrent @backprop     if (i) return NET_BAD_ORDER;
@!recurrent @backprop     return net_step(s, a, x, labels, lr, learns, loss); /* one part: the error comes last */
@!recurrent @!backprop @!joined     if (i) x = a->numbers + TPS_WORD(&net.blocks[i - 1].output);
@!recurrent @!backprop @!joined     net.blocks += i;
@!recurrent @!backprop     error = tps_refuse(&net, x, labels, lr);
@!recurrent @!backprop     if (error) return error;
@!recurrent @!backprop     loss[i] = 0.0f;
@!recurrent @!backprop @joined     error = net_pass(s, a, i, x, labels, lr, learns, loss);
@!recurrent @!backprop @!joined     error = net_pass(s, a, i, &x, labels, lr, learns, loss);
@!recurrent @!backprop     if (error || i + 1 == NET_BLOCKS) return error;
@!recurrent @!backprop     *part = i + 1;
@!recurrent @!backprop     return NET_MORE;
@!recurrent }

