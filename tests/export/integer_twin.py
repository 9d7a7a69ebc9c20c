"""The training step of kernels/integer.h in Python's integers, written from its definition.

Every result that C keeps in an int32 is checked to fit into it.
"""

from math import tanh

from tpsgd_export.to_c.integer_scales import Factor, IntegerLayer, IntegerNet

BIAS_LIMIT = 2**30 - 1
EXP2 = [round(2 ** (15 - k / 32)) for k in range(33)]
TANH = [round(tanh(k / 16) * 2**15) for k in range(65)]


def int32(v):
    assert -(2**31) <= v < 2**31, v
    return v


def clip(v, limit):
    return max(-limit, min(limit, v))


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
        assert 0 <= shift <= 30 and abs(v) <= 2**30
        if not shift:
            return v
        noise = 2 ** (shift - 1) if self.nearest else self.xorshift() >> (32 - shift)
        return int32(v + noise) >> shift

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
                    for c, D in enumerate(e):
                        self.learn(i, layer, x, c, D, normalised(rate, 16))
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
        up = product(layer.gain, normalised(rate, 16))
        down = product(up, layer.slope)
        for j, v in enumerate(y):
            D = sum(row[j] * error for row, error in zip(signs, e, strict=True))
            if layer.activation == 2:
                D = int32(D * ((2**22 - v * v) >> 10) + 2048) >> 12
            self.learn(i, layer, x, j, D, up if v > 0 else down)
        return loss

    def learn(self, i, layer, x, unit, D, f):
        bits = 11 if i else 8
        d = int32(clip(D, 65535) * f.mantissa + 2 ** (bits - 1)) >> bits
        shift = 15 + f.point + layer.input_point - layer.weight_point - bits
        if shift > 30:
            d, shift = self.round_far(d, shift - 30), 30
        elif shift < 0:
            d, shift = clip(d * 2**-shift, BIAS_LIMIT >> bits), 0
        if not d:
            return
        row = self.weights[i][unit]
        for k, v in enumerate(x):
            if v:
                row[k] = clip(row[k] - self.round(int32(d * v), shift), layer.limit)
        if self.biases[i] is not None:
            shift -= 2 * layer.input_point
            d = clip(d * 2**-shift, BIAS_LIMIT) if shift < 0 else self.round(d, shift)
            self.biases[i][unit] = clip(int32(self.biases[i][unit] - d), BIAS_LIMIT)

    def round_far(self, v, shift):
        while v and shift > 30:
            v, shift = self.round(v, 30), shift - 30
        return self.round(v, shift) if v else 0
