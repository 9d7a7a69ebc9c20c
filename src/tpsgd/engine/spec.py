"""The specification of a run: all that is decided before the first batch, in one frozen value.

`RunRequest` has what a model and its settings decide: the layers, the order, the optimizers, the
length. `RunSpec` adds what a few samples decide: the cut into blocks, a rule for each, output
shapes, the form of a batch. A model is cut once on the way; everything downstream reads the spec.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.learners.backprop import Backprop, in_segments
from tpsgd.engine.learners.optimizers import adam
from tpsgd.engine.lengths import with_lengths
from tpsgd.engine.settings import BlockSettings, Order, Settings
from tpsgd.engine.solvers import SOLVERS, Ridge
from tpsgd.engine.solvers.solvable import unsolvable
from tpsgd.engine.sources.batches import BatchForm, has_lookup, suits_channels_last
from tpsgd.engine.sources.loaders import first_pair, first_samples, is_stream
from tpsgd.losses import Loss, cross_entropy, mse
from tpsgd.nets.blocks import Block, has_batch_norm, products_of_layers, shapes, whole
from tpsgd.nets.cuts.split import counts_of, joined, layers_of, verify
from tpsgd.nets.layers import ends_in_maps
from tpsgd.nets.model_inputs import ModelInputs
from tpsgd.nets.padded import Padded, SequenceLayer
from tpsgd.nets.recurrent import connect
from tpsgd.objectives import NetSignal, Place
from tpsgd.rules import Rule
from tpsgd.targets import CLASSES, Target
from tpsgd.train import sequential, simultaneous

Method = Rule | Sequence[Rule] | Backprop
DEEP = 5  # layers that learn
SMALL = 32  # pixels of a side
NOTHING_LEARNS = (
    "{} has no parameters that may learn; if they are frozen, call model.requires_grad_(True), or "
    "that of the layers to train"
)


@dataclass(frozen=True)
class RunRequest:
    """Models, data, a rule or backprop, and the settings with everything chosen that was left out.

    `layers` are the models' blocks of one trainable layer each; backprop of any module has one.
    """

    models: list[nn.Module]
    data: Any
    method: Method
    settings: Settings
    layers: list[list[Block]] = field(repr=False)
    samples: Any = None  # a few
    target: Target = CLASSES
    random: Tensor | None = None  # the generator after a loader has given its first samples
    scaling: Any = None  # of labels that are numbers: a function

    @property
    def model(self) -> nn.Module:
        """The model, or the first of several restarts."""
        return self.models[0]

    @property
    def local(self) -> bool:
        """Whether blocks learn by themselves, not by backprop."""
        return not isinstance(self.method, Backprop)

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the first model, cut without samples: their number is final."""
        return joined(self.layers[0], counts_of(self.layers[0], self.settings.where))


def request(
    models: list[nn.Module],
    data: Any,
    method: Method,
    settings: Settings,
    samples: Any = None,
    target: Target | None = None,
) -> RunRequest:
    """Cut the models, and choose order and optimizers; mistakes in the settings are refused.

    That is before a model is moved to another device. `samples` and `target` are in place of data.
    """
    local, settings = not isinstance(method, Backprop), with_lengths(settings, data)
    random = None
    if data is not None:
        with torch.random.fork_rng([]):  # a loader that shuffles draws random numbers
            torch.manual_seed(settings.seed)
            samples, target = first_pair(data, settings.loss)
            random = torch.get_rng_state() if is_stream(data) else None
    cut = partial(layers_of, samples=samples, no_split=settings.no_split)
    layers = [cut(model) if local else _layers(model, cut) for model in models]
    if not local:  # what needs blocks does not apply, and is not recorded
        memory = replace(settings.memory, reuse=None, slices=None, redraw=False, fast=False)
        settings = replace(settings, order=None, window=None, memory=memory, blocks=None)
        settings = replace(settings, split_points=())
    if settings.loss is not None and settings.loss.of_numbers and target and not target.rows:
        outputs = getattr(layers[0][-1].layer, "weight", None)
        if isinstance(outputs, Tensor) and len(outputs) == 1:  # whole numbers, not classes
            target = replace(target, numbers=True)
    settings = completed(method, layers[0], settings)
    folder = settings.memory.reuse
    if isinstance(folder, (str, Path)) and not Path(folder).expanduser().is_dir():
        raise TpsgdError(f"reuse={str(folder)!r} is no folder to keep inputs in")
    target = target or CLASSES
    return RunRequest(models, data, method, settings, layers, samples, target, random)


def completed(method: Method, layers: list[Block], settings: Settings) -> Settings:
    """The settings with the order and the optimizers that were left out."""
    if isinstance(method, Backprop):
        return replace(settings, order=sequential, optimizer=settings.optimizer or adam)
    blocks = joined(layers, counts_of(layers, settings.where))
    rules = rules_for(method, blocks, settings.order)
    each = settings.per_block(len(blocks))
    settings = replace(settings, order=settings.order or _order(blocks, rules, each, settings))
    if settings.optimizer is not None:
        return settings
    return replace(settings, optimizer=_optimizers(blocks, rules, settings.order))


@dataclass(frozen=True)
class RunSpec:
    """A run as the learners see it: blocks, rules, output shapes, and the form of a batch.

    With several models, restarts that are stacked, `cuts` has the blocks of each.
    """

    method: Method
    settings: Settings
    cuts: list[list[Block]]
    layers: list[Block]  # for the record: the blocks, also under backprop, which has one
    rules: list[Rule]
    block_settings: list[BlockSettings]
    loss: Loss
    form: BatchForm
    sizes: list[dict[Place, tuple[int, ...]]]
    classes: int
    largest_product: int  # multiply-adds of one sample in the largest layer, of all restarts
    sample: tuple[tuple[int, ...], torch.dtype] | None = None  # None: sequences differ in length
    several: dict[Any, Any] = field(default_factory=dict)  # of several inputs, as `ModelInputs`
    target: Target = CLASSES
    scaling: Any = None

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the first model."""
        return self.cuts[0]

    @property
    def restarts(self) -> int | None:
        """How many restarts are stacked, if any are."""
        return len(self.cuts) if len(self.cuts) > 1 else None


def specify(
    request: RunRequest,
    x: Any,
    stream: bool,
    device: torch.device,
    check: Callable[[Any, BatchForm], None] | None = None,
) -> RunSpec:
    """The blocks of the models, their rules and the shapes that a few samples x take in them."""
    models, method, settings = request.models, request.method, request.settings
    layers, local = request.layers[0], request.local
    if not any(block.named_parameters() for block in layers):
        raise TpsgdError(NOTHING_LEARNS.format(type(models[0]).__name__))
    if local and settings.window is not None and not any(block.recurrent for block in layers):
        raise TpsgdError("window is for models with recurrent layers, and there is none")
    form = form_for(models, layers, x, stream, settings, device)
    if (not local or _one_block(settings, layers)) and _small_pictures(x, device):
        form = replace(form, channels_last=False)
    if check is not None:
        check(x, form)
    if isinstance(method, Backprop):
        _refuse_solver(settings)
        cuts = [[whole(in_segments(model, method.segments, x))] for model in models]
        rules, loss = [], settings.loss or (mse if request.target.numbers else cross_entropy)
    else:
        samples = replace(form, precision=None)(x)
        counts = counts_of(layers, settings.where, samples)
        cuts = [joined(each, counts) for each in request.layers]
        layers = cuts[0]
        rules = rules_for(method, layers, settings.order)
        loss = settings.loss or (mse if request.target.numbers else rules[-1].loss)
    block_settings = settings.per_block(len(cuts[0]))
    with products_of_layers() as products:
        sizes = sizes_of(cuts[0], x, settings, form)
    if local and layers[0].of_class and check is not None:
        verify(models[0], cuts[0], replace(form, precision=None)(x))
    output = sizes[-1][Place.END]
    if not output:
        raise TpsgdError(
            "the model gives one number for each sample, (batch,), and no dimension for it: leave "
            "out the squeeze or the index at its end, so that it gives (batch, 1)"
        )
    target = request.target.at(output, ends_in_maps(models[0]))
    classes = target.outputs(output)
    refuse_comparing(rules, target)
    largest = max(products, default=0) * len(models)
    sample = None if isinstance(x, Padded) else (tuple(x.shape[1:]), x.dtype)
    parts = cuts, layers, rules, block_settings, loss, form, sizes, classes, largest, sample
    several = x.forms if isinstance(x, ModelInputs) else {}
    scaling = request.scaling if target.numbers else None
    more = {"several": several, "target": target, "scaling": scaling}
    return RunSpec(method, settings, *parts, **more)


def _one_block(settings: Settings, layers: list[Block]) -> bool:
    """Whether all layers, several, are one block."""
    return len(layers) > 1 and settings.blocks in (1, [len(layers)], (len(layers),))


def _small_pictures(x: Any, device: torch.device) -> bool:
    """Whether autograd's convolutions on a CPU are faster with channels first."""
    return device.type == "cpu" and x.dim() == 4 and min(x.shape[2:]) < SMALL


def _refuse_solver(settings: Settings) -> None:
    """Refuse what backprop cannot do."""
    optimizer = settings.per_block(1)[0].optimizer
    if isinstance(optimizer, SOLVERS):
        raise TpsgdError(
            f"{optimizer.__name__} solves one block at a time; backprop, whose gradients go "
            "through all of them, needs an optimizer"
        )


def _layers(model: nn.Module, cut: Callable[[nn.Module], list[Block]]) -> list[Block]:
    """The blocks of a model that is trained as a whole; any module will do."""
    try:
        return cut(model)
    except TpsgdError:
        return [whole(connect(model))]


def rules_for(rule: Rule | Sequence[Rule], blocks: list[Block], order: Any) -> list[Rule]:
    """One rule per block, or an error that lists the blocks."""
    rules: list[Any] = list(rule) if isinstance(rule, (list, tuple)) else [rule]
    if isinstance(rule, Rule):
        rules *= len(blocks)
    if len(rules) != len(blocks) or not all(isinstance(r, Rule) for r in rules):
        raise TpsgdError(
            f"rule must be a tpsgd.rules value, as tpsgd_l2(), or a list of {len(blocks)}, one "
            f"per block, got {len(rules)}: {[getattr(r, 'name', r) for r in rules]}; the blocks "
            f"are {'; '.join(map(str, blocks))}"
        )
    for r in rules[:-1]:
        if isinstance(r.signal, NetSignal):
            if not isinstance(rule, Rule):
                raise TpsgdError(f"{r.name} makes the signals of all blocks: pass it in no list")
            if any(block.recurrent for block in blocks):
                raise TpsgdError(f"{r.name} is for nets without recurrent layers")
            if order is sequential:
                how = f"its signal is {r.signal.about}; use order=tpsgd.simultaneous"
                raise TpsgdError(f"{r.name} cannot learn block by block: {how}")
        if r.needs_output and order is sequential:
            raise TpsgdError(
                f"{r.name} cannot learn block by block: its signal is the error of the whole net's "
                "output, which is not trained yet; use order=tpsgd.simultaneous"
            )
    return rules


def _order(
    blocks: list[Block], rules: list[Rule], each: list[BlockSettings], settings: Settings
) -> Order:
    """The order that suits the kind of net, where none was asked for.

    - `simultaneous` if a block learns from the error of the net's output (DFA, sDFA);
    - `sequential` if a block is solved, because its inputs must not change meanwhile;
    - `sequential` within a memory budget, because it needs the least, and with `Memory(reuse=...)`,
      which says how it keeps inputs;
    - `simultaneous` if five layers or more learn in a net with batch norm: one forward pass serves
      all blocks, and the norm keeps the inputs of a block in their range while they change. Without
      it, deep nets are much more accurate block by block;
    - `sequential`, the paper's, for every other net.
    """
    if any(r.needs_net for r in rules[:-1]):
        return simultaneous
    saves = settings.memory.budget is not None or settings.memory.reuse is not None
    if saves or any(isinstance(s.optimizer, SOLVERS) for s in each):
        return sequential
    taught = [r.objective is not None for r in rules[:-1]] + [True]
    columns = zip(blocks, taught, each, strict=True)
    learning = [b for b, has_rule, s in columns if has_rule and s.epochs and b.named_parameters()]
    deep = sum(len(b.layers) for b in learning) >= DEEP and has_batch_norm(modules_of(blocks))
    return simultaneous if deep else sequential


def _optimizers(blocks: list[Block], rules: list[Rule], order: Order | None) -> Any:
    """Adam; but the classifier of a recurrent net that learns block by block is solved.

    `ridge` does that, if it can: on short data sets Adam's few steps leave a classifier far from
    that solution.
    """
    last, in_turn = blocks[-1], order is sequential
    recurrent = in_turn and any(block.recurrent for block in blocks) and not last.recurrent
    if not recurrent or not rules[-1].head or unsolvable(last, rules[-1], True) is not None:
        return adam
    return [*[adam] * (len(blocks) - 1), Ridge()]


def modules_of(blocks: list[Block]) -> list[nn.Module]:
    """All modules in these blocks, those inside of others too."""
    return [m for block in blocks for top in block.modules for m in top.modules()]


def sizes_of(
    blocks: list[Block], x: Any, settings: Settings, form: BatchForm
) -> list[dict[Place, tuple[int, ...]]]:
    """Output shapes of every block, which held-out data must have too."""
    form = replace(form, precision=None)
    _refuse_unread(blocks, x)
    sizes = shapes(blocks, form(x))
    _refuse_ragged(blocks, x)
    if settings.validation is not None:
        x = form(first_samples(settings.validation))
        _refuse_unread(blocks, x)
        validation_sizes = shapes(blocks, x)
        for block, size, other in zip(blocks, sizes, validation_sizes, strict=True):
            if isinstance(block.layer, SequenceLayer) and block.layer.sequence:
                other.update(size)  # sequences may have any length
        if validation_sizes != sizes:
            raise TpsgdError(
                f"the validation data's samples, of shape {tuple(x.shape[1:])}, give other output "
                "shapes than the training data's"
            )
    return sizes


def _refuse_unread(blocks: list[Block], x: Any) -> None:
    """Only recurrent layers can read sequences of different lengths."""
    modules = modules_of(blocks)
    if isinstance(x, Padded) and not any(hasattr(m, "reads_sequences") for m in modules):
        raise TpsgdError(
            "the samples differ in length, and the model has no recurrent layer to read them: pad "
            "or cut them to one length, or begin the model with tpsgd.Recurrent"
        )


def _refuse_ragged(blocks: list[Block], x: Any) -> None:
    """Only recurrent layers can leave the padding of sequences out when they learn."""
    readers = [b for b in blocks if isinstance(b.layer, SequenceLayer)]
    if not isinstance(x, Padded) or not readers or len(blocks) == 1:
        return
    for block in blocks[: readers[0].index]:
        if block.named_parameters():
            raise TpsgdError(
                f"block {block.index + 1} ({block}) comes before the first recurrent layer and "
                "cannot learn from sequences of different lengths: freeze it with "
                "requires_grad_(False)"
            )
    if readers[-1].layer.sequence:
        raise TpsgdError(
            f"block {readers[-1].index + 1} ({readers[-1]}) outputs sequences of different "
            "lengths, padding and all: let the last recurrent layer give its last state "
            "(sequence=False); for a label for each step, pass tensors, padded, with -100 as the "
            "labels of the padding"
        )


def form_for(
    models: list[nn.Module],
    blocks: list[Block],
    x: Any,
    stream: bool,
    settings: Settings,
    device: torch.device,
) -> BatchForm:
    """How batches must look for these blocks."""
    modules = modules_of(blocks)
    dtype = next(models[0].parameters()).dtype
    if settings.precision is not None:
        _check_precision(modules, dtype, settings.precision)
    return BatchForm(
        device,
        dtype,
        settings.batch_size,
        tuple(settings.seed + r for r in range(len(models))),
        channels_last=suits_channels_last(modules),
        lookup=has_lookup(modules),
        batch_norm=has_batch_norm(modules),
        tokens=_tokens(blocks[0]),
        in_chunks=_in_chunks(blocks[0], x, settings),
        ragged=stream or isinstance(x, Padded),
        micro_batch=settings.memory.micro_batch,
        precision=settings.precision,
    )


def _check_precision(modules: list[nn.Module], dtype: torch.dtype, precision: torch.dtype) -> None:
    name = str(precision).removeprefix("torch.")
    if dtype is not torch.float32:
        raise TpsgdError(
            f"precision={name} is for models in float32, which their parameters stay; this one is "
            f"in {str(dtype).removeprefix('torch.')}: leave precision out"
        )
    if any(isinstance(m, (SequenceLayer, nn.RNNBase, nn.RNNCellBase)) for m in modules):
        raise TpsgdError(
            f"precision={name} is for models without recurrent layers, whose errors would add up "
            "over time: leave precision out"
        )


def _tokens(first: Block) -> int:
    """How many tokens there are, if the model begins by looking them up."""
    reads = isinstance(first.layer, SequenceLayer) and not first.prologue
    return first.layer.inputs if reads else 0  # type: ignore[union-attr, return-value]


def _in_chunks(first: Block, x: Any, settings: Settings) -> bool:
    """Whether sequences can be gathered a few steps at a time, which `window` asks for."""
    if settings.window is None or not first.recurrent or first.prologue:
        return False
    return x.dim() == 3 or (x.dim() == 2 and _tokens(first) > 1 and not x.is_floating_point())


def refuse_comparing(rules: list[Rule], target: Target) -> None:
    """Refuse rules that compare samples of a class, where there are no such samples."""
    for rule in rules[:-1]:
        if rule.compares and (target.numbers or target.positions):
            labels = "numbers" if target.numbers else "classes of every position"
            raise TpsgdError(
                f"{rule.name} compares samples of a class, and the labels are {labels}: choose "
                "another rule, such as readout"
            )
