/* ---- constants: where they lie ---- */

#ifndef TPS_FN
#if defined(__GNUC__)
#define TPS_FN static __attribute__((unused))
#else
#define TPS_FN static
#endif
#endif

/* On an AVR tables stay out of its RAM: single numbers are read by instructions of their own, and the row
 * of a block is copied to the stack. TPS_ROW declares a pointer to a row, or to its copy. */
#if defined(__AVR__)
#include <avr/pgmspace.h>
#define TPS_AVR 1
#define TPS_IN_FLASH PROGMEM
#define TPS_NUMBER(place) pgm_read_float(place)
#define TPS_WORD(place) pgm_read_dword(place)
#define TPS_SHORT(place) pgm_read_word(place)
#define TPS_BYTE(place) pgm_read_byte(place)
#define TPS_INTEGER(place)                                  \
    (sizeof *(place) == 1 ? (int8_t)pgm_read_byte(place)    \
     : sizeof *(place) == 2 ? (int16_t)pgm_read_word(place) \
                            : (int32_t)pgm_read_dword(place))
#else
#define TPS_AVR 0
#define TPS_IN_FLASH
#define TPS_NUMBER(place) (*(place))
#define TPS_WORD(place) (*(place))
#define TPS_SHORT(place) (*(place))
#define TPS_BYTE(place) (*(place))
#define TPS_INTEGER(place) (*(place))
#endif
/* Rows that recurrent layers or blocks of several layers point to stay in RAM. */
#if defined(__AVR__) && !defined(TPS_WITH_SEQUENCES) && !defined(TPS_WITH_ROWS)
#define TPS_ROWS_IN_FLASH PROGMEM
#define TPS_ROW(type, name, place) \
    type name##_copy;              \
    const type *const name = (const type *)memcpy_P(&name##_copy, place, sizeof(type))
#define TPS_STREAM(place) \
    (pgm_read_dword(place) | (uint64_t)pgm_read_dword((const uint8_t *)(place) + 4) << 32)
#else
#define TPS_ROWS_IN_FLASH
#define TPS_ROW(type, name, place) const type *const name = place
#define TPS_STREAM(place) (*(place))
#endif
