"""Activations with their derivatives, in place where that is safe.

`forward(z)` gives y; `backward(g, kept)` multiplies g by sigma'(z), where `kept` is y when the
derivative can be had from the output (then z need not live on) and z otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """sigma and its derivative. `from_output`: the derivative is read off y, not z."""

    forward: Callable[[Tensor], Tensor]
    op: Any
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    from_output: bool = True
    forward_: Callable[[Tensor], Tensor] | None = None

    def backward(self, g: Tensor, kept: Tensor, into: Tensor | None = None) -> Tensor:
        """g * sigma'(z), written into a tensor of the same shape where one is given."""
        kwargs = dict(self.kwargs)
        if into is not None:
            return self.op.grad_input(g, kept, *self.args, **kwargs, grad_input=into)
        return self.op.default(g, kept, *self.args, **kwargs)


def derivative_known(module: nn.Module | None) -> bool:
    """Whether `activation` has the module's derivative."""
    return module is None or type(module) in _KNOWN


def activation(module: nn.Module | None) -> Activation | None:
    """The activation that a module computes; None for none at all."""
    return None if module is None else _KNOWN[type(module)](module)


def _leaky_relu(m: Any) -> Activation:
    slope = float(m.negative_slope)
    positive = slope > 0  # otherwise the output does not tell the sign of the input
    return Activation(
        lambda z: F.leaky_relu(z, slope),
        aten.leaky_relu_backward,
        (slope, positive),
        from_output=positive,
        forward_=lambda z: F.leaky_relu_(z, slope),
    )


def _softplus(m: Any) -> Activation:
    beta, threshold = float(m.beta), float(m.threshold)
    return Activation(
        lambda z: F.softplus(z, beta, threshold),
        aten.softplus_backward,
        (beta, threshold),
        from_output=False,
    )


def _gelu(m: Any) -> Activation:
    how = m.approximate
    return Activation(
        lambda z: F.gelu(z, approximate=how),
        aten.gelu_backward,
        kwargs=(("approximate", how),),
        from_output=False,
    )


_KNOWN: dict[type[nn.Module], Callable[[nn.Module], Activation]] = {
    nn.ReLU: lambda m: Activation(torch.relu, aten.threshold_backward, (0,), forward_=torch.relu_),
    nn.Tanh: lambda m: Activation(torch.tanh, aten.tanh_backward, forward_=torch.tanh_),
    nn.Sigmoid: lambda m: Activation(torch.sigmoid, aten.sigmoid_backward, forward_=torch.sigmoid_),
    nn.SiLU: lambda m: Activation(F.silu, aten.silu_backward, from_output=False),
    nn.LeakyReLU: _leaky_relu,
    nn.GELU: _gelu,
    nn.Softplus: _softplus,
}
