/* What the program that learns asks of the machine it runs on. */
#ifndef BOARD_H
#define BOARD_H

#include <stdint.h>

void board_say(const char *text);
uint32_t board_stack(void); /* bytes of stack that were ever used */
void board_clock_start(void);
uint32_t board_clock(void); /* ticks, 24 bits */

#endif
