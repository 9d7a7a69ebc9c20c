/* ---- records: weights as bytes, with a checksum ---- */

TPS_FN uint32_t tps_crc(const uint8_t *bytes, uint32_t count)
{
    uint32_t crc = 0xFFFFFFFFu, i;
    int bit;
    for (i = 0; i < count; i++)
        for (crc ^= bytes[i], bit = 0; bit < 8; bit++)
            crc = crc & 1u ? crc >> 1 ^ 0xEDB88320u : crc >> 1;
    return ~crc;
}

TPS_FN void tps_put(uint8_t *bytes, uint32_t number) /* little endian on every machine */
{
    int i;
    for (i = 0; i < 4; i++) bytes[i] = (uint8_t)(number >> 8 * i);
}

TPS_FN uint32_t tps_get(const uint8_t *bytes)
{
    return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

/* "TPS1", the head (a fingerprint of the layers, the blocks that learn, outputs), classes so far,
 * numbers, then the checksum of all before it */
TPS_FN void tps_save(uint8_t *record, const uint32_t *head, uint32_t classes, const float *numbers,
                     uint32_t count)
{
    tps_bits number;
    uint32_t i;
    tps_put(record, 0x31535054u);
    for (i = 0; i < 3; i++) tps_put(record + 4 + 4 * i, head[i]);
    tps_put(record + 16, classes);
    for (i = 0; i < count; i++) {
        number.f = numbers[i];
        tps_put(record + 20 + 4 * i, number.u);
    }
    tps_put(record + 20 + 4 * count, tps_crc(record, 20 + 4 * count));
}

/* How many classes the record has; 0 if it is refused, and then no number has changed. */
TPS_FN uint32_t tps_load(const uint8_t *record, const uint32_t *head, uint32_t least, float *numbers,
                         uint32_t count)
{
    tps_bits number;
    uint32_t i, classes = tps_get(record + 16);
    if (tps_get(record) != 0x31535054u || classes < least || classes > head[2]) return 0;
    for (i = 0; i < 3; i++)
        if (tps_get(record + 4 + 4 * i) != head[i]) return 0;
    if (tps_get(record + 20 + 4 * count) != tps_crc(record, 20 + 4 * count)) return 0;
    for (i = 0; i < count; i++) {
        number.u = tps_get(record + 20 + 4 * i);
        numbers[i] = number.f;
    }
    return classes;
}
