/* The sequence number of the slot's record; 0: it has none, or one of another net. */
static uint32_t net_sequence(const net_flash *flash, uint32_t slot)
{
    tps_intake in;
    uint32_t sequence = tps_sequence(flash, slot);
    in.record = 0;
    in.flash = flash;
    in.slot = slot;
    return sequence && net_accept(&in) ? sequence : 0;
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
    uint32_t first = net_sequence(flash, 0), second = net_sequence(flash, 1);
    uint32_t sequence = (first > second ? first : second) + 1;
    w.record = 0;
    w.flash = flash;
    w.slot = first > second; /* the older one, or one that is not whole */
    w.at = 0;
    w.failed = flash->erase(flash->board, w.slot);
    tps_emit(&w, sequence, 4);
    tps_emit(&w, ~sequence, 4);
    net_emit(s, &w);
    while (w.at % TPS_CHUNK) tps_emit(&w, 255, 1);
    return !w.failed && net_sequence(flash, w.slot) == sequence ? NET_OK : NET_BAD_FLASH;
}

int net_load_from(net_state *s, const net_flash *flash)
{
    tps_intake in;
    uint32_t first = net_sequence(flash, 0), second = net_sequence(flash, 1);
    if (!first && !second) return NET_BAD_RECORD;
    in.record = 0;
    in.flash = flash;
    in.slot = second > first;
    return net_take(s, &in);
}

