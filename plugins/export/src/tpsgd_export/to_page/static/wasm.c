/* The exported net as a WebAssembly module. JavaScript writes a sample into `input` and calls the
 * functions below; `which` is 0 for the net that learns, 1 for the control next to it. */
#include "net.h"

#define EXPORT(name) __attribute__((export_name(name)))

static net_state states[2];
static net_arena arena;
static float input[NET_INPUT], logits[NET_CLASSES], losses[NET_BLOCKS];
static uint8_t record[NET_RECORD_BYTES];

EXPORT("begin") void begin(int which) { net_begin(&states[which]); }
EXPORT("forward") int forward(int which) { return net_forward(&states[which], &arena, input, logits); }

EXPORT("step") int step(int which, int label, float lr, uint32_t blocks)
{
    uint16_t labels[1];
    labels[0] = (uint16_t)label;
    return net_step(&states[which], &arena, input, labels, lr, blocks, losses);
}

EXPORT("add_class") int add_class(int which) { return net_add_class(&states[which]); }
EXPORT("save") void save(int which) { net_save(&states[which], record); }
EXPORT("load") int load(int which) { return net_load(&states[which], record); }

EXPORT("input_at") float *input_at(void) { return input; }
EXPORT("logits_at") float *logits_at(void) { return logits; }
EXPORT("weights_at") float *weights_at(int which) { return states[which].weights; }
EXPORT("record_at") uint8_t *record_at(void) { return record; }

EXPORT("classes") uint32_t classes(int which) { return net_classes(&states[which]); }
EXPORT("capacity") uint32_t capacity(void) { return NET_CLASSES; }
EXPORT("params") uint32_t params(void) { return NET_PARAMS; }
EXPORT("record_bytes") uint32_t record_bytes(void) { return NET_RECORD_BYTES; }
EXPORT("state_bytes") uint32_t state_bytes(void) { return sizeof(net_state); }
EXPORT("arena_bytes") uint32_t arena_bytes(void) { return sizeof(net_arena); }
