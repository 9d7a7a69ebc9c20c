
${tables}
void net_scale(float *x)
{
    uint32_t i;
    for (i = 0; i < NET_INPUT; i++)
        x[i] = (x[i] - TPS_NUMBER(net_shift + $index)) / TPS_NUMBER(net_scales + $index);
}
