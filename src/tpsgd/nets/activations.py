"""Activations with their derivatives, in place where that is safe.

`forward(z)` returns y. `backward(g, value)` multiplies g by sigma'(z), where `value` is y if the
derivative is a function of the output (then z need not be stored) and z otherwise.
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
    """sigma and its derivative. `from_output`: the derivative is a function of y."""

    forward: Callable[[Tensor], Tensor]
    op: Any
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    from_output: bool = True
    forward_: Callable[[Tensor], Tensor] | None = None

    def backward(self, g: Tensor, value: Tensor, into: Tensor | None = None) -> Tensor:
        """g * sigma'(z), in the memory of `into` if it is given."""
        kwargs = dict(self.kwargs)
        if into is not None:
            return self.op.grad_input(g, value, *self.args, **kwargs, grad_input=into)
        return self.op.default(g, value, *self.args, **kwargs)


def derivative_known(module: nn.Module | None) -> bool:
    """Whether `activation` has the module's derivative."""
    return module is None or type(module) in _ACTIVATIONS


def activation(module: nn.Module | None) -> Activation | None:
    """The activation of a module; None for no module."""
    return None if module is None else _ACTIVATIONS[type(module)](module)


def _leaky_relu(m: Any) -> Activation:
    slope = float(m.negative_slope)
    positive = slope > 0  # otherwise the sign of the input is lost
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
    approximate = m.approximate
    return Activation(
        lambda z: F.gelu(z, approximate=approximate),
        aten.gelu_backward,
        kwargs=(("approximate", approximate),),
        from_output=False,
    )


_ACTIVATIONS: dict[type[nn.Module], Callable[[nn.Module], Activation]] = {
    nn.ReLU: lambda m: Activation(torch.relu, aten.threshold_backward, (0,), forward_=torch.relu_),
    nn.Tanh: lambda m: Activation(torch.tanh, aten.tanh_backward, forward_=torch.tanh_),
    nn.Sigmoid: lambda m: Activation(torch.sigmoid, aten.sigmoid_backward, forward_=torch.sigmoid_),
    nn.SiLU: lambda m: Activation(F.silu, aten.silu_backward, from_output=False),
    nn.LeakyReLU: _leaky_relu,
    nn.GELU: _gelu,
    nn.Softplus: _softplus,
}
