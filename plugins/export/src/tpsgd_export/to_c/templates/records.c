/* Whether a slot has a record of this net */
static int net_has(const net_flash *flash, uint32_t slot, tps_intake *in)
{
    in->record = 0;
    in->flash = flash;
    in->slot = slot;
    return tps_sequence(flash, slot) && net_accept(in);
}

void net_save(const net_state *s, uint8_t *record)
{
    tps_writer w;
    w.record = record;
    w.at = 0;
    net_emit(s, &w);
}

int net_load(net_state *s, const uint8_t *record)
{
    tps_intake in;
    in.record = record;
    return net_accept(&in) ? net_take(s, &in) : NET_BAD_RECORD;
}

int net_save_to(const net_state *s, const net_flash *flash)
{
    tps_writer w;
    tps_intake in;
    uint32_t first = tps_sequence(flash, 0), second = tps_sequence(flash, 1), newer = second > first;
    uint32_t sequence = (newer ? second : first) + 1;
    w.record = 0;
    w.flash = flash;
    w.slot = net_has(flash, newer, &in) ? 1 - newer : newer; /* never over the newest whole one */
    w.failed = flash->erase(flash->board, w.slot);
    for (w.written = 0; w.written < 2; w.written++) { /* write, then compare */
        w.at = 0;
        tps_emit(&w, sequence, 4);
        tps_emit(&w, ~sequence, 4);
        net_emit(s, &w);
        while (w.at % TPS_CHUNK) tps_emit(&w, 255, 1);
    }
    return !w.failed && net_has(flash, w.slot, &in) ? NET_OK : NET_BAD_FLASH;
}

int net_load_from(net_state *s, const net_flash *flash)
{
    tps_intake in;
    uint32_t newer = tps_sequence(flash, 1) > tps_sequence(flash, 0);
    if (!net_has(flash, newer, &in) && !net_has(flash, 1 - newer, &in)) return NET_BAD_RECORD;
    return net_take(s, &in);
}

