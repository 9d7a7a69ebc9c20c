$licence
$summary
#ifndef NET_H
#define NET_H

#include <stdint.h>

@recurrent #define NET_INPUT $inputs /* numbers of a time step */
@!recurrent #define NET_INPUT $inputs /* numbers of a sample */
@!of_numbers #define NET_CLASSES $outputs /* at most */
@of_numbers #define NET_NUMBERS $outputs /* of a label */
@recurrent #define NET_BATCH 1 /* sequence at a time, of any number of steps */
@!recurrent #define NET_BATCH $batch /* samples of a step */
#define NET_BLOCKS $blocks
#define NET_ALL_BLOCKS $all_blocks
#define NET_PARAMS $params
@of_numbers #define NET_MEANS $means /* their place in net_state */
#define NET_RECORD_BYTES (24ul + 4ul * ${numbers}ul)
#define NET_RAM_BYTES $ram /* of net_state and net_arena */

/* What a function returns */
$errors

$places
typedef struct {
@gains     float weights[$numbers]; /* the last ones: measured gains of readouts */
@!gains     float weights[$numbers];
@of_numbers     /* then, from NET_MEANS on, the means of the labels, and their deviations */
@moments     float moments[$moments];
@ticks     float ticks[$ticks];
@spare     uint32_t classes; /* that have come so far */
} net_state;

@recurrent #ifndef TPS_PROGRESS
@recurrent #define TPS_PROGRESS
@recurrent typedef struct { /* how far a sequence has been read */
@recurrent     uint32_t mode, steps, label, blocks, error, measures;
@recurrent } tps_progress;
@recurrent #endif
@recurrent 
@recurrent typedef struct { /* of one sequence, however long it is: nothing in it lasts */
@recurrent     float numbers[$arena];
@recurrent     float loss[NET_BLOCKS];
@recurrent     tps_progress progress;
@recurrent } net_arena;
@!recurrent typedef struct { float numbers[$arena]; } net_arena; /* scratch: nothing in it lasts */

/* A compiler refuses this line if the bytes are not those that were planned. */
typedef char net_ram_is_as_planned[sizeof(net_state) + sizeof(net_arena) == NET_RAM_BYTES ? 1 : -1];

#ifdef __cplusplus
extern "C" {
#endif

/* The weights that the model came with. Call it first. */
void net_begin(net_state *s);

$functions
@!of_numbers /* How many classes there are now, and one more, up to NET_CLASSES: NET_NO_SPACE. The new class
@!of_numbers  * changes no output of the others. */
@!of_numbers uint32_t net_classes(const net_state *s);
@!of_numbers int net_add_class(net_state *s);
@!of_numbers 
$best$records
#ifdef __cplusplus
}
#endif
#endif
