"""The state of a learner in a checkpoint, and of random numbers.

Orders of samples, class codes and augmentation are functions of the seed, the block and the epoch
(`maths/random.py`). What is left is the state of torch's generators, which dropout, a `DataLoader`
and a user's own functions take numbers from.
"""

import warnings
from collections.abc import Iterable
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.sources.batches import stored_samples
from tpsgd.engine.sources.loaders import LoaderSource
from tpsgd.saved.checkpoint import pack, unpack
from tpsgd.saved.expected import OF_DEVICE, check_count, check_counter, check_tensor, checked_state
from tpsgd.train import Net

Generators = Iterable[tuple[str, torch.Generator]]


def state_of(learner: Any) -> dict[str, Any]:
    """A learner between two epochs; one that has stopped has no optimizer and no codes."""
    updater = learner.updater
    rates, optimizer = updater.batch_rates, updater.optimizer
    # torch's decorator of `state_dict` loads its compiler (seconds) when it is first called
    state = None if optimizer is None else unwrap(type(optimizer).state_dict)(optimizer)
    return {
        "learning": learner.learning,
        "mean_square": learner.mean_square,
        "penalty": getattr(updater, "penalty", None),
        "tensors": [t if isinstance(t, Tensor) else None for t in learner.tensors],
        "optimizer": state,
        "batches": None if rates is None else rates.step,
    }


def ended_state(learner: Any) -> dict[str, Any] | None:
    """A learner that is about to stop, for a run that is extended later; on the CPU.

    None for an optimizer with a state that no checkpoint can hold.
    """
    tensors: dict[str, Tensor] = {}
    try:
        state = pack(state_of(learner) | {"learning": False}, tensors)
    except TpsgdError:
        return None
    return unpack(state, {name: t.detach().cpu() for name, t in tensors.items()})


@torch.no_grad()
def restore(learner: Any, saved: dict[str, Any], epochs: int) -> None:
    """A learner as it was, after it has been started anew; its weights are in place already."""
    device = next(iter(learner.params.values()), torch.empty(0)).device
    for owner, name in ((learner, "mean_square"), (learner.updater, "penalty")):
        if saved[name] is not None:
            setattr(owner, name, check_counter(name, saved[name]).to(device))
    if saved["learning"] is not True:
        if learner.learning:
            learner.stop()
        return
    if not check_count("epoch", epochs) < learner.epochs:
        raise ValueError(f"epoch {epochs} of {learner.epochs} cannot be followed by another")
    for tensor, value in zip(learner.tensors, saved["tensors"], strict=True):
        if isinstance(tensor, Tensor):
            tensor.copy_(check_tensor("class codes", value, tensor))
    updater = learner.updater
    if updater.optimizer is not None:
        if updater.scheduler is not None:
            with warnings.catch_warnings():  # torch says that the optimizer has not stepped
                warnings.simplefilter("ignore")
                for _ in range(epochs - 1):
                    updater.scheduler.step()
                restore_optimizer(updater.optimizer, saved["optimizer"])
                updater.scheduler.step()  # for the next epoch
                updater.scheduled = epochs
        else:
            restore_optimizer(updater.optimizer, saved["optimizer"])


def restore_optimizer(optimizer: Any, saved: dict[str, Any]) -> None:
    """Write a state dict that fits into an optimizer's groups, which others refer to."""
    states = checked_state(optimizer, saved)
    for group, before in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for name in before.keys() - set(OF_DEVICE):
            value = before[name]
            if isinstance(group.get(name), Tensor):
                group[name].copy_(torch.as_tensor(value))
            else:
                group[name] = value.item() if isinstance(value, Tensor) else value
    pairs = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    for number, values in states.items():
        p, group = pairs[number]
        optimizer.state[p] = {k: _placed(v, k, p, group) for k, v in values.items()}


def _placed(value: Any, name: str, p: Tensor, group: dict[str, Any]) -> Any:
    """A value of an optimizer's state where torch has it, with the parameter's strides."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == p.shape and name != "step":
        return torch.empty_like(p, dtype=value.dtype, requires_grad=False).copy_(value)
    counts_on_cpu = name == "step" and not (group.get("capturable") or group.get("fused"))
    return value.clone() if counts_on_cpu else value.to(p.device, copy=True)


def random_state(device: torch.device, generators: Generators = ()) -> dict[str, Tensor]:
    """The state of torch's own generators, and of others by their names."""
    states = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states | {name: generator.get_state() for name, generator in generators}


def set_random(
    device: torch.device, states: dict[str, Tensor], generators: Generators = ()
) -> None:
    """Put all generators where they were; a device that is not there any more has none."""
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    for name, generator in generators:
        generator.set_state(states[name])


def loader_generators(net: Net) -> Generators:
    """The generators of data loaders, of their samplers and of their batch samplers."""
    for name, source in (("data", net.source), ("validation", net.validation)):
        stored = None if source is None else stored_samples(source)
        if not isinstance(stored, LoaderSource):
            continue
        loader: Any = stored.loader
        batches = getattr(loader, "batch_sampler", None)
        owners = {"loader": loader, "sampler": loader.sampler, "batch sampler": batches}
        owners["sampler of the batch sampler"] = getattr(batches, "sampler", None)
        for owner, owned in owners.items():
            if isinstance(generator := getattr(owned, "generator", None), torch.Generator):
                yield f"{name} {owner}", generator
