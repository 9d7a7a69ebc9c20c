/* Their names as strings, "" for those that may come; on an AVR in flash, where strcpy_P reads them */
#if defined(__AVR__)
extern const char net_${kind}_names[$count][$width];
#else
extern const char *const net_${kind}_names[$count];
#endif
