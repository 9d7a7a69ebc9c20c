/* ---- derivatives of what a layer reads, from dz of its units ---- */

#ifdef TPS_WITH_CONVOLUTIONS
/* Products of dz with the weights of four channels, `kernel` weights apart: added to their maps */
TPS_HOT void tps_carry_four(const tps_convolution *c, const tps_products *of, const float *w, uint32_t kernel,
                            const float *dz, float *map)
{
    const int32_t plane = c->rows * c->columns, stride = c->stride_columns;
    const float w0 = w[0], w1 = w[kernel], w2 = w[2 * kernel], w3 = w[3 * kernel];
    int32_t i, j;
    for (i = of->rows; i; i--, map += c->stride_rows * c->columns, dz += c->out_columns) {
        const float *d = dz;
        float *p0 = map, *p1 = p0 + plane, *p2 = p1 + plane, *p3 = p2 + plane;
        for (j = of->columns; j; j--, p0 += stride, p1 += stride, p2 += stride, p3 += stride) {
            float value = *d++;
            *p0 += w0 * value;
            *p1 += w1 * value;
            *p2 += w2 * value;
            *p3 += w3 * value;
        }
    }
}

TPS_HOT void tps_carry_one(const tps_convolution *c, const tps_products *of, float w, const float *dz,
                           float *map)
{
    int32_t i, j;
    for (i = of->rows; i; i--, map += c->stride_rows * c->columns, dz += c->out_columns) {
        const float *d = dz;
        float *p = map;
        for (j = of->columns; j; j--, p += c->stride_columns) *p += w * *d++;
    }
}

/* Derivatives of what one filter reads, from dz of its map: added to `error` */
TPS_HOT void tps_carry_filter(const tps_block *b, const float *weights, uint32_t unit, const float *dz,
                              float *error)
{
    const tps_convolution *c = b->convolution;
    const int32_t channels = c->channels / c->groups, plane = c->rows * c->columns;
    const uint32_t kernel = (uint32_t)c->kernel_rows * c->kernel_columns;
    const float *w = weights + b->weight + unit * b->fan_in;
    int32_t k, u, v;
    error += (int32_t)(unit / (b->units / c->groups)) * channels * plane;
    for (u = 0; u < c->kernel_rows; u++)
        for (v = 0; v < c->kernel_columns; v++, w++) {
            const tps_products of = tps_products_of(c, u, v);
            for (k = 0; k + 4 <= (TPS_FIXED(b) ? 0 : channels); k += 4)
                tps_carry_four(c, &of, w + (uint32_t)k * kernel, kernel, dz + of.dz, error + k * plane + of.map);
            for (; k < channels; k++)
                tps_carry_one(c, &of, TPS_OF(b, w + (uint32_t)k * kernel), dz + of.dz, error + k * plane + of.map);
        }
}
#endif

/* Derivatives of a dense unit's inputs: added to `error` */
TPS_HOT void tps_carry_unit(const tps_block *b, const float *weights, uint32_t unit, float dz, float *error)
{
    const float *w = weights + b->weight + unit * b->inputs;
    uint32_t k;
    for (k = 0; k < b->inputs; k++) error[k] += dz * TPS_OF(b, w + k);
}
