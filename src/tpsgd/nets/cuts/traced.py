"""The modules of any model in the order in which data meets them, from a trace of its `forward`.

torch.fx records what `forward` calls, in training and in evaluation mode. Between two calls the
model can be cut if one activation crosses there: everything after is then a function of it, of the
parameters, and of the model's inputs, which every block may read (a mask, a second input). What is
computed from inputs alone, without parameters, may cross too: each block that needs it computes it.

A module whose `forward` cannot be traced (its control flow depends on data) stays whole, as do
torch's own, and modules with hooks.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from tpsgd.nets.blocks import hooked
from tpsgd.nets.cuts.sections import (
    Remember,
    Section,
    is_flatten,
    is_size,
    overwritten,
    twin,
)
from tpsgd.nets.cuts.sizes import Question, SizedProxy, answer
from tpsgd.nets.model_inputs import ANSWERS
from tpsgd.nets.modes import attributes_restored

Leaves = list[tuple[str, nn.Module]]
CONSTANT = "_tensor_constant"  # how fx names tensors that a `forward` makes
CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.Sequential
LOOK_UPS = (nn.Embedding, nn.EmbeddingBag)
GIVE_TUPLES = (nn.RNNBase, nn.LSTMCell, nn.MultiheadAttention)
JOINS = {
    "add", "iadd", "sub", "isub", "mul", "imul", "truediv", "cat", "concat", "stack", "expand",
    "expand_as", "repeat", "where",
}  # fmt: skip
RANDOM = ("dropout", "rand", "bernoulli", "normal_", "uniform_", "multinomial", "poisson")


class Untraceable(Exception):
    """Why a model has no graph."""


class ModuleCall(NamedTuple):
    """A call of a module that is not a leaf: the nodes of its input and output, if it has one."""

    path: str
    argument: Any
    output: Any


class _Tracer(fx.Tracer):
    """Traces a model; modules whose paths are `opaque` are leaves.

    `answers` are those to the first questions of the model's own `forward` about sizes.
    """

    def __init__(self, opaque: set[str], answers: Sequence[Any]) -> None:
        super().__init__()
        self.opaque, self.calls, self.open = opaque, list[ModuleCall](), list[str]()
        self.answers, self.with_gradients = iter(answers), torch.is_grad_enabled()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Note a call, unless it is one without gradients, which a graph would not say."""
        if torch.is_grad_enabled() != self.with_gradients:
            raise Untraceable("it turns gradients off, or on, in its forward")
        return super().create_node(*args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A value that may be asked for its size."""
        return SizedProxy(node, self)

    def answer(self, node: fx.Node, kind: Callable[[Any], Any]) -> Any:
        """What is known of a node; inside a module, which stays whole, nothing is."""
        if self.open:
            raise Question(node, kind)
        for known in self.answers:
            return known
        raise Question(node, kind)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Whether a condition holds."""
        return self.answer(obj.node, bool)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """The entries of a shape."""
        entries: Any = obj
        return (entries[i] for i in range(self.answer(obj.node, len)))

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """torch's modules and this library's, and those that must stay whole."""
        if type(m) is nn.TransformerEncoder and m.layers:
            return module_qualified_name in self.opaque
        only_calls = type(m).forward is nn.Sequential.forward or any(True for _ in m.children())
        return (
            super().is_leaf_module(m, module_qualified_name)
            or type(m).__module__.startswith("tpsgd.")
            or module_qualified_name in self.opaque
            or hooked(m)
            or not only_calls
        )

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Note the call; an encoder of torch is its layers one after another."""
        path = self.path_of_module(m)
        self.open.append(path)
        if type(m) is nn.TransformerEncoder and not self.is_leaf_module(m, path):
            if args[1:] or any(value is not None for value in kwargs.values()):
                raise Untraceable("an encoder with a mask")
            forward = _layer_by_layer(m)
        output = super().call_module(m, forward, args, kwargs)
        single = len(args) == 1 and not kwargs and isinstance(args[0], fx.Proxy)
        argument = args[0].node if single else None
        node = output.node if isinstance(output, fx.Proxy) else None
        self.calls.append(ModuleCall(path, argument, node))
        self.open.pop()
        return output


def _layer_by_layer(encoder: Any) -> Callable[..., Any]:
    def forward(src: Any, **_: Any) -> Any:
        for layer in encoder.layers:
            src = layer(src)
        return src if encoder.norm is None else encoder.norm(src)

    return forward


class Trace(NamedTuple):
    """What a model calls, in training and in evaluation mode: nodes of the same calls."""

    nodes: list[fx.Node]
    evaluating: list[fx.Node]
    calls: list[ModuleCall]
    constants: dict[str, Tensor]  # that `forward` has made, by the names of their nodes


def trace(model: nn.Module, inputs: Sequence[str | int] = (), samples: Any = None) -> Trace:
    """The graph of a model for the inputs that it will get, by default those without defaults.

    What its `forward` asks of sizes is answered by a few samples.
    """
    opaque: set[str] = set()
    absent = _absent(model, inputs)
    while True:
        graphs = [_graph(model, mode, opaque, absent, samples) for mode in (True, False)]
        learning, evaluating = ([*graph.nodes] for graph, *_ in graphs)
        pairs = zip(learning, evaluating, strict=False)
        different = next((a for a, b in pairs if (a.op, a.target) != (b.op, b.target)), None)
        if different is None and len(learning) == len(evaluating):
            return Trace(learning, evaluating, *graphs[0][1:])
        stack = getattr(different, "meta", {}).get("nn_module_stack") or {}
        inner = [path for path, _ in stack.values() if path and path not in opaque]
        if not inner:
            raise Untraceable("it computes something else in training mode than in evaluation mode")
        opaque.add(inner[-1])


def _graph(
    model: nn.Module, training: bool, opaque: set[str], absent: dict[str, Any], samples: Any
) -> tuple[fx.Graph, list[ModuleCall], dict[str, Tensor]]:
    """The graph in a mode. Modules that cannot be traced become opaque, and tracing begins anew."""
    answers: list[Any] = []
    while True:
        tracer = _Tracer(opaque, answers)
        with attributes_restored(model):  # a forward may keep what it computes
            model.train(training)
            try:
                graph = tracer.trace(model, concrete_args=dict(absent))
                constants = {k: v for k, v in vars(model).items() if k.startswith(CONSTANT)}
                break
            except Exception as error:  # whatever a model does with what is no tensor
                around = [path for path in tracer.open if path not in opaque]
                size = None
                if isinstance(error, Question) and not tracer.open:
                    size = answer(error, model, samples)
                if size is not None:
                    answers.append(size)
                elif around:
                    opaque.add(around[-1])
                else:
                    reason = _reason(error, samples is None)
                    raise Untraceable(f"{reason} ({_line(model, error)})") from error
    _erase_absent(graph, model, absent)
    return graph, tracer.calls, constants


def _erase_absent(graph: fx.Graph, model: nn.Module, absent: dict[str, Any]) -> None:
    """Erase the arguments of `forward` that the model does not get."""
    names = inspect.signature(model.forward).parameters
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for name, node in zip(names, placeholders, strict=False):
        if name in absent:
            _erase(graph, node)
        elif str(node.target).startswith("*"):  # *args and **options, which are empty
            if node.users:
                raise Untraceable(f"it reads {node.target}")
            graph.erase_node(node)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node and what depends on it: the check that an argument has its default."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


def _reason(error: Exception, without_sample: bool) -> str:
    """Why tracing ended."""
    reason = (str(error) or type(error).__name__).splitlines()[0]
    if "__cuda_array_interface__" in reason:
        return "it gives a tensor to a function that needs its numbers"
    asks_for_a_size = isinstance(error, Question) and without_sample
    more = "; or by a size, which the shape of a sample would tell"
    return reason + more * asks_for_a_size


def _line(model: nn.Module, error: BaseException) -> str:
    """The line of the model's own code at which tracing ended."""
    code: Any = getattr(type(model).forward, "__code__", None)
    file, place, step = code and code.co_filename, "", error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == file:
            place = f"line {step.tb_lineno} of {Path(file).name}"
        step = step.tb_next
    return place or f"in the forward of {type(model).__name__}"


def _absent(model: nn.Module, inputs: Sequence[str | int]) -> dict[str, Any]:
    """The arguments of `forward` that the model will not get, with their defaults."""
    parameters = inspect.signature(model.forward).parameters
    names = dict(enumerate(parameters))
    present = {names.get(i, i) if isinstance(i, int) else i for i in inputs or [0]}
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    return {name: value for name, value in defaults.items() if name not in present}


# ---- from the graph to modules -------------------------------------------------------------------


def leaves(model: nn.Module, inputs: Sequence[str | int] = (), samples: Any = None) -> Leaves:
    """The modules that a model consists of, one for each step from an activation to the next."""
    return list(_Parts(model, trace(model, inputs, samples)))


class _Parts:
    """The parts of a traced model between activations that cross alone."""

    def __init__(self, model: nn.Module, traced: Trace) -> None:
        self.model, self.nodes, self.constants = model, traced.nodes, traced.constants
        self.evaluating = dict(zip(traced.nodes, traced.evaluating, strict=True))
        self.number = {node: i for i, node in enumerate(self.nodes)}
        self.inputs = [node for node in self.nodes if node.op == "placeholder"]
        self.calls = {
            (call.argument, call.output): call.path
            for call in reversed(traced.calls)  # of two that are alike, the one inside
            if None not in (call.argument, call.output)
        }
        self.from_input: set[fx.Node] = set()  # nodes that depend on the inputs
        self.activations: set[fx.Node] = set()  # of these, those that depend on parameters too
        for node in self.nodes:
            self._classify(node)
        output = self.nodes[-1].args[0]
        self.answer = output if isinstance(output, fx.Node) else _first_node(output)

    def _classify(self, node: fx.Node) -> None:
        before = node.all_input_nodes
        if node.op == "placeholder" or any(n in self.from_input for n in before):
            self.from_input.add(node)
            if any(n in self.activations for n in before) or self._computes(node):
                self.activations.add(node)

    def _computes(self, node: fx.Node) -> bool:
        """Whether a call uses parameters or random numbers, so that it must not be repeated."""
        if node.op == "call_module":
            module: Any = self.model.get_submodule(str(node.target))
            stateful = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
            drops = isinstance(module, nn.modules.dropout._DropoutNd)
            return stateful or drops or not type(module).__module__.startswith("torch.nn")
        name = str(getattr(node.target, "__name__", node.target))
        parameters = (n for n in node.all_input_nodes if n not in self.from_input)
        learned = any(self._is_parameter(n) for n in parameters)
        return learned or any(word in name for word in RANDOM)

    def _is_parameter(self, node: fx.Node) -> bool:
        """Whether a node that depends on no input is, or depends on, a parameter."""
        if node.op == "get_attr":
            return isinstance(self._attribute(str(node.target)), nn.Parameter)
        return node.op == "call_module" or any(map(self._is_parameter, node.all_input_nodes))

    def _attribute(self, path: str) -> Any:
        """What a node refers to: a module, a parameter or a buffer of the model, or a constant."""
        value = self.constants.get(path)
        return attrgetter(path)(self.model) if value is None else value

    def is_batch(self, node: Any) -> bool:
        """Whether a node is the number of samples, as read off an input."""
        return _is_size_of(node, self.inputs)

    def __iter__(self) -> Iterator[tuple[str, nn.Module]]:
        first = self.inputs[0] if len(self.inputs) == 1 else None
        cuts = [(0, first), *self._crossings(), (len(self.nodes) - 1, self.answer)]
        cuts = [cut for i, cut in enumerate(cuts) if i == 0 or cut[1] is not cuts[i - 1][1]]
        parts = [self._part(*a, *b) for a, b in pairwise(cuts)]
        parts = self._whole_modules(parts, [crossing for _, crossing in cuts])
        if len(self.inputs) == 1 and any(getattr(m, "reads_inputs", False) for _, m in parts):
            yield "inputs", Remember()
        yield from parts

    def _crossings(self) -> Iterator[tuple[int, fx.Node]]:
        """Where one tensor alone crosses: after which node, and which."""
        users = {n: [*n.users] for n in self.nodes}
        for node in self.nodes[-1].all_input_nodes:
            if node is not self.answer:  # returned besides it, and read by nothing here
                users[node].remove(self.nodes[-1])
        last_use = {n: max((self.number[u] for u in users[n]), default=-1) for n in self.nodes}
        live, computed = list(self.inputs), False
        for i, node in enumerate(self.nodes[:-1]):
            live = [n for n in live if last_use[n] > i]
            computed = computed or node in self.activations
            if node.op == "placeholder":
                continue
            if node in self.from_input and last_use[node] > i and not self.is_batch(node):
                live.append(node)
            crossing = [n for n in live if n in self.activations or not computed]
            if len(crossing) == 1 and _is_tensor(crossing[0], self.model):
                yield i, crossing[0]

    def _part(
        self, start: int, incoming: fx.Node | None, end: int, outgoing: fx.Node
    ) -> tuple[str, nn.Module]:
        """What leads from one activation to the next."""
        nodes = self._needed(start, end, incoming, outgoing)
        if path := self.calls.get((incoming, outgoing)):
            return path, self.model.get_submodule(path)
        if len(nodes) == 1 and nodes[0].args[:1] == (incoming,):
            (node,) = nodes
            if node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
                return str(node.target), self.model.get_submodule(str(node.target))
            if module := twin(node, self.evaluating[node]):
                return self._name(nodes), module
        if is_flatten(nodes, lambda n: _is_size_of(n, [*self.inputs, incoming])):
            return self._name(nodes), nn.Flatten()
        return self._section(nodes, incoming, outgoing)

    def _whole_modules(self, parts: Leaves, crossings: list[fx.Node]) -> Leaves:
        """Parts that make up one module, none of them a layer by itself, as that module."""
        place = {node: i for i, node in enumerate(crossings)}
        spans = {
            (place[a], place[b]): path
            for (a, b), path in self.calls.items()
            if a in place and b in place and place[a] < place[b]
        }
        joined: dict[int, tuple[int, str]] = {}  # from a part: up to which, as which module
        for i, (_, module) in enumerate(parts):
            around = [span for span in spans if span[0] <= i < span[1]]
            if isinstance(module, Section) and around:
                first, end = min(around, key=lambda span: span[1] - span[0])
                others = [m for _, m in parts[first:end] if not isinstance(m, Section)]
                if not any(p.dim() > 1 for m in others for p in m.parameters()):
                    joined[first] = end, spans[first, end]
        leaves, i = [], 0
        while i < len(parts):
            end, path = joined.get(i, (i + 1, ""))
            leaves.append((path, self.model.get_submodule(path)) if path else parts[i])
            i = end
        return leaves

    def _needed(
        self, start: int, end: int, incoming: fx.Node | None, outgoing: fx.Node
    ) -> list[fx.Node]:
        """The nodes of a part: those after the last cut, and what they need of inputs alone."""
        wanted = [outgoing, *(n for n in self.nodes[start + 1 : end + 1] if self._belongs(n))]
        needed: set[fx.Node] = set()
        while wanted:
            node = wanted.pop()
            if node is incoming or node in needed or node.op in ("placeholder", "output"):
                continue
            needed.add(node)
            wanted += [] if self.is_batch(node) else node.all_input_nodes
        return sorted(needed, key=self.number.__getitem__)

    def _belongs(self, node: fx.Node) -> bool:
        """Whether a call is made here although nothing may read its result: it may write."""
        return node in self.activations and node.op.startswith("call") and not is_size(node)

    def _section(
        self, nodes: list[fx.Node], incoming: fx.Node | None, outgoing: fx.Node
    ) -> tuple[str, nn.Module]:
        used = {n for node in nodes if not self.is_batch(node) for n in node.all_input_nodes}
        reads = [n for n in self.inputs if n in used | {outgoing} and n is not incoming]
        learning = self._module(nodes, incoming, outgoing, reads, lambda n: n)
        evaluating = None
        if any(_constants(n) != _constants(self.evaluating[n]) for n in nodes):
            evaluating = self._module(nodes, incoming, outgoing, reads, self.evaluating.__getitem__)
        names = [(str(n.target), self.inputs.index(n)) for n in reads]
        section = Section(learning, evaluating, self._title(nodes), names)
        products = [node for node in nodes if self._is_product(node)]
        section.is_layer = bool(products)
        section.embeds = all(self._looks_up(node) for node in products)
        return self._name(nodes), section

    def _is_product(self, node: fx.Node) -> bool:
        """Whether a call multiplies by weights; those that are added or joined are no layer."""
        if node.op == "call_module":
            module = self.model.get_submodule(str(node.target))
            return any(p.dim() > 1 for p in module.parameters())
        name = str(getattr(node.target, "__name__", node.target))
        weights = [n for n in node.all_input_nodes if n not in self.from_input]
        return name not in JOINS and any(map(self._is_parameter, weights))

    def _looks_up(self, node: fx.Node) -> bool:
        is_module = node.op == "call_module"
        return is_module and isinstance(self.model.get_submodule(str(node.target)), LOOK_UPS)

    def _module(
        self,
        nodes: list[fx.Node],
        incoming: fx.Node | None,
        outgoing: fx.Node,
        reads: list[fx.Node],
        version: Callable[[fx.Node], fx.Node],
    ) -> fx.GraphModule:
        """Nodes as a module of one activation and the inputs that they read."""
        graph = fx.Graph()
        x = graph.placeholder("activation")
        copies: dict[fx.Node, fx.Node] = {n: graph.placeholder(str(n.target)) for n in reads}
        if incoming is not None:
            copied = graph.call_method("clone", (x,)) if overwritten(nodes, incoming) else x
            copies[incoming] = copied
        by_version = {version(node): copy for node, copy in copies.items()}
        for node in nodes:
            if self.is_batch(node):
                copy = graph.call_method("size", (x, 0))
            else:
                copy = graph.node_copy(version(node), by_version.__getitem__)
            copies[node] = by_version[version(node)] = copy
        graph.output(copies[outgoing])
        used = (str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module"))
        return fx.GraphModule({path: self._attribute(path) for path in used}, graph, "Section")

    def _scope(self, nodes: Sequence[fx.Node]) -> str:
        """The path of the innermost module whose `forward` makes all these calls."""
        paths = [self._path(node).split(".") for node in nodes]
        common: list[str] = []
        for names in zip(*paths, strict=False):
            if len(set(names)) > 1:
                break
            common.append(names[0])
        return ".".join(common)

    def _path(self, node: fx.Node) -> str:
        stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        path = stack[-1] if stack else ""
        return path.rpartition(".")[0] if node.op == "call_module" else path

    def _name(self, nodes: Sequence[fx.Node]) -> str:
        """A name for a part that is no module of the model: where it is, and what comes first."""
        scope = self._scope(nodes)
        if scope and not isinstance(self.model.get_submodule(scope), CONTAINERS):
            return scope
        modules = [str(n.target) for n in nodes if n.op == "call_module"]
        return modules[0] if modules else nodes[0].name

    def _title(self, nodes: Sequence[fx.Node]) -> str:
        scope = self._scope(nodes)
        if scope and not isinstance(self.model.get_submodule(scope), CONTAINERS):
            return type(self.model.get_submodule(scope)).__name__
        modules = [n.target for n in nodes if n.op == "call_module"]
        kinds = [type(self.model.get_submodule(str(m))).__name__ for m in modules]
        calls = [str(getattr(n.target, "__name__", n.target)) for n in nodes if not is_size(n)]
        return " + ".join(dict.fromkeys(kinds or calls))


def _first_node(output: Any) -> fx.Node:
    """The tensor among several outputs that is the model's answer."""
    if isinstance(output, dict):
        output = [output[name] for name in ANSWERS if name in output] or list(output.values())
    several = output if isinstance(output, (tuple, list)) else ()
    first = next((value for value in several if value is not None), None)
    if not isinstance(first, fx.Node):
        raise Untraceable("it does not return a tensor")
    return first


def _is_tensor(node: fx.Node, model: nn.Module) -> bool:
    """Whether a node is one tensor, as far as its graph shows it."""
    if is_size(node):
        return False
    if node.op == "call_module" and isinstance(model.get_submodule(str(node.target)), GIVE_TUPLES):
        return False
    items = [n for n in node.users if getattr(n.target, "__name__", "") == "getitem"]
    return not any(isinstance(n.args[1], int) for n in items)


def _is_size_of(node: Any, tensors: Sequence[fx.Node | None]) -> bool:
    """Whether a node is the number of samples of one of these tensors."""
    if not isinstance(node, fx.Node) or node.args[1:] != (0,):
        return False
    source = node.args[0]
    if node.target == "size":
        return source in tensors
    if getattr(node.target, "__name__", "") != "getitem" or not isinstance(source, fx.Node):
        return False
    of_shape = source.target is getattr and source.args[1] == "shape"
    of_size = source.target == "size" and len(source.args) == 1
    return (of_shape or of_size) and source.args[0] in tensors


def _constants(node: fx.Node) -> Any:
    """The arguments of a call that are no results of other calls."""
    return fx.map_arg((node.args, node.kwargs), lambda n: None)
