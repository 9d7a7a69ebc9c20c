/* The head of a record; the words of the classes and of the random state are 0. */
$head
static void net_emit(const net_state *s, tps_writer *w)
{
    uint32_t i;
    w->crc = UINT32_C(0xFFFFFFFF);
    for (i = 0; i < $words; i++)
        tps_emit(w, i == $class_word ? s->classes : i == $random_word ? s->random : TPS_WORD(net_head + i), 4);
    for (i = 0; i < NET_WEIGHTS; i++) tps_emit(w, (uint32_t)s->weights[i], $weight_bytes);
@bias_count     for (i = 0; i < NET_BIASES; i++) tps_emit(w, (uint32_t)s->biases[i], 4);
    tps_emit(w, ~w->crc, 4);
}

/* Whether a record is of this net, and whole */
static int net_accept(tps_intake *in)
{
    uint32_t i, word, same = 1;
    tps_open(in, NET_RECORD_BYTES);
    for (i = 0; i < $words; i++) {
        word = tps_next(in, 4);
        if (i == $class_word) same &= word >= $classes && word <= NET_CLASSES;
        else if (i == $random_word) same &= word != 0;
        else same &= word == TPS_WORD(net_head + i);
    }
    return same && tps_checksum_fits(in);
}

/* The weights of a record that was accepted */
static int net_take(net_state *s, tps_intake *in)
{
    uint32_t i, word;
    tps_open(in, NET_RECORD_BYTES);
    for (i = 0; i < $words; i++) {
        word = tps_next(in, 4);
        if (i == $class_word) s->classes = word;
        if (i == $random_word) s->random = word;
    }
${loops}
@bias_count     for (i = 0; i < NET_BIASES; i++)
@bias_count         s->biases[i] = tps_within_31_bits(tps_signed(tps_next(in, 4), 4));
    return in->failed ? NET_BAD_FLASH : NET_OK;
}

