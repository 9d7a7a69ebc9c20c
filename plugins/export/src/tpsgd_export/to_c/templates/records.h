/* The weights as NET_RECORD_BYTES bytes with a checksum, for a card, a wire or Python
 * (tpsgd.export.read_weights), and back; a record of another net, or a damaged one, is refused.
 * These bytes are not among NET_RAM_BYTES: net_save_to does without them.$forgotten */
void net_save(const net_state *s, uint8_t *record);
int net_load(net_state *s, const uint8_t *record);

/* Flash with two slots, 0 and 1, each of NET_SLOT_BYTES that can be erased without the other. The
 * functions are the board's; they return 0 if all went well. A slot is erased, then written from its
 * first byte to its last, NET_CHUNK_BYTES at a time. `board` is passed on. */
#define NET_CHUNK_BYTES 32
#define NET_SLOT_BYTES ((8ul + NET_RECORD_BYTES + 31ul) / 32ul * 32ul)
typedef struct {
    int (*erase)(void *board, uint32_t slot);
    int (*write)(void *board, uint32_t slot, uint32_t at, const uint8_t *from, uint32_t count);
    int (*read)(void *board, uint32_t slot, uint32_t at, uint8_t *to, uint32_t count);
    void *board;
} net_flash;

/* The weights into the older slot, without a copy of them in RAM, and back from the newer one. The
 * other slot stays as it is: wherever the power is cut, net_load_from finds the new weights, or
 * those before. NET_BAD_FLASH: the board's functions failed, or what was written reads otherwise;
 * after net_load_from call net_begin then. NET_BAD_RECORD: no slot has weights of this net, and
 * those of net_state stay. */
#define NET_BAD_FLASH 9
int net_save_to(const net_state *s, const net_flash *flash);
int net_load_from(net_state *s, const net_flash *flash);
