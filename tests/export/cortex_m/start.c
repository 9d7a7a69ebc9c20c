/* Start of a program under QEMU's semihosting: the FPU is switched on before the library begins. */
#include <stdint.h>

extern void _start(void);
extern char __stack;

void reset(void)
{
    *(volatile uint32_t *)0xE000ED88u |= 0xFu << 20;
    __asm volatile("dsb\n isb");
    _start();
}

__attribute__((section(".vectors"), used)) static const void *const vectors[] = {&__stack, (const void *)reset};
