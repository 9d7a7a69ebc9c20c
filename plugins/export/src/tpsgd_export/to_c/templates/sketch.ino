@!of_numbers // $inputs numbers on a line ask the net; with a label after them, it learns.
@of_numbers // $inputs numbers on a line ask the net; with $outputs more after them, the label, it learns.
#include <net.h>
@named #if defined(__AVR__)  // names are in flash
@named #define NAME(label) ((const __FlashStringHelper *)net_class_names[label])
@named #else
@named #define NAME(label) net_class_names[label]
@named #endif

static net_state state;
static net_arena arena;
static float x[NET_INPUT], loss[NET_BLOCKS];
@!of_numbers static float logits[NET_CLASSES];
@of_numbers static float numbers[NET_NUMBERS];

void setup() {
  Serial.begin(115200);
  net_begin(&state);
}

// What is left of a line.
static void skip_line() {
  while (Serial.available() && Serial.read() != '\n') {}
}

void loop() {
  if (!Serial.available()) return;
  if (Serial.peek() <= ' ') {  // between lines
    Serial.read();
    return;
  }
  for (uint32_t i = 0; i < NET_INPUT; i++) x[i] = Serial.parseFloat();
@scale   net_scale(x);
  if (Serial.peek() < ' ') {  // the line ends here: a question
    skip_line();
@!of_numbers     uint16_t best;
@!of_numbers     if (net_predict(&state, &arena, x, logits, &best) == NET_OK)
@!of_numbers       Serial.println($best);
@of_numbers     if (net_forward(&state, &arena, x, numbers) != NET_OK) return;
@of_numbers     for (uint32_t i = 0; i < NET_NUMBERS; i++) Serial.println(numbers[i]);
    return;
  }
@!of_numbers   uint16_t label = (uint16_t)Serial.parseInt();
@of_numbers   for (uint32_t i = 0; i < NET_NUMBERS; i++) numbers[i] = Serial.parseFloat();
  skip_line();
@!of_numbers   int error = net_step(&state, &arena, x, &label, 0.01f, NET_ALL_BLOCKS, loss);
@of_numbers   int error = net_step(&state, &arena, x, numbers, 0.01f, NET_ALL_BLOCKS, loss);
  if (error) Serial.println(error);
  else Serial.println(loss[NET_BLOCKS - 1]);
}
