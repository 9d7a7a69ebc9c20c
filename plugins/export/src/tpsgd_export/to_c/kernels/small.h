/* ---- layers that do not learn, with weights of a byte in flash ----
 *
 * A row of weights is a scale times whole numbers from -127 to 127. Up to four rows of a group become
 * floats in the arena, and the layer of floats reads them: sums and outputs are those of floats. */

TPS_FN void tps_unpack(const tps_block *b, uint32_t unit, uint32_t rows, float *w)
{
    const int8_t *from = b->small + unit * b->fan_in;
    uint32_t i, k;
    for (i = 0; i < rows; i++) {
        float scale = TPS_NUMBER(b->scales + (unit + i));
        for (k = 0; k < b->fan_in; k++) *w++ = scale * (float)(int8_t)TPS_BYTE(from++);
    }
    for (i = 0; i < rows && b->bias != TPS_NOWHERE; i++) *w++ = TPS_NUMBER(b->fixed + (b->bias + unit + i));
}

TPS_FN void tps_small_outputs(const tps_block *b, float *unpacked, const float *x, float *y)
{
    tps_block part = *b;
    uint32_t unit, rows, group = b->units;
#ifdef TPS_WITH_CONVOLUTIONS
    tps_convolution c = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    uint32_t maps = 0;
    if (b->convolution) {
        c = *b->convolution;
        group = b->units / c.groups;
        c.channels = (uint16_t)(c.channels / c.groups);
        c.groups = 1;
        maps = (uint32_t)c.channels * c.rows * c.columns;
        part.convolution = &c;
    }
#endif
    part.small = 0;
    part.fixed = 0;
    part.weight = 0;
    for (unit = 0; unit < b->units; unit += rows) {
        rows = group - unit % group < 4 ? group - unit % group : 4;
        tps_unpack(b, unit, rows, unpacked);
        part.units = rows;
        if (b->bias != TPS_NOWHERE) part.bias = rows * b->fan_in;
#ifdef TPS_WITH_CONVOLUTIONS
        if (b->convolution) tps_convolve(&part, unpacked, x + unit / group * maps, y + unit * b->pixels);
        else
#endif
            tps_dense(&part, unpacked, x, y + unit);
    }
}
