/* The head that learns in one pass, next to the net. JavaScript writes a sample into `sample`. */
#include "head.h"

#define EXPORT(name) __attribute__((export_name(name)))

static head_state state;
static head_arena arena;
static float sample[HEAD_INPUT], scores[HEAD_CLASSES];

EXPORT("head_begin") void begin_head(void) { head_begin(&state); }
EXPORT("head_learn") int learn_head(int label, float weight)
{
    return head_learn(&state, &arena, sample, (uint16_t)label, weight);
}
EXPORT("head_scores") int score_head(void) { return head_scores(&state, &arena, sample, scores); }
EXPORT("head_add_class") int add_class_to_head(void) { return head_add_class(&state); }
EXPORT("head_classes") uint32_t classes_of_head(void) { return head_classes(&state); }
EXPORT("head_samples") uint32_t samples_of_head(void) { return state.samples; }
EXPORT("head_sample_at") float *sample_at(void) { return sample; }
EXPORT("head_scores_at") float *scores_at(void) { return scores; }
EXPORT("head_ram") uint32_t ram_of_head(void) { return HEAD_RAM_BYTES; }
