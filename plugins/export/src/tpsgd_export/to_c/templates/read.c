$licence
#include "net.h"
#include "tpsgd.h"
@far #if defined(__AVR__)
@far #error "the constants of this net do not fit into the first 64 KB of flash, which an AVR can read"
@far #endif

$tables
static const tps_block blocks_of_net[NET_BLOCKS] TPS_ROWS_IN_FLASH = {
$rows};

static const tps_layer layers[$layer_count] = {
$layers};

static tps_reader reader_of(const net_state *s, net_arena *a)
{
    tps_net head = {blocks_of_net + $layer_count, NET_BLOCKS - $layer_count, 1, 0, $params, 0, $dz,
                    $logits};
    tps_reader r = {layers, $layer_count, $scratch, {0, 0, 0, 0, 0, 0, 0, 0}};
    r.head = head;
    r.head.classes = net_classes(s);
    r.head.arena = a->numbers;
    return r;
}

void net_start(net_arena *a)
{
    tps_start(a->numbers, $arena, &a->progress, a->loss, NET_BLOCKS);
}

int net_read(const net_state *s, net_arena *a, const float *x, uint16_t label, uint32_t blocks)
{
    tps_reader r = reader_of(s, a);
    return tps_read(&r, s->weights, $gains_at, x, label, blocks, &a->progress, a->loss);
}

int net_finish(net_state *s, net_arena *a, uint16_t label, float lr, uint32_t blocks, float *loss)
{
    tps_reader r = reader_of(s, a);
    uint32_t i;
    int answer = tps_finish(&r, s->weights, $moments_at, $ticks_at, $gains_at, label, lr, blocks,
                            &a->progress, a->loss);
    for (i = 0; i < NET_BLOCKS; i++) loss[i] = answer ? 0.0f : a->loss[i];
    return answer;
}

int net_look(const net_state *s, net_arena *a, const float *x)
{
    tps_reader r = reader_of(s, a);
    return tps_look(&r, s->weights, x, &a->progress, a->loss);
}

int net_logits(const net_state *s, net_arena *a, float *logits)
{
    tps_reader r = reader_of(s, a);
    return tps_logits(&r, s->weights, &a->progress, logits);
}

