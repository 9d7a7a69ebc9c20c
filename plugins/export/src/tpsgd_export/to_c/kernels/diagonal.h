/* ---- a diagonal recurrence: h <- lambda h + gamma B x, y = norm(gate(gelu(Re(C h) + D x))) ----
 *
 * Complex numbers are pairs. Its exact gradient is carried forward: E, the inputs filtered by lambda,
 * and F, the derivative of h with respect to log lambda (Zucchet et al. 2023). */

/* Places of the parameters behind the first of them */
typedef struct {
    uint32_t theta, gamma, b, c, d, gate, gate_bias, norm, norm_bias;
} tps_places;

TPS_FN tps_places tps_places_of(const tps_layer *layer)
{
    uint32_t states = layer->diagonal->states, in = layer->block->inputs, units = layer->block->units;
    tps_places p;
    p.theta = states;
    p.gamma = p.theta + states;
    p.b = p.gamma + states;
    p.c = p.b + 2 * states * in;
    p.d = p.c + 2 * states * units;
    p.gate = p.d + units * in;
    p.gate_bias = p.gate + 2 * units * units;
    p.norm = p.gate_bias + 2 * units;
    p.norm_bias = p.norm + units;
    return p;
}

/* What lies between a state and an output, in the scratch of the arena */
typedef struct {
    float *u, *v, *z, *n, *dy, *dv, *g, *rstd;
} tps_between;

TPS_FN tps_between tps_between_of(const tps_reader *r, const tps_layer *layer)
{
    uint32_t units = layer->block->units;
    tps_between f;
    f.rstd = r->head.arena + r->scratch;
    f.u = f.rstd + 1;
    f.v = f.u + units;
    f.z = f.v + units;
    f.n = f.z + 2 * units;
    f.dy = f.n + units;
    f.dv = f.dy + units;
    f.g = f.dv + units;
    return f;
}

TPS_FN float tps_erf(float x)
{
    float a = x < 0.0f ? -x : x, t, z;
    if (a < 0.5f) {
        z = x * x;
        t = 1.0f / 9360.0f * z - 1.0f / 1320.0f;
        t = t * z + 1.0f / 216.0f;
        t = t * z - 1.0f / 42.0f;
        t = t * z + 1.0f / 10.0f;
        t = t * z - 1.0f / 3.0f;
        return 1.12837917f * (x + x * z * t);
    }
    t = 1.0f / (1.0f + 0.5f * a);
    z = 0.17087277f * t - 0.82215223f;
    z = z * t + 1.48851587f;
    z = z * t - 1.13520398f;
    z = z * t + 0.27886807f;
    z = z * t - 0.18628806f;
    z = z * t + 0.09678418f;
    z = z * t + 0.37409196f;
    z = z * t + 1.00002368f;
    z = z * t - 1.26551223f;
    z = 1.0f - t * tps_exp(z - a * a);
    return x < 0.0f ? -z : z;
}

/* Cosine and sine of an angle; a huge one gives NaN, as which it is noticed. */
TPS_FN void tps_turn(float angle, float *cosine, float *sine)
{
    float n, z, c, s;
    int32_t k;
    if (!(angle > -8192.0f && angle < 8192.0f)) {
        *cosine = *sine = 0.0f / (angle - angle);
        return;
    }
    n = angle * 0.636619772f;
    k = (int32_t)(n + (n < 0.0f ? -0.5f : 0.5f));
    n = (float)k;
    angle -= n * 1.5703125f; /* a right angle in three numbers, of which two have few digits */
    angle -= n * 4.837512969970703e-4f;
    angle -= n * 7.549789954891882e-8f;
    z = angle * angle;
    s = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * angle + angle;
    c = ((2.443315711e-5f * z - 1.388731625e-3f) * z + 4.166664568e-2f) * z * z - 0.5f * z + 1.0f;
    *cosine = k & 1 ? (k & 2 ? s : -s) : (k & 2 ? -c : c);
    *sine = k & 1 ? (k & 2 ? -c : c) : (k & 2 ? -s : s);
}

/* lambda as pairs, then gamma; weights stay as they are while a sequence is read */
TPS_FN void tps_find_lambda(const tps_layer *layer, const float *w, float *lambda)
{
    uint32_t i, states = layer->diagonal->states;
    for (i = 0; i < states; i++) {
        float size = tps_exp(-tps_exp(TPS_OF(layer->block, w + i))), cosine, sine;
        tps_turn(tps_exp(TPS_OF(layer->block, w + (states + i))), &cosine, &sine);
        lambda[2 * i] = size * cosine;
        lambda[2 * i + 1] = size * sine;
        lambda[2 * states + i] = tps_exp(TPS_OF(layer->block, w + (2 * states + i)));
    }
}

/* a <- lambda a + b of a pair */
TPS_FN void tps_rotate(const float *lambda, float *re, float *im, float b_re, float b_im)
{
    float old = *re;
    *re = lambda[0] * old - lambda[1] * *im + b_re;
    *im = lambda[0] * *im + lambda[1] * old + b_im;
}

/* Traces go one step on: F of each state, then E of each state and input. */
TPS_FN void tps_carry_traces(const tps_layer *layer, const float *lambda, const float *h, const float *x,
                             float *traces)
{
    uint32_t i, k, in = layer->block->inputs, states = layer->diagonal->states;
    float *f = traces, *e = traces + 2 * states;
    for (i = 0; i < states; i++, f += 2, e += 2 * in) {
        f[0] += h[2 * i];
        f[1] += h[2 * i + 1];
        tps_rotate(lambda + 2 * i, f, f + 1, 0.0f, 0.0f);
        for (k = 0; k < in; k++) tps_rotate(lambda + 2 * i, e + k, e + in + k, x[k], 0.0f);
    }
}

TPS_FN void tps_carry_state(const tps_layer *layer, const float *w, const float *lambda, const float *x,
                            float *h)
{
    uint32_t i, k, in = layer->block->inputs, states = layer->diagonal->states;
    const float *b = w + tps_places_of(layer).b;
    for (i = 0; i < states; i++, b += 2 * in) {
        float re = 0.0f, im = 0.0f, gamma = lambda[2 * states + i];
        for (k = 0; k < in; k++) {
            re += TPS_OF(layer->block, b + k) * x[k];
            im += TPS_OF(layer->block, b + (in + k)) * x[k];
        }
        tps_rotate(lambda + 2 * i, h + 2 * i, h + 2 * i + 1, gamma * re, gamma * im);
    }
}

TPS_FN float tps_dot(const float *a, const float *b, uint32_t count)
{
    uint32_t i;
    float sum = 0.0f;
    for (i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

/* The products of x with weights of a layer */
#define TPS_DOT(layer, w, x, count) \
    (TPS_FIXED((layer)->block) ? tps_fixed_sum(w, 1, x, count, 0.0f) : tps_dot(w, x, count))

/* y of a state; u, v = gelu(u), the gate's inputs z, and n, its normalised outputs, stay in scratch */
TPS_FN void tps_features(const tps_layer *layer, const float *w, const float *h, const float *x,
                         tps_between f, float *y)
{
    uint32_t j, in = layer->block->inputs, units = layer->block->units;
    uint32_t pairs = 2 * layer->diagonal->states;
    tps_places p = tps_places_of(layer);
    float mean = 0.0f, variance = 0.0f;
    for (j = 0; j < units; j++) {
        f.u[j] = TPS_DOT(layer, w + p.d + j * in, x, in) + TPS_DOT(layer, w + p.c + j * pairs, h, pairs);
        f.v[j] = 0.5f * f.u[j] * (1.0f + tps_erf(f.u[j] * 0.707106781f));
    }
    for (j = 0; j < 2 * units; j++)
        f.z[j] = TPS_OF(layer->block, w + (p.gate_bias + j)) + TPS_DOT(layer, w + p.gate + j * units, f.v, units);
    for (j = 0; j < units; j++) {
        f.n[j] = f.z[j] * tps_sigmoid(f.z[units + j]);
        mean += f.n[j];
    }
    mean /= (float)units;
    for (j = 0; j < units; j++) {
        f.n[j] -= mean;
        variance += f.n[j] * f.n[j];
    }
    *f.rstd = 1.0f / tps_sqrt(variance / (float)units + 1e-5f);
    for (j = 0; j < units; j++) {
        f.n[j] *= *f.rstd;
        y[j] = f.n[j] * TPS_OF(layer->block, w + (p.norm + j)) + TPS_OF(layer->block, w + (p.norm_bias + j));
    }
}

/* From dy to the derivatives of the gate's inputs, in f.z; adds the gradients on the way. */
TPS_FN void tps_through_gate(const tps_layer *layer, const float *w, tps_between f, float *sums)
{
    uint32_t j, k, units = layer->block->units;
    tps_places p = tps_places_of(layer);
    float mean = 0.0f, along = 0.0f;
    for (j = 0; j < units; j++) {
        sums[p.norm + j] += f.n[j] * f.dy[j];
        sums[p.norm_bias + j] += f.dy[j];
        f.dy[j] *= w[p.norm + j];
        mean += f.dy[j];
        along += f.dy[j] * f.n[j];
    }
    mean /= (float)units;
    along /= (float)units;
    for (j = 0; j < units; j++) {
        float dm = *f.rstd * (f.dy[j] - mean - f.n[j] * along), open = tps_sigmoid(f.z[units + j]);
        f.z[units + j] = dm * f.z[j] * open * (1.0f - open);
        f.z[j] = dm * open;
    }
    for (k = 0; k < 2 * units; k++) {
        sums[p.gate_bias + k] += f.z[k];
        for (j = 0; j < units; j++) sums[p.gate + k * units + j] += f.z[k] * f.v[j];
    }
}

/* From dy to f.g, the derivative with respect to the state; adds the gradients on the way. */
TPS_FN void tps_through_features(const tps_layer *layer, const float *w, const float *h, const float *x,
                                 tps_between f, float *sums)
{
    uint32_t j, k, in = layer->block->inputs, units = layer->block->units;
    uint32_t pairs = 2 * layer->diagonal->states;
    tps_places p = tps_places_of(layer);
    tps_through_gate(layer, w, f, sums);
    for (k = 0; k < pairs; k++) f.g[k] = 0.0f;
    for (j = 0; j < units; j++) f.dv[j] = 0.0f;
    for (k = 0; k < 2 * units; k++)
        for (j = 0; j < units; j++) f.dv[j] += f.z[k] * w[p.gate + k * units + j];
    for (j = 0; j < units; j++) {
        float u = f.u[j], bell = 0.398942280f * tps_exp(-0.5f * u * u);
        float du = f.dv[j] * (0.5f * (1.0f + tps_erf(u * 0.707106781f)) + u * bell);
        for (k = 0; k < in; k++) sums[p.d + j * in + k] += du * x[k];
        for (k = 0; k < pairs; k++) {
            sums[p.c + j * pairs + k] += du * h[k];
            f.g[k] += du * w[p.c + j * pairs + k];
        }
    }
}

/* What the derivative with respect to the state says about all inputs before it */
TPS_FN void tps_through_traces(const tps_layer *layer, const float *g, const float *traces, float *sums)
{
    uint32_t i, k, in = layer->block->inputs, states = layer->diagonal->states;
    const float *f = traces, *e = traces + 2 * states;
    tps_places p = tps_places_of(layer);
    float *of_b = sums + p.b;
    for (i = 0; i < states; i++, g += 2, f += 2, e += 2 * in, of_b += 2 * in) {
        sums[i] += g[0] * f[0] + g[1] * f[1];
        sums[p.theta + i] += g[1] * f[0] - g[0] * f[1];
        for (k = 0; k < in; k++) {
            of_b[k] += g[0] * e[k] + g[1] * e[in + k];
            of_b[in + k] += g[1] * e[k] - g[0] * e[in + k];
        }
    }
}

/* A loss of the output y of this step: its gradients are added to the sums. */
TPS_FN float tps_diagonal_learn(const tps_reader *r, const tps_layer *layer, const float *w,
                                const float *gains, tps_between f, uint32_t label)
{
    const tps_diagonal *d = layer->diagonal;
    float *arena = r->head.arena, *sums = arena + layer->sums;
    const float *y = arena + layer->block->output;
    uint32_t j;
    tps_local l;
    tps_look_at(&l, r, layer, w - layer->block->weight, gains, y, label, 0);
    for (j = 0; j < layer->block->units; j++) f.dy[j] = tps_pull(&l, j, y[j]);
    tps_sum_codes(layer, &l, y, sums);
    tps_through_features(layer, w, arena + d->h, arena + d->x, f, sums);
    tps_through_traces(layer, f.g, arena + d->traces, sums);
    return l.loss;
}

TPS_FN void tps_diagonal_step(const tps_reader *r, const tps_layer *layer, const float *w,
                              const float *gains, const float *x, const tps_progress *p, uint32_t learns,
                              float *loss)
{
    const tps_block *b = layer->block;
    const tps_diagonal *d = layer->diagonal;
    float *arena = r->head.arena, *y = arena + b->output;
    tps_between f = tps_between_of(r, layer);
    uint32_t k, every = learns && d->loss_at == TPS_EVERY;
    if (!p->steps) tps_find_lambda(layer, w, arena + d->lambda);
    for (k = 0; k < b->inputs; k++) arena[d->x + k] = x[k];
    if (learns && !p->measures)
        tps_carry_traces(layer, arena + d->lambda, arena + d->h, x, arena + d->traces);
    tps_carry_state(layer, w, arena + d->lambda, x, arena + d->h);
    if (!d->feeds && d->loss_at != TPS_MEAN && !every) return;
    tps_features(layer, w, arena + d->h, x, f, y);
    if (d->mean != TPS_NOWHERE)
        for (k = 0; k < b->units; k++) arena[d->mean + k] += y[k];
    if (every && p->measures) *loss += tps_square_mean(y, b->units);
    else if (every) *loss += tps_diagonal_learn(r, layer, w, gains, f, p->label);
}

/* The output after the last step: that of the last state, or the mean over time */
TPS_FN void tps_diagonal_output(const tps_reader *r, const tps_layer *layer, const float *w,
                                const tps_progress *p)
{
    const tps_diagonal *d = layer->diagonal;
    float *arena = r->head.arena, *y = arena + layer->block->output;
    uint32_t k;
    if (d->loss_at != TPS_MEAN)
        tps_features(layer, w, arena + d->h, arena + d->x, tps_between_of(r, layer), y);
    else
        for (k = 0; k < layer->block->units; k++) y[k] = arena[d->mean + k] / (float)p->steps;
}

/* Sums become gradients of the parameters; a loss of the last output adds its own before that. */
TPS_FN void tps_diagonal_gradients(const tps_reader *r, const tps_layer *layer, const float *w,
                                   float *gains, const tps_progress *progress, float *loss)
{
    const tps_block *b = layer->block;
    const tps_diagonal *d = layer->diagonal;
    const float *gamma = r->head.arena + d->lambda + 2 * d->states;
    float *sums = r->head.arena + layer->sums, *y = r->head.arena + b->output;
    tps_places p = tps_places_of(layer);
    uint32_t i, k;
    if (d->loss_at == TPS_LAST) {
        tps_between f = tps_between_of(r, layer);
        tps_features(layer, w, r->head.arena + d->h, r->head.arena + d->x, f, y);
        if (b->slot != TPS_NOWHERE && gains[b->slot] == 0.0f)
            tps_calibrate(b, gains, tps_square_mean(y, b->units));
        *loss = tps_diagonal_learn(r, layer, w, gains, f, progress->label);
    }
    for (i = 0; i < d->states; i++) {
        float *of_b = sums + p.b + i * 2 * b->inputs;
        const float *drive = w + p.b + i * 2 * b->inputs;
        sums[i] *= -tps_exp(w[i]);
        sums[p.theta + i] *= tps_exp(w[p.theta + i]);
        for (k = 0; k < 2 * b->inputs; k++) {
            sums[p.gamma + i] += of_b[k] * drive[k] * gamma[i];
            of_b[k] *= gamma[i];
        }
    }
}
