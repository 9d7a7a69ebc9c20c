/* Their names as strings, "" for those that may come */
extern const char *const net_${kind}_names[$count];

