// $inputs numbers on a line ask the net; with a label after them, it learns.
#include <net.h>

static net_state state;
static net_arena arena;
static float x[NET_INPUT];
static float logits[NET_CLASSES], loss[NET_BLOCKS];

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
    if (net_forward(&state, &arena, x, logits) != NET_OK) return;
    uint32_t best = 0;
    for (uint32_t c = 1; c < net_classes(&state); c++)
      if (logits[c] > logits[best]) best = c;
    Serial.println(best);
    return;
  }
  uint16_t label = (uint16_t)Serial.parseInt();
  skip_line();
  int error = net_step(&state, &arena, x, &label, 0.01f, NET_ALL_BLOCKS, loss);
  if (error) Serial.println(error);
  else Serial.println(loss[NET_BLOCKS - 1]);
}
