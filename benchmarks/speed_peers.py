"""Backprop as others would write it: a plain torch loop, and loops without autograd."""

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tpsgd

aten = torch.ops.aten


def plain_loop(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    batch_size: int,
    epochs: int,
    channels_last: bool = False,
    precision: torch.dtype | None = None,
    augment: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The loop a user would write, with fused Adam; returns the mean loss of the last epoch."""
    if channels_last:  # samples are rows in that order, so that a gathered batch needs no copy
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.permute(0, 2, 3, 1).contiguous()
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    total = torch.zeros((), device=x.device)
    for _ in range(epochs):
        total.zero_()
        for batch in torch.randperm(len(y), device=y.device).split(batch_size):
            samples, labels = x.index_select(0, batch), y.index_select(0, batch)
            samples = samples.permute(0, 3, 1, 2) if channels_last else samples
            samples = samples if augment is None else augment(samples)
            with torch.autocast(x.device.type, precision, enabled=precision is not None):
                loss = F.cross_entropy(model(samples), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
    return total / math.ceil(len(y) / batch_size)


class Adam:
    """Adam's state for some tensors; a step is one call of torch's fused kernel."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = [p.detach() for p in params]
        self.means = [torch.zeros_like(p) for p in self.params]
        self.squares = [torch.zeros_like(p) for p in self.params]
        self.count = torch.zeros(())

    def step(self, grads: list[Tensor]) -> None:
        """Change the tensors by their gradients."""
        self.count += 1
        torch._fused_adam_(
            self.params, grads, self.means, self.squares, [], [self.count] * len(grads), lr=1e-3,
            beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip


@torch.no_grad()
def written_out_mlp(
    model: nn.Sequential, x: Tensor, y: Tensor, batch_size: int, epochs: int
) -> Tensor:
    """Backprop through linear layers and their activations with every product written out."""
    layers = [m for m in model if isinstance(m, nn.Linear)]
    activate, derive = activation(model[2])
    adam = Adam([p for layer in layers for p in (layer.weight, layer.bias)])
    weights, biases = adam.params[::2], adam.params[1::2]
    transposed = [w.t() for w in weights]
    last, x = len(layers) - 1, x.flatten(1)
    total = torch.zeros(())
    for _ in range(epochs):
        total.zero_()
        for samples, labels in batches(x, y, batch_size, layers[last].out_features):
            outputs, ones = [samples], torch.ones(len(samples))
            for i in range(last):
                outputs.append(activate(torch.addmm(biases[i], outputs[i], transposed[i])))
            error = head(weights[last], biases[last], outputs[last], labels, total)
            grads = [torch.mm(error, outputs[last]), torch.mv(error, ones)]
            delta = error.t()
            for i in range(last, 0, -1):  # the first layer's input needs no gradient
                delta = derive(torch.mm(delta, weights[i]), outputs[i])
                grads[:0] = [torch.mm(delta.t(), outputs[i - 1]), torch.mv(delta.t(), ones)]
            adam.step(grads)
    return total / math.ceil(len(y) / batch_size)


@torch.no_grad()
def written_out_rnn(
    model: nn.Sequential, x: Tensor, y: Tensor, batch_size: int, epochs: int
) -> Tensor:
    """Backprop through time through one leaky Tanh layer and a linear head, written out.

    Weight gradients are one product over all steps.
    """
    layer, linear = model
    assert isinstance(layer, tpsgd.Recurrent) and isinstance(linear, nn.Linear)
    cell: Any = layer.cells[0]
    leak, hidden, steps = layer.leak, layer.hidden, x.shape[1]
    adam = Adam([*cell.parameters(), linear.weight, linear.bias])
    weight_x, weight_h, bias_x, bias_h, weight, bias = adam.params
    total = torch.zeros(())
    for _ in range(epochs):
        total.zero_()
        for samples, labels in batches(x, y, batch_size, linear.out_features):
            n = len(samples)
            inputs = samples.transpose(0, 1).reshape(steps * n, -1)
            candidates = torch.addmm(bias_x + bias_h, inputs, weight_x.t()).view(steps, n, hidden)
            states = torch.zeros(steps + 1, n, hidden)
            now, then = candidates.unbind(), states.unbind()
            for t in range(steps):
                torch.addmm(now[t], then[t], weight_h.t(), out=now[t]).tanh_()
                torch.lerp(then[t], now[t], leak, out=then[t + 1])
            error = head(weight, bias, then[steps], labels, total)
            grad_head = [torch.mm(error, then[steps]), error.sum(1)]
            back = torch.mm(error.t(), weight)
            deltas = torch.empty_like(candidates)
            for t, delta in reversed(list(enumerate(deltas.unbind()))):
                aten.tanh_backward.grad_input(back, now[t], grad_input=delta).mul_(leak)
                torch.addmm(back, delta, weight_h, beta=1 - leak, out=back)
            across = deltas.view(steps * n, hidden).t()
            grad_h = torch.mm(across, states[:-1].view(steps * n, hidden))
            grad_b = torch.mv(across, torch.ones(steps * n))
            adam.step([torch.mm(across, inputs), grad_h, grad_b, grad_b, *grad_head])
    return total / math.ceil(len(y) / batch_size)


def batches(x: Tensor, y: Tensor, batch_size: int, classes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The samples in a random order, with one-hot labels as columns."""
    one_hot = torch.eye(classes)
    for batch in torch.randperm(len(y)).split(batch_size):
        labels = one_hot.index_select(1, y.index_select(0, batch))
        yield x.index_select(0, batch), labels


def head(weight: Tensor, bias: Tensor, x: Tensor, labels: Tensor, total: Tensor) -> Tensor:
    """The gradient of the mean cross-entropy by the logits (classes, n); its loss goes to `total`.

    A softmax over the first dimension is the faster one.
    """
    log_p = torch.addmm(bias[:, None], weight, x.t()).log_softmax(0)
    total -= torch.dot(log_p.view(-1), labels.view(-1)) / len(x)
    return log_p.exp_().sub_(labels).mul_(1 / len(x))


def activation(module: nn.Module) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """An activation in place, and its derivative by its output, in place in the gradient."""
    if isinstance(module, nn.Tanh):
        backward = aten.tanh_backward.grad_input
        return torch.tanh_, lambda grad, out: backward(grad, out, grad_input=grad)
    assert isinstance(module, nn.LeakyReLU)
    slope, backward = module.negative_slope, aten.leaky_relu_backward.grad_input
    return (
        lambda z: F.leaky_relu_(z, slope),
        lambda grad, out: backward(grad, out, slope, True, grad_input=grad),
    )


def sklearn_mlp(_: nn.Module, x: Tensor, y: Tensor, batch_size: int, epochs: int) -> None:
    """scikit-learn's MLP of 256 ReLUs, by Adam, without early stopping, on one thread."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier
    from threadpoolctl import threadpool_limits

    classifier = MLPClassifier(
        (256,), batch_size=batch_size, max_iter=epochs, n_iter_no_change=epochs + 1, tol=0.0,
        alpha=0.0, learning_rate_init=1e-3, random_state=0,
    )  # fmt: skip
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # it warns after the last epoch
        classifier.fit(x.numpy(), y.numpy())
