/* ---- class codes: a hash (splitmix64) in integers, bit for bit as in tpsgd.projections ---- */

#define TPS_GOLDEN UINT64_C(0x9E3779B97F4A7C15)

enum { TPS_TABLE, TPS_NORMAL, TPS_UNIFORM, TPS_BINARY, TPS_BITS };

typedef struct {
    uint8_t distribution;
    uint32_t size;           /* numbers of a class */
    const uint64_t *streams; /* of each class */
    const float *table;      /* or the numbers themselves */
    float std;
    uint32_t filters;        /* filter-based sampling, or 0 */
    const uint32_t *bits;    /* or signs of std */
} tps_codes;

TPS_FN uint64_t tps_mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

#ifdef TPS_WITH_QUANTILES
TPS_FN int32_t tps_quantile(int32_t k) /* of k / 4096, times 65536 */
{
    return k >= 2048 ? (int32_t)TPS_WORD(&tps_quantiles[k - 2048]) : -(int32_t)TPS_WORD(&tps_quantiles[2048 - k]);
}

TPS_FN float tps_normal(int32_t u) /* of 24 random bits */
{
    int32_t k = u >> 12, within = (u & 4095) * 2 + 1, start = tps_quantile(k);
    int32_t whole = start * 8192 + within * (tps_quantile(k + 1) - start);
    return (float)whole * (1.0f / 536870912.0f);
}
#endif

/* Number i of the code of a class */
TPS_FN float tps_code(const tps_codes *p, uint32_t member, uint32_t i)
{
    float number;
    int32_t u;
    if (p->distribution == TPS_TABLE) return TPS_NUMBER(p->table + (member * p->size + i));
    if (p->distribution == TPS_BITS) {
        i += member * p->size;
        return TPS_WORD(p->bits + (i >> 5)) >> (i & 31u) & 1u ? p->std : -p->std;
    }
    u = (int32_t)(tps_mix(TPS_STREAM(p->streams + member) + i * TPS_GOLDEN) >> 40);
    if (p->distribution == TPS_BINARY) number = u >> 23 ? 1.0f : -1.0f;
    else if (p->distribution == TPS_UNIFORM)
        number = (float)(2 * u + 1 - (INT32_C(1) << 24)) * (float)(1.7320508075688772 / 16777216.0);
    else {
#ifdef TPS_WITH_QUANTILES
        number = tps_normal(u);
#else
        number = 0.0f;
#endif
    }
    if (p->filters) number *= (float)(i / (p->size / p->filters) + 1) / (float)p->filters;
    return number * p->std;
}

#ifdef TPS_WITH_LEARNED_CODES
/* The codes that learning begins with */
TPS_FN void tps_draw_codes(const tps_codes *p, uint32_t classes, float *codes)
{
    uint32_t c, i;
    for (c = 0; c < classes; c++)
        for (i = 0; i < p->size; i++) *codes++ = tps_code(p, c, i);
}
#endif
