uint32_t net_classes(const net_state *s)
{
    (void)s;
@spare     return s->classes;
@!spare     return ${classes}u;
}

int net_add_class(net_state *s)
{
@spare     if (s->classes >= NET_CLASSES) return NET_NO_SPACE;
@spare     s->classes++;
@spare     return NET_OK;
@!spare     (void)s;
@!spare     return NET_NO_SPACE;
}

