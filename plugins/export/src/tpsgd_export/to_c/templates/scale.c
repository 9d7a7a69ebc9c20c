
${tables}
void net_scale(float *x)
{
    uint32_t i;
    for (i = 0; i < NET_INPUT; i++)
        x[i] = (x[i] - net_shift[$index]) / net_scales[$index];
}
