$licence
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-loop-distribute-patterns") /* loops stay loops: no memcpy */
#endif
#define TPS_WEIGHT ${numbers}_t
#define TPS_INPUT $kind
#include "net.h"
#include "tpsgd.h"

${tables}static const tps_int_layer net_layers[NET_BLOCKS] = {
$rows};

$first
void net_begin(net_state *s)
{
    uint32_t i;
    for (i = 0; i < NET_WEIGHTS; i++) s->weights[i] = net_weights_at_first[i];
    for (; i < sizeof s->weights / sizeof s->weights[0]; i++) s->weights[i] = 0;
@bias_count     for (i = 0; i < NET_BIASES; i++) s->biases[i] = net_biases_at_first[i];
    s->random = UINT32_C($random);
    s->classes = $classes;
}

void net_quantise(const float *values, net_input *x)
{
    uint32_t i;
    for (i = 0; i < NET_INPUT; i++) {
        float v = values[i] * ${scale}f;
        int32_t n = v >= ${high}.0f ? $high : v <= ${low}.0f ? $low : 0;
        if (v >= 0.0f && v < ${high}.0f) n = (int32_t)(v + 0.5f);
        if (v > ${low}.0f && v < 0.0f) n = -(int32_t)(0.5f - v);
        x[i] = (net_input)n;
    }
}

uint32_t net_classes(const net_state *s)
{
    return s->classes;
}

int net_add_class(net_state *s)
{
    if (s->classes >= NET_CLASSES) return NET_NO_SPACE;
    s->classes++;
    return NET_OK;
}

static tps_source net_bytes(const net_input *x)
{
    tps_source source;
    source.bytes = x;
    source.units = 0;
    return source;
}
@hidden 
@hidden static tps_source net_units(const int16_t *y)
@hidden {
@hidden     tps_source source;
@hidden     source.bytes = 0;
@hidden     source.units = y;
@hidden     return source;
@hidden }

int net_forward(const net_state *s, net_arena *a, const net_input *x, int32_t *logits)
{
@!hidden     (void)a;
$forward
    return NET_OK;
}

int net_step(net_state *s, net_arena *a, const net_input *x, const uint16_t *labels,
             uint16_t rate, uint32_t blocks, int32_t *loss)
{
    uint32_t i;
    int32_t value;
    if (!rate) return NET_BAD_RATE;
    if (*labels >= s->classes) return NET_BAD_LABEL;
    for (i = 0; loss && i < NET_BLOCKS; i++) loss[i] = 0;
$step
    return NET_OK;
}

$head
void net_save(const net_state *s, uint8_t *record)
{
    uint32_t i;
    uint8_t *p = record;
    for (i = 0; i < $words; i++) p = tps_put(p, net_head[i], 4);
    tps_put(record + $class_bytes, s->classes, 4);
    tps_put(record + $random_bytes, s->random, 4);
    for (i = 0; i < NET_WEIGHTS; i++) p = tps_put(p, (uint32_t)s->weights[i], $weight_bytes);
@bias_count     for (i = 0; i < NET_BIASES; i++) p = tps_put(p, (uint32_t)s->biases[i], 4);
    tps_put(p, ~tps_int_crc(UINT32_C(0xFFFFFFFF), record, NET_RECORD_BYTES - 4), 4);
}

int net_load(net_state *s, const uint8_t *record)
{
    uint32_t i, classes = tps_get(record + $class_bytes, 4), random = tps_get(record + $random_bytes, 4);
    const uint8_t *p = record + $start;
    for (i = 0; i < $words; i++)
        if (i != $class_bytes / 4 && i != $random_bytes / 4 && tps_get(record + 4 * i, 4) != net_head[i])
            return NET_BAD_RECORD;
    if (!random || classes < $classes || classes > NET_CLASSES
        || tps_get(record + NET_RECORD_BYTES - 4, 4)
            != (uint32_t)~tps_int_crc(UINT32_C(0xFFFFFFFF), record, NET_RECORD_BYTES - 4))
        return NET_BAD_RECORD;
${loops}
@bias_count     for (i = 0; i < NET_BIASES; i++, p += 4)
@bias_count         s->biases[i] = tps_clip(tps_get_signed(p, 4), TPS_BIAS_LIMIT);
    s->classes = classes;
    s->random = random;
    return NET_OK;
}
