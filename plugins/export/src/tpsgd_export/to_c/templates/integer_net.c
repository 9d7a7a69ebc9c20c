$licence
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-loop-distribute-patterns") /* loops stay loops: no memcpy */
#endif
#define TPS_WEIGHT ${numbers}_t
#define TPS_INPUT $kind
#include "net.h"
#include "tpsgd.h"
@far #if defined(__AVR__)
@far #error "the constants of this net do not fit into the first 64 KB of flash, which an AVR can read"
@far #endif

${tables}static const tps_int_layer net_layers[NET_BLOCKS] = {
$rows};

$first
void net_begin(net_state *s)
{
    uint32_t i;
    for (i = 0; i < NET_WEIGHTS; i++) s->weights[i] = (TPS_WEIGHT)TPS_INTEGER(&net_weights_at_first[i]);
    for (; i < sizeof s->weights / sizeof s->weights[0]; i++) s->weights[i] = 0;
@bias_count     for (i = 0; i < NET_BIASES; i++) s->biases[i] = TPS_INTEGER(&net_biases_at_first[i]);
    s->random = UINT32_C($random);
    s->classes = $classes;
}

void net_quantise(const float *values, net_input *x)
{
    uint32_t i;
    for (i = 0; i < NET_INPUT; i++) {
        union { float f; uint32_t u; } bits;
        float v = values[i] * ${scale}f;
        int32_t n;
        bits.f = values[i];
        if ((bits.u & UINT32_C(0x7FFFFFFF)) > UINT32_C(0x7F800000)) v = 0.0f; /* NaN, also under -Ofast */
        n = v >= ${high}.0f ? $high : v <= ${low}.0f ? $low : 0;
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

int net_step_part(net_state *s, net_arena *a, const net_input *x, const uint16_t *labels,
                  uint16_t rate, uint32_t blocks, int32_t *loss, uint32_t *part)
{
    uint32_t i = *part;
    int32_t value = 0;
    *part = 0;
    if (i >= NET_BLOCKS) return NET_BAD_ORDER;
    if (!rate) return NET_BAD_RATE;
    if (*labels >= s->classes) return NET_BAD_LABEL;
    switch (i) {
$step
    }
    if (loss) loss[i] = value;
    if (i + 1 == NET_BLOCKS) return NET_OK;
    *part = i + 1;
    return NET_MORE;
}

int net_step(net_state *s, net_arena *a, const net_input *x, const uint16_t *labels,
             uint16_t rate, uint32_t blocks, int32_t *loss)
{
    uint32_t part = 0;
    int answer = NET_MORE;
    while (answer == NET_MORE) answer = net_step_part(s, a, x, labels, rate, blocks, loss, &part);
    return answer;
}

uint16_t net_best(const net_state *s, const int32_t *logits)
{
    uint32_t c, count = net_classes(s), best = 0;
    if (count == 1) return logits[0] > 0; /* yes or no */
    for (c = 1; c < count; c++)
        if (logits[c] > logits[best]) best = c;
    return (uint16_t)best;
}

int net_predict(const net_state *s, net_arena *a, const net_input *x, int32_t *logits, uint16_t *label)
{
    int error = net_forward(s, a, x, logits);
    *label = error ? 0 : net_best(s, logits);
    return error;
}

