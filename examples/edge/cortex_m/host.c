/* The same program on a PC. */
#include <stdio.h>

#include "board.h"

void board_say(const char *text) { fputs(text, stdout); }
uint32_t board_stack(void) { return 0; }
void board_clock_start(void) {}
uint32_t board_clock(void) { return 0; }
