/* As much of the Arduino core as the sketches call; a test plays the serial port, pins and clock. */
#pragma once
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <string>

const int A0 = 14, LOW = 0, INPUT_PULLUP = 2;

struct Port {
  std::string in, out;
  size_t at = 0;
  void begin(long) {}
  int available() { return (int)(in.size() - at); }
  int peek() { return at < in.size() ? (unsigned char)in[at] : -1; }
  int read() { return at < in.size() ? (unsigned char)in[at++] : -1; }
  float parseFloat() {
    char *end;
    float number = strtof(in.c_str() + at, &end);
    at = (size_t)(end - in.c_str());
    return number;
  }
  long parseInt() { return (long)parseFloat(); }
  template <class T> void println(T value) { out += std::to_string(value) + "\n"; }
  void println(const char *value) { out += std::string(value) + "\n"; }
};

extern Port Serial;
extern uint32_t now;   /* microseconds */
extern int held;       /* the pin whose button is held, or -1 */
extern int samples;    /* of the sensor so far, on the first pin */

inline uint32_t micros() { return now; }
inline void pinMode(uint8_t, int) {}
inline int digitalRead(uint8_t pin) { return pin == held ? LOW : 1; }
inline int analogRead(uint8_t pin) { return pin == A0 ? samples++ % 997 : (samples * 7 + pin) % 991; }
