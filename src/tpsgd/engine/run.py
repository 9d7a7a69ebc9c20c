"""A training run from its request to its records; extensions go around it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tpsgd.engine.assemble import Faster, assemble, check_optimizers, count, unstack
from tpsgd.engine.device import (
    forget_resident_peak,
    limit_threads,
    resident,
    resolve_device,
    threads_restored,
)
from tpsgd.engine.extension import Extension
from tpsgd.engine.learners.backprop import Backprop
from tpsgd.engine.record import BlockInfo, Recorder, Run
from tpsgd.engine.settings import Settings
from tpsgd.engine.sources.loaders import workers_watched
from tpsgd.engine.spec import Method, RunRequest, RunSpec, request
from tpsgd.nets.blocks import overwriting
from tpsgd.nets.modes import modes_restored
from tpsgd.nets.precision import without_autocast
from tpsgd.rules import Rule
from tpsgd.train import Net


def run_training(
    models: list[nn.Module],
    data: Any,
    method: Method,
    settings: Settings,
    extensions: Sequence[Extension] = (),
    faster: Faster | None = None,
) -> list[Run]:
    """Train models by a rule or by backprop; several models are restarts, stacked into one."""
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(workers_watched())
        for extension in extensions:
            settings = stack.enter_context(extension.enter(settings))
        asked = request(models, data, method, settings)
        for extension in extensions:
            asked = extension.prepare(asked)
        device = stack.enter_context(training_context(models, asked.settings, _writers(asked)))
        net = assemble(asked, device, faster)
        check_optimizers(net.learners)
        callbacks = _callbacks(net, models, data)
        runs = new_records(net.spec, len(models))
        net.recorder = Recorder(runs, callbacks)
        net.observers = [net.recorder]
        with ExitStack() as around:
            for extension in extensions:
                around.enter_context(extension.around(net))
            forget_resident_peak()
            with net.measured:
                net.recorder.began = began = time.perf_counter()
                net.order(net)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            for run in runs:  # with the seconds before a checkpoint
                run.seconds = time.perf_counter() - net.recorder.began
            if len(models) > 1:
                unstack(net.spec.cuts, net.learners)
        for r, run in enumerate(runs):
            run.setup_seconds, run.model = began - started, models[r]
            if getattr(method, "predictor", None):
                run.predicting = method.predicting  # type: ignore[union-attr]
            _describe(run, r, net)
        for extension in extensions:
            runs = extension.finish(net, runs)
    return runs


def _writers(asked: RunRequest) -> list[Any]:
    """Modules that would overwrite an output that an earlier block has yet to learn from."""
    if not asked.local:
        return []
    pairs = zip(asked.models, asked.layers, strict=True)
    return [m for model, layers in pairs for m in overwriting(model, layers)]


def _callbacks(net: Net, models: list[nn.Module], data: Any) -> list[Any]:
    """The caller's functions, with the number of threads and the modes of before the run."""
    spec: RunSpec = net.spec
    batch_size = spec.form.micro_batch or getattr(data, "batch_size", None)
    products = spec.largest_product * (batch_size or spec.settings.batch_size)
    threads = limit_threads(spec.form.device, products)
    modes = modes_restored(*models)  # a callback may evaluate the model
    for begin in filter(callable, (getattr(f, "begin", None) for f in spec.settings.callbacks)):
        begin(net)
    return [modes(threads_restored(threads)(f)) for f in spec.settings.callbacks]


def block_infos(learners: list[Any], spec: RunSpec, restart: int = 0) -> list[BlockInfo]:
    """How each block was trained, for the record."""
    if not spec.rules:
        return [
            BlockInfo(str(b), "backprop", count(b.named_parameters()), "autograd")
            for b in spec.layers
        ]
    names = [*(rule.name for rule in spec.rules[:-1]), "head"]
    return [
        BlockInfo(str(x.block), name, count(x.block.named_parameters()), x.label, x.scale(restart))
        for x, name in zip(learners, names, strict=True)
    ]


def new_records(spec: RunSpec, restarts: int) -> list[Run]:
    """An empty record for each restart."""
    method, settings = spec.method, spec.settings
    if isinstance(method, (Rule, Backprop)):
        name = method.name
    else:
        name = " + ".join(rule.name for rule in spec.rules)
    return [
        Run(name, s.seed, s.describe(name, spec.loss, spec.rules[:-1]))
        for s in (replace(settings, seed=settings.seed + r) for r in range(restarts))
    ]


def _describe(run: Run, restart: int, net: Net) -> None:
    """Write blocks and penalties into the record of a restart."""
    run.resident_bytes = resident()[1]
    run.blocks = block_infos(net.learners, net.spec, restart)
    if solved := [x for x in net.learners if x.updater.penalties]:
        run.settings["alphas"] = {x.block.index + 1: x.updater.penalties[restart] for x in solved}


@contextmanager
def training_context(
    models: list[nn.Module], settings: Settings, writers: Sequence[Any] = (), seeded: bool = True
) -> Iterator[torch.device]:
    """Models on their device, random numbers seeded (`seeded`).

    Modes, the random generator and the number of threads are restored at the end. `writers` are
    modules that must not write into their inputs meanwhile.
    """
    device = settings.device
    if device is None:
        device = next(models[0].parameters(), torch.empty(0)).device
    device = resolve_device(device)
    for model in models:
        model.to(device)
    random = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with random, modes_restored(*models), threads_restored(), without_autocast():
        if seeded:
            torch.manual_seed(settings.seed)
        try:
            for module in writers:
                module.inplace = False
            yield device
        finally:
            for module in writers:
                module.inplace = True
