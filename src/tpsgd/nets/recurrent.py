"""Recurrent layers as plain modules: the paper's cell, a leaky cell, and views of torch's `nn.RNN`.

    H_{t+1} = (1 - a) H_t + a sigma(X_t W_X + b_X + H_t W_H + b_H)

The paper's cell has a = 1 and the sigmoid. Under autograd, a module here is an ordinary recurrent
layer (backpropagation through time); `unrolled` trains it without.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tpsgd.common.errors import TpsgdError
from tpsgd.nets import inits
from tpsgd.nets.activations import derivative_known
from tpsgd.nets.diagonal import Diagonal
from tpsgd.nets.inits import Init
from tpsgd.nets.model_inputs import Called
from tpsgd.nets.padded import Padded, SequenceLayer, Sequences, as_sequences, through


class Cell(nn.Module):
    """The weights of one direction: W_X and b_X for the input, W_H and b_H for the state."""

    def __init__(self, weight_x: Any, weight_h: Any, bias_x: Any, bias_h: Any) -> None:
        super().__init__()
        self.weight_x, self.weight_h = weight_x, weight_h
        self.register_parameter("bias_x", bias_x)
        self.register_parameter("bias_h", bias_h)

    @classmethod
    def fresh(cls, inputs: int, hidden: int, init: Init) -> "Cell":
        """A new cell with zero biases."""
        shapes = ((hidden, inputs), (hidden, hidden), (hidden,), (hidden,))
        cell = cls(*(nn.Parameter(torch.zeros(shape)) for shape in shapes))
        init(cell.weight_x, cell.weight_h)
        return cell


class Recurrent(SequenceLayer):
    """A layer that reads sequences `(batch, steps, inputs)` and returns its state.

    Integers `(batch, steps)` are tokens: their one-hot vectors of `inputs` entries are looked up in
    W_X, never built. Sequences of different lengths are given as `tpsgd.Padded` or as torch's
    `PackedSequence`.

    Args:
        inputs: features of a step, or the number of tokens.
        hidden: units of the state.
        leak: a, the share of the state that a step replaces; 1 forgets the old state.
        activation: sigma, a module class of torch: Tanh, Sigmoid, ReLU, ...
        init: the initial weights, from `tpsgd.inits`, or their name, such as "zeros".
        bidirectional: a second cell reads backwards; both states are concatenated.
        sequence: return the states of all steps, for another recurrent layer, not only the last.

    Examples:
        >>> Recurrent(28, 64)(torch.zeros(2, 10, 28)).shape
        torch.Size([2, 64])
        >>> Recurrent(28, 64, sequence=True, bidirectional=True)(torch.zeros(2, 10, 28)).shape
        torch.Size([2, 10, 128])
    """

    diagonal = Diagonal  # a linear recurrence (LRU, Orvieto et al. 2023), which remembers for long

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        leak: float = 0.1,
        activation: type[nn.Module] = nn.Tanh,
        init: Init | str | None = None,
        bidirectional: bool = False,
        sequence: bool = False,
    ) -> None:
        super().__init__()
        if inputs < 1 or hidden < 1:
            raise TpsgdError(f"Recurrent needs inputs and units, got {inputs} and {hidden}")
        if not 0 < leak <= 1:
            raise TpsgdError(f"leak must be over 0 and at most 1, got {leak}")
        sigma = activation() if isinstance(activation, type) else None
        if not isinstance(sigma, nn.Module) or not derivative_known(sigma):
            raise TpsgdError(
                "activation must be a module class whose derivative is known here, nn.Tanh, "
                "Sigmoid, ReLU, LeakyReLU, GELU, SiLU or Softplus, got "
                f"{getattr(activation, '__name__', activation)}"
            )
        init = inits.reservoir() if init is None else inits.named(init)
        cells = [Cell.fresh(inputs, hidden, init) for _ in range(1 + bidirectional)]
        self.cells = nn.ModuleList(cells)
        self.activation, self.leak, self.sequence = sigma, leak, sequence

    @classmethod
    def paper(
        cls,
        inputs: int,
        hidden: int,
        *,
        init: Init | str | None = None,
        bidirectional: bool = False,
        sequence: bool = False,
    ) -> "Recurrent":
        """The paper's cell: H_{t+1} = sigmoid(H_t W_H + b_H + X_t W_X + b_X), small weights."""
        init = inits.uniform(0.01) if init is None else init
        return cls(
            inputs, hidden, leak=1.0, activation=nn.Sigmoid, init=init,
            bidirectional=bidirectional, sequence=sequence,
        )  # fmt: skip

    @classmethod
    def view(cls, rnn: nn.RNN, layer: int, sequence: bool) -> "Recurrent":
        """One layer of torch's `nn.RNN`; it shares its parameters."""
        sigma = nn.Tanh if rnn.nonlinearity == "tanh" else nn.ReLU
        recurrent = cls(1, 1, leak=1.0, activation=sigma, init="zeros", sequence=sequence)
        directions = ("", "_reverse")[: 1 + rnn.bidirectional]
        recurrent.cells = nn.ModuleList(
            Cell(*(getattr(rnn, f"{kind}_l{layer}{way}", None) for kind in _TORCH_NAMES))
            for way in directions
        )
        return recurrent.train(rnn.training)

    @property
    def inputs(self) -> int:
        return self.cells[0].weight_x.shape[1]  # type: ignore[union-attr, return-value]

    @property
    def hidden(self) -> int:
        return self.cells[0].weight_x.shape[0]  # type: ignore[union-attr, return-value]

    @property
    def bidirectional(self) -> bool:
        return len(self.cells) > 1

    def extra_repr(self) -> str:
        bidirectional = ", bidirectional" if self.bidirectional else ""
        sequence = ", sequence=True" if self.sequence else ""
        return f"{self.inputs}, {self.hidden}, leak={self.leak:g}{bidirectional}{sequence}"

    def forward(self, x: Sequences | PackedSequence, state: Tensor | None = None) -> Sequences:
        """The last state `(batch, units)`, or with `sequence` all states `(batch, steps, units)`.

        `state`: the initial state, such as the last state of an earlier chunk of the sequence; not
        for bidirectional layers.
        """
        x = as_sequences(x, self)
        if state is not None and self.bidirectional:
            raise TpsgdError("a bidirectional layer reads from both ends: it cannot go on from one")
        each = [self._read(cell, x, way, state) for way, cell in enumerate(self.cells)]
        if not self.sequence:
            return torch.cat([last for last, _ in each], -1)
        states = torch.cat([torch.stack(states, 1) for _, states in each], -1)
        return Padded(states, x.lengths) if isinstance(x, Padded) else states

    def _read(
        self, cell: Any, x: Sequences, backwards: int, state: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """One cell over whole sequences: its last state, and those of all steps if `sequence`."""
        data, lengths = (x.data, x.lengths) if isinstance(x, Padded) else (x, None)
        lengths = None if lengths is None else lengths.to(data.device)
        # all steps in one product if autograd stores them anyway (unbind's gradient is one stack)
        drive = _drive(cell, data).unbind(1) if torch.is_grad_enabled() else None
        recur = cell.weight_h.T
        h = recur.new_zeros(data.shape[0], self.hidden) if state is None else state
        states, steps = [], range(data.shape[1])
        for t in reversed(steps) if backwards else steps:
            z = _drive(cell, data[:, t]) if drive is None else drive[t]
            c = self.activation(torch.addmm(z, h, recur))
            new = c if self.leak == 1 else torch.lerp(h, c, self.leak)
            h = new if lengths is None else torch.where((lengths > t).unsqueeze(1), new, h)
            if self.sequence:
                states.append(h)
        return h, states[::-1] if backwards else states


_TORCH_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def _drive(cell: Any, x: Tensor) -> Tensor:
    """X_t W_X + b_X + b_H of all steps."""
    bias = None if cell.bias_x is None else cell.bias_x + cell.bias_h
    if x.is_floating_point():
        return F.linear(x, cell.weight_x, bias)
    drive = F.embedding(x, cell.weight_x.T)
    return drive if bias is None else drive + bias


class Joined(nn.Module):
    """A recurrent layer of torch's with one tensor as its output: the last state, or all states."""

    reads_sequences = True

    def __init__(self, rnn: nn.RNNBase, sequence: bool) -> None:
        super().__init__()
        self.rnn, self.sequence, self.block_title = _batch_first(rnn), sequence, type(rnn).__name__
        self.training = rnn.training

    def forward(self, x: Any) -> Sequences:
        x = Padded.of(x) if isinstance(x, PackedSequence) else x
        if type(self.rnn) is nn.RNN:
            x = as_sequences(x, Recurrent.view(self.rnn, 0, True))
        data, lengths = (x.data, x.lengths) if isinstance(x, Padded) else (x, None)
        if not data.is_floating_point():
            data = F.one_hot(data, self.rnn.input_size).to(self.rnn.weight_ih_l0.dtype)  # type: ignore
        inputs = data
        if lengths is not None:
            inputs = pack_padded_sequence(data, lengths, batch_first=True, enforce_sorted=False)
        states, last = self.rnn(inputs)
        if not self.sequence:
            last = last[0] if isinstance(last, tuple) else last  # of an LSTM, without its cells
            return torch.cat(tuple(last[-1 - self.rnn.bidirectional :]), -1)
        if lengths is None:
            return states
        return Padded(pad_packed_sequence(states, True, total_length=data.shape[1])[0], lengths)


class Chain(nn.Sequential):
    """An `nn.Sequential` that takes padded sequences: its modules act on every time step."""

    def forward(self, input: Any) -> Any:
        for module in self:
            input = through(module, input)
        return input


def connect(model: nn.Module) -> nn.Module:
    """A model that takes one tensor, or several, and gives one.

    In `nn.Sequential(nn.RNN(...), nn.Linear(...))` the linear layer gets the last state; another
    recurrent layer would get all states. The result shares the model's parameters and also takes
    `Padded`. Of a class of the user's, it is called with its inputs, and its logits are returned.

    Examples:
        >>> model = nn.Sequential(nn.RNN(28, 64, batch_first=True), nn.Linear(64, 10))
        >>> connect(model)(torch.zeros(2, 28, 28)).shape
        torch.Size([2, 10])
    """
    leaves = list(flat_modules(model))
    if leaves == [model]:
        own = type(model).__module__.startswith(("torch.nn", "tpsgd"))
        return model if own else Called(model)
    if not any(isinstance(m, (nn.RNNBase, Recurrent, Diagonal)) for m in leaves):
        return model
    modules = [
        Joined(m, feeds_recurrent(leaves[i + 1 :])) if isinstance(m, nn.RNNBase) else m
        for i, m in enumerate(leaves)
    ]
    return Chain(*modules).train(model.training)


def feeds_recurrent(after: list[nn.Module]) -> bool:
    """Whether the next layer with parameters, norms over features left out, is recurrent."""
    others = (m for m in after if not isinstance(m, (nn.LayerNorm, nn.RMSNorm)))
    layer = next((m for m in others if any(True for _ in m.parameters())), None)
    return isinstance(layer, (nn.RNNBase, SequenceLayer))


def tokens_of(model: nn.Module) -> int:
    """The number of tokens, if the model starts with a look-up; otherwise 0."""
    first = next((m for m in flat_modules(model) if not isinstance(m, nn.Identity)), None)
    if isinstance(first, SequenceLayer):
        return first.inputs
    return first.input_size if isinstance(first, nn.RNN) else 0


def views(rnn: nn.RNN, sequence: bool) -> Iterator[nn.Module]:
    """The layers of an `nn.RNN`, with the dropout between them."""
    _batch_first(rnn)
    for layer in range(rnn.num_layers):
        if layer and rnn.dropout:
            yield nn.Dropout(rnn.dropout)
        yield Recurrent.view(rnn, layer, sequence or layer < rnn.num_layers - 1)


def _batch_first(rnn: Any) -> Any:
    if not rnn.batch_first:
        raise TpsgdError(
            "samples come first here, (batch, steps, features): make it "
            f"nn.{type(rnn).__name__}(..., batch_first=True)"
        )
    return rnn


def flat_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of nested `nn.Sequential`s."""
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        for child in model:
            yield from flat_modules(child)
    else:
        yield model
