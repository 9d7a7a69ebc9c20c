/* A Cortex-M without an operating system or a C library: vectors, memory, semihosting, a clock. */
#include <stddef.h>
#include <stdint.h>

#include "board.h"

#define PAINT 0xDEADBEEFu
#define SYSTICK ((volatile uint32_t *)0xE000E010) /* control, reload, value */

extern uint32_t data_in_flash, data_start, data_end, bss_start, bss_end, stack_top;
int main(void);
void reset(void);

static int host(int operation, const void *argument)
{
    register int r0 __asm("r0") = operation;
    register const void *r1 __asm("r1") = argument;
    __asm volatile("bkpt 0xAB" : "+r"(r0) : "r"(r1) : "memory");
    return r0;
}

static void leave(int status)
{
    static uint32_t reason[2];
    reason[0] = 0x20026;
    reason[1] = (uint32_t)status;
    host(0x20, reason);
    host(0x18, (const void *)(status ? 0x20023 : 0x20026)); /* where the first is not there */
    for (;;) {}
}

static void fault(void) { leave(99); }

static const struct { uint32_t *stack; void (*handlers[15])(void); } vectors
    __attribute__((section(".vectors"), used)) = {
    &stack_top,
    {reset, fault, fault, fault, fault, fault, 0, 0, 0, 0, fault, fault, 0, fault, fault}};

void reset(void)
{
    uint32_t *to, *from = &data_in_flash;
    for (to = &data_start; to < &data_end;) *to++ = *from++;
    for (to = &bss_start; to < &bss_end;) *to++ = 0;
#if defined(__ARM_FP)
    *(volatile uint32_t *)0xE000ED88 |= 0xFu << 20; /* the floating point unit on */
    __asm volatile("dsb\n isb");
#endif
    for (to = &bss_end; to < (uint32_t *)__builtin_frame_address(0) - 8;) *to++ = PAINT;
    leave(main());
}

/* A compiler may call these for copies and zeros. */
void *memcpy(void *to, const void *from, size_t count)
{
    uint8_t *a = to;
    const uint8_t *b = from;
    while (count--) *a++ = *b++;
    return to;
}

void *memset(void *to, int byte, size_t count)
{
    uint8_t *a = to;
    while (count--) *a++ = (uint8_t)byte;
    return to;
}

void board_say(const char *text) { host(4, text); }

uint32_t board_stack(void)
{
    uint32_t *p = &bss_end;
    while (p < &stack_top && *p == PAINT) p++;
    return (uint32_t)((uint8_t *)&stack_top - (uint8_t *)p);
}

void board_clock_start(void)
{
    SYSTICK[1] = 0xFFFFFF;
    SYSTICK[2] = 0;
    SYSTICK[0] = 5;
    while (!SYSTICK[2]) {}
}

uint32_t board_clock(void) { return 0xFFFFFF - SYSTICK[2]; }
