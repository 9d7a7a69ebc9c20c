
#if defined(__AVR__)
const char net_${kind}_names[$count][$width] TPS_IN_FLASH = {
#else
const char *const net_${kind}_names[$count] = {
#endif
