
const char *const net_${kind}_names[$count] = {
