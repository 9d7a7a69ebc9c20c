/* As much of the Arduino core as the sketches name, without a body: for compilers of other processors. */
#pragma once
#include <stdint.h>

#define LOW 0x0
#define INPUT_PULLUP 0x2
static const uint8_t A0 = 14;

class __FlashStringHelper;

struct Port {
  void begin(unsigned long);
  int available();
  int peek();
  int read();
  float parseFloat();
  long parseInt();
  void println(const __FlashStringHelper *);
  void println(const char *);
  void println(int);
  void println(unsigned);
  void println(double);
};

extern Port Serial;

extern "C" {
unsigned long micros(void);
void pinMode(uint8_t, uint8_t);
int digitalRead(uint8_t);
int analogRead(uint8_t);
}
