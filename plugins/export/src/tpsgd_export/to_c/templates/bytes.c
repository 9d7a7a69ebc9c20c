/* ---- records: weights as bytes with a checksum, in RAM or in two slots of flash ----
 *
 * Bytes go out and come in through TPS_CHUNK bytes of stack, so that no second copy of the weights is
 * needed. A slot of flash: a sequence number and its complement, the record, bytes of 0xFF up to a
 * whole chunk. The record's checksum is written last: a slot is whole or it is nothing. */

#define TPS_CHUNK 32
#define TPS_BEFORE 8 /* bytes of a slot before the record */

static const uint32_t tps_halves[16] TPS_IN_FLASH = {
    0x00000000u, 0x1DB71064u, 0x3B6E20C8u, 0x26D930ACu, 0x76DC4190u, 0x6B6B51F4u, 0x4DB26158u, 0x5005713Cu,
    0xEDB88320u, 0xF00F9344u, 0xD6D6A3E8u, 0xCB61B38Cu, 0x9B64C2B0u, 0x86D3D2D4u, 0xA00AE278u, 0xBDBDF21Cu};

/* The checksum after one more byte, half a byte at a time */
TPS_FN uint32_t tps_crc(uint32_t crc, uint32_t byte)
{
    crc ^= byte;
    crc = crc >> 4 ^ TPS_WORD(tps_halves + (crc & 15u));
    return crc >> 4 ^ TPS_WORD(tps_halves + (crc & 15u));
}

/* Where bytes go, one after another: a record in RAM, or a slot of flash */
typedef struct {
    uint8_t *record;
    const net_flash *flash;
    uint32_t slot, at, crc;
    int failed, written; /* `written`: nothing is any more, flash is compared with it */
    uint8_t chunk[TPS_CHUNK];
} tps_writer;

/* A whole chunk into flash, or whether flash reads otherwise */
TPS_FN int tps_flush(const tps_writer *w)
{
    const net_flash *flash = w->flash;
    uint32_t at = w->at - TPS_CHUNK, i;
    uint8_t bytes[TPS_CHUNK];
    if (!w->written) return flash->write(flash->board, w->slot, at, w->chunk, TPS_CHUNK);
    if (flash->read(flash->board, w->slot, at, bytes, TPS_CHUNK)) return 1;
    for (i = 0; i < TPS_CHUNK; i++)
        if (bytes[i] != w->chunk[i]) return 1;
    return 0;
}

/* The low bytes of a number, lowest first on every machine */
TPS_FN void tps_emit(tps_writer *w, uint32_t number, uint32_t bytes)
{
    for (; bytes; bytes--, number >>= 8) {
        uint8_t byte = (uint8_t)(number & 255u);
        w->crc = tps_crc(w->crc, byte);
        if (w->record) w->record[w->at++] = byte;
        else {
            w->chunk[w->at++ % TPS_CHUNK] = byte;
            if (w->at % TPS_CHUNK == 0 && !w->failed) w->failed = tps_flush(w);
        }
    }
}

/* Where bytes come from */
typedef struct {
    const uint8_t *record;
    const net_flash *flash;
    uint32_t slot, at, end, crc; /* `at` and `end` of the record */
    int failed;
    uint8_t chunk[TPS_CHUNK];
} tps_intake;

TPS_FN void tps_open(tps_intake *in, uint32_t bytes)
{
    in->at = 0;
    in->end = bytes;
    in->crc = 0xFFFFFFFFu;
    in->failed = 0;
}

/* The bytes at hand: of a record in RAM all that are left, of flash those of a chunk, which is read at
 * its first byte */
TPS_FN const uint8_t *tps_at_hand(tps_intake *in, uint32_t *count)
{
    uint32_t place = in->at % TPS_CHUNK;
    *count = in->end - in->at;
    if (in->record) return in->record + in->at;
    if (*count > TPS_CHUNK - place) *count = TPS_CHUNK - place;
    if (!place && !in->failed)
        in->failed = in->flash->read(in->flash->board, in->slot, TPS_BEFORE + in->at, in->chunk, *count);
    return in->chunk + place;
}

TPS_FN uint32_t tps_next(tps_intake *in, uint32_t bytes)
{
    uint32_t number = 0, i, left;
    for (i = 0; i < bytes; i++, in->at++) {
        uint8_t byte = *tps_at_hand(in, &left);
        in->crc = tps_crc(in->crc, byte);
        number |= (uint32_t)byte << 8 * i;
    }
    return number;
}

/* Reads what is left of a record; whether its checksum fits */
TPS_FN int tps_checksum_fits(tps_intake *in)
{
    uint32_t crc, left;
    while (in->at < in->end - 4) {
        const uint8_t *byte = tps_at_hand(in, &left), *end;
        if (left > in->end - 4 - in->at) left = in->end - 4 - in->at;
        in->at += left;
        for (crc = in->crc, end = byte + left; byte < end;) crc = tps_crc(crc, *byte++);
        in->crc = crc;
    }
    crc = ~in->crc;
    return tps_next(in, 4) == crc && !in->failed;
}

/* The sequence number of a slot, whose record may be damaged; 0: it has none. */
TPS_FN uint32_t tps_sequence(const net_flash *flash, uint32_t slot)
{
    uint8_t bytes[TPS_BEFORE];
    uint32_t i, number = 0, complement = 0;
    if (flash->read(flash->board, slot, 0, bytes, TPS_BEFORE)) return 0;
    for (i = 0; i < 4; i++) {
        number |= (uint32_t)bytes[i] << 8 * i;
        complement |= (uint32_t)bytes[4 + i] << 8 * i;
    }
    return number == ~complement ? number : 0;
}
