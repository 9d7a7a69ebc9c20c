// The last $length samples of a sensor, $channels numbers each, ask the net; while a button is held, they
// teach it the class whose button it is.
#include <net.h>
@named #if defined(__AVR__)  // names are in flash
@named #define NAME(label) ((const __FlashStringHelper *)net_class_names[label])
@named #else
@named #define NAME(label) net_class_names[label]
@named #endif

const uint32_t CHANNELS = $channels, LENGTH = $length;
const uint32_t EVERY = $every;         // samples from one window to the next
const uint32_t PERIOD = 10000;       // microseconds from one sample to the next
const uint8_t BUTTONS[] = {2, 3};    // pins; the first teaches class 0
const float RATE = 0.01f;

static net_state state;
static net_arena arena;
static float ring[CHANNELS * LENGTH];  // the last samples; `place` is where the oldest lies
static float x[NET_INPUT], logits[NET_CLASSES], loss[NET_BLOCKS];
static uint32_t place, full, fresh, last;

// One sample: put your sensor here, with the units of the training data.
static void read_sensor(float *sample) {
  for (uint32_t c = 0; c < CHANNELS; c++) sample[c] = (float)analogRead((uint8_t)(A0 + c));
}

// The window as the net takes it: channel after channel, the oldest sample first.
static void window() {
  for (uint32_t c = 0; c < CHANNELS; c++)
    for (uint32_t i = 0; i < LENGTH; i++)
      x[c * LENGTH + i] = ring[(place + i) % LENGTH * CHANNELS + c];
@scale   net_scale(x);
}

// The class whose button is held, or -1.
static int taught() {
  for (uint32_t i = 0; i < sizeof BUTTONS; i++)
    if (digitalRead(BUTTONS[i]) == LOW) return (int)i;
  return -1;
}

void setup() {
  Serial.begin(115200);
  for (uint8_t pin : BUTTONS) pinMode(pin, INPUT_PULLUP);
  net_begin(&state);
}

void loop() {
  if (micros() - last < PERIOD) return;
  last += PERIOD;
  read_sensor(ring + place * CHANNELS);
  place = (place + 1) % LENGTH;
  if (full < LENGTH) full++;
  if (++fresh < EVERY || full < LENGTH) return;
  fresh = 0;
  window();
  int error, button = taught();
  uint16_t label = (uint16_t)button;
  if (button < 0) error = net_predict(&state, &arena, x, logits, &label);
  else error = net_step(&state, &arena, x, &label, RATE, NET_ALL_BLOCKS, loss);
  if (error) Serial.println(error);
  else if (button < 0) Serial.println($label);
  else Serial.println(loss[NET_BLOCKS - 1]);
}
