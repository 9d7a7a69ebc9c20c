/* Signs go to the first serial port of an AVR; after main it sleeps for ever, which ends its simulator. */
#include <avr/interrupt.h>
#include <avr/io.h>
#include <avr/sleep.h>

int program(void);
void put(char sign);

void put(char sign)
{
    while (!(UCSR0A & _BV(UDRE0))) {}
    UDR0 = (uint8_t)sign;
}

int main(void)
{
    UCSR0B = _BV(TXEN0);
    program();
    while (!(UCSR0A & _BV(UDRE0))) {}
    cli();
    sleep_enable();
    sleep_cpu();
    return 0;
}
