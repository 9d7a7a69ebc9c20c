"""The training step of kernels/integers/, layers.h and rows.h, in Python's integers.

Written from its definition: one number after another, without words.

Every result that C keeps in an int32 is checked to fit into it.
"""

from math import tanh

from tpsgd_export.to_c.integer_scales import Factor, IntegerLayer, IntegerNet

BIAS_LIMIT = 2**30 - 1
NOISE = 747796405, 2891336453  # x -> factor x + term mod 2^32
EXP2 = [round(2 ** (15 - k / 32)) for k in range(33)]
TANH = [round(tanh(k / 16) * 2**15) for k in range(65)]


def int32(v):
    assert -(2**31) <= v < 2**31, v
    return v


def clip(v, limit):
    return max(-limit, min(limit, v))


def within(v, limit):
    return max(-limit - 1, min(limit, v))


def bits_of_all(x):
    """Some bits, of which 2^bits is no less than any number."""
    return max(int(v if v >= 0 else -1 - v).bit_length() for v in x)


def normalised(value, point):
    while value > 16383:
        value, point = value // 2, point - 1
    while 0 < value < 8192:
        value, point = value * 2, point + 1
    return Factor(value, point)


def product(a, b):
    return normalised(a.mantissa * b.mantissa, a.point + b.point)


def exp2(t):
    if t >= 16 << 12:
        return 0
    whole, k, rest = t >> 12, (t >> 7) & 31, t & 127
    return (EXP2[k] - (((EXP2[k] - EXP2[k + 1]) * rest + 64) >> 7)) >> whole


def log2(v):
    log = 0
    while v >= 2**16:
        v, log = v // 2, log + 4096
    for bit in (2048 >> i for i in range(12)):
        v = v * v >> 15
        if v >= 2**16:
            v, log = v // 2, log + bit
    return log


def tanh11(z, point):
    u = min(abs(z) * 2**12 // 2**point, 16383)
    k, rest = u >> 8, u & 255
    y = min(2047, (TANH[k] * 256 + (TANH[k + 1] - TANH[k]) * rest + 2048) >> 12)
    return -y if z < 0 else y


class Twin:
    """A net that learns as the exported C does."""

    def __init__(self, net: IntegerNet, nearest: bool = False) -> None:
        self.net, self.random, self.nearest = net, net.random, nearest
        self.classes = net.recipe.classes
        self.weights = [layer.weights.tolist() for layer in net.layers]
        self.biases = [
            None if layer.biases is None else layer.biases.tolist() for layer in net.layers
        ]

    def xorshift(self):
        x = self.random
        x ^= x << 13 & 0xFFFFFFFF
        x ^= x >> 17
        x ^= x << 5 & 0xFFFFFFFF
        self.random = x
        return x

    def round(self, v, shift):
        """v / 2^shift, rounded at random, at most 30 bits at a time."""
        while v and shift > 0:
            now = min(shift, 30)
            assert abs(v) <= 2**30
            number = self.xorshift()
            noise = 2 ** (now - 1) if self.nearest else number >> (32 - now)
            v, shift = int32(v + noise) >> now, shift - 30
        return v

    def sum(self, i, x, unit):
        start = self.biases[i][unit] if self.biases[i] is not None else 0
        z = start
        for w, v in zip(self.weights[i][unit], x, strict=True):
            z = int32(z + w * v)
        return z

    def activate(self, layer: IntegerLayer, z):
        shift = layer.sum_point - layer.output_point
        if layer.activation == 2:
            return tanh11(z, layer.sum_point)
        if z < 0 and layer.activation == 1:
            z = max(z >> shift, -65535)
            z = int32(z * layer.slope.mantissa) >> layer.slope.point
        elif shift:
            z = (z + 2 ** (shift - 1)) >> shift
        return clip(z, 2047)

    def softmax(self, sums, label, scale):
        below = [min((max(sums) - s) * scale.mantissa >> scale.point, 1 << 17) for s in sums]
        p = [exp2(t) for t in below]
        e = [((v << 15) + sum(p) // 2) // sum(p) for v in p]
        e = [v if c == label else min(v, 32767) for c, v in enumerate(e)]
        e[label] -= 1 << 15
        return e, (int32((below[label] + log2(sum(p))) * 2839)) >> 12

    def forward(self, x):
        for i, layer in enumerate(self.net.layers[:-1]):
            x = [self.activate(layer, self.sum(i, x, j)) for j in range(layer.outputs)]
        return [self.sum(len(self.net.layers) - 1, x, c) for c in range(self.classes)]

    def step(self, x, label, rate, blocks):
        """One sample; the losses of the blocks."""
        losses, x, last = [], [int(v) for v in x], len(self.net.layers) - 1
        for i, layer in enumerate(self.net.layers):
            learns = layer.learns and blocks >> i & 1
            losses.append(0)
            if i == last:
                if learns:
                    z = [self.sum(i, x, c) for c in range(self.classes)]
                    e, losses[i] = self.softmax(z, label, layer.log_gain)
                    self.learn(i, layer, x, range(self.classes), e, None, normalised(rate, 16))
                break
            y = [self.activate(layer, self.sum(i, x, j)) for j in range(layer.outputs)]
            if learns:
                losses[i] = self.learn_hidden(i, layer, x, y, label, rate)
            x = y
        return losses

    def learn_hidden(self, i, layer, x, y, label, rate):
        signs = [[1 if bit else -1 for bit in row] for row in layer.codes[: self.classes]]
        sums = [sum(s * v for s, v in zip(row, y, strict=True)) for row in signs]
        e, loss = self.softmax(sums, label, layer.log_gain)
        D = [sum(r[j] * v for r, v in zip(signs, e, strict=True)) for j in range(len(y))]
        if layer.activation == 2:
            D = [int32(d * ((2**22 - v * v) >> 10) + 2048) >> 12 for d, v in zip(D, y, strict=True)]
        up = product(layer.gain, normalised(rate, 16))
        for first in range(0, len(y), 8):  # biases of eight units, then their weights
            units = range(first, min(first + 8, len(y)))
            self.learn(i, layer, x, units, [D[j] for j in units], [y[j] for j in units], up)
        return loss

    def learn(self, i, layer, x, units, D, y, above):
        """Units move against d times the input over 2^shift, their biases against d."""
        bits, point = 11 if i else 8, 15 + layer.input_point - layer.weight_point
        shift = max(0, min(16, above.point + point - bits))
        below, moves = product(above, layer.slope), []
        for n, unit in enumerate(units):
            f = below if y is not None and y[n] <= 0 else above
            d = self.rounded_d(within(D[n], 65535) * f.mantissa, f.point + point - shift, bits)
            moves.append(d)
            if d and self.biases[i] is not None:
                at = shift - 2 * layer.input_point
                step = self.round(d, at) if at > 0 else clip(d * 2**-at, BIAS_LIMIT)
                self.biases[i][unit] = within(int32(self.biases[i][unit] - step), BIAS_LIMIT)
        for unit, d in zip(units, moves, strict=True):
            if d:
                self.move(self.weights[i][unit], x, d, shift, layer.limit)

    def rounded_d(self, v, down, bits):
        limit = BIAS_LIMIT >> bits
        if not v:
            return 0
        if down <= 0:
            return clip(v * 2**-down, limit)
        d = self.round(v, down)
        assert abs(d) <= limit or down < bits
        return clip(d, limit)

    def words(self, count):
        """Noise of a row: 32 bits after 32 bits, from a random number on."""
        word, words = self.xorshift(), []
        for _ in range(count):
            word = (word * NOISE[0] + NOISE[1]) % 2**32
            words.append(0x80008000 if self.nearest else word)
        return words

    def move(self, row, x, d, shift, limit):
        """A row of weights; where steps are rare, one of 2^g is chosen, and seldom moves."""
        g, words = 16 - bits_of_all(x) - abs(d).bit_length(), self.words(len(x) // 4 * 2 + 2)
        for k, v in enumerate(x):
            p, step = int32(d * v), 0
            if shift == 16 and g > 1:
                chosen, rest = divmod(words[k >> g], 2 ** (32 - g))
                if chosen == k % 2**g and rest < abs(p) << 16 and not self.nearest:
                    step = -1 if p > 0 else 1
            else:
                quad, place = divmod(k, 4)
                halves = divmod(words[2 * quad + place % 2], 2**16)
                step = int32((halves[place < 2] >> (16 - shift)) - p) >> shift
            row[k] = within(row[k] + step, limit)
