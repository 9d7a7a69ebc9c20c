/* ---- constants: where they lie ---- */

#ifndef TPS_FN
#if defined(__GNUC__)
#define TPS_FN static __attribute__((unused))
#else
#define TPS_FN static
#endif
#endif

/* Tables of which single numbers are read stay out of the RAM of an AVR. */
#if defined(__AVR__)
#include <avr/pgmspace.h>
#define TPS_IN_FLASH PROGMEM
#define TPS_NUMBER(place) pgm_read_float(place)
#define TPS_WORD(place) pgm_read_dword(place)
#else
#define TPS_IN_FLASH
#define TPS_NUMBER(place) (*(place))
#define TPS_WORD(place) (*(place))
#endif
