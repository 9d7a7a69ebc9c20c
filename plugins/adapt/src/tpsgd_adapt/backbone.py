"""A frozen network with taps: named submodules whose outputs are read by forward hooks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError, suggestion
from tpsgd.engine.sources.batches import suits_channels_last

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and deviation of its images


class Backbone(nn.Module):
    """Any module, frozen, with names for the submodules to read from (the taps).

    The module stays in evaluation mode and without gradients. A forward pass ends at the last tap
    that is needed; if a submodule runs more than once, its first output counts. Outputs are
    float32, whatever type the backbone computes in.

    Args:
        model: any `nn.Module`, for example one of torchvision or timm.
        taps: names of submodules (`"layer3"`), or a mapping of short names to them.
        mean: of the images that it was trained on, per channel, on a scale from 0 to 1.
        std: their standard deviation.
        name: for the record.

    Examples:
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> backbone = Backbone(net, {"hidden": "1"})
        >>> backbone(torch.ones(5, 4))["hidden"].shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        taps: Mapping[str, str] | Sequence[str],
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TpsgdError(f"a backbone is an nn.Module, got a {type(model).__name__}")
        self.taps = _paths(model, taps)
        self.name = name or type(model).__name__
        self.mean, self.std = (tuple(map(float, values or ())) for values in (mean, std))
        if len(self.mean) != len(self.std) or any(value <= 0 for value in self.std):
            raise TpsgdError("mean and std go together, a number per channel, std above 0")
        centre, spread = (torch.tensor(v or (0.0,)).view(1, -1, 1, 1) for v in (mean, std))
        self.register_buffer("centre", centre, persistent=False)
        self.register_buffer("spread", spread, persistent=False)
        self.centre: Tensor
        self.spread: Tensor
        self.model = model.requires_grad_(False)
        self.eval()
        self.channels_last = suits_channels_last(model.modules())

    def like(self, model: nn.Module, name: str) -> "Backbone":
        """Another module with the same taps and image scale, such as a quantised copy."""
        return Backbone(model, self.taps, mean=self.mean, std=self.std, name=name)

    def train(self, mode: bool = True) -> "Backbone":
        """Stay in evaluation mode."""
        return super().train(False)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return tensors[0].device if tensors else torch.device("cpu")

    def prepare(self, x: Tensor) -> Tensor:
        """Samples as the network takes them: bytes become numbers up to 1, then mean and std."""
        if not isinstance(x, Tensor):
            raise TpsgdError("a backbone takes samples of one shape, not of different lengths")
        original = x
        x = x.to(self.device, non_blocking=True)
        x = x.float().div_(255) if x.dtype is torch.uint8 else x
        if self.mean:
            channels = (1, len(self.mean))  # of grey images, one, which is broadcast
            if not x.is_floating_point() or x.dim() != 4 or x.shape[1] not in channels:
                images = f"images (samples, {len(self.mean)}, height, width), bytes or 0 to 1"
                raise TpsgdError(f"{self.name} reads {images}; got {tuple(x.shape)} of {x.dtype}")
            x = (x - self.centre) / self.spread
        if x.is_floating_point():
            floats = (p for p in self.model.parameters() if p.is_floating_point())
            x = x.to(next(floats, x).dtype)
        if self.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return x.clone() if x is original else x  # a module may write into its input

    @torch.no_grad()
    def forward(self, x: Tensor, taps: Sequence[str] | None = None) -> dict[str, Tensor]:
        """The output of each tap for a batch."""
        paths = {tap: self.path(tap) for tap in (self.taps if taps is None else taps)}
        x = self.prepare(x)
        with _recording(self.model, paths) as outputs, suppress(_AllTapsRead):
            self.model(x)
        for tap, path in paths.items():
            if tap not in outputs:
                raise TpsgdError(f"{self.name} never runs {path!r}: tap another module")
        return {tap: outputs[tap].float() for tap in paths}

    def path(self, tap: str) -> str:
        """The name of a tap's submodule."""
        if tap not in self.taps:
            raise TpsgdError(f"{self.name} has no tap {tap!r}: {suggestion(tap, self.taps)}")
        return self.taps[tap]

    def shapes(self, x: Tensor, taps: Sequence[str] | None = None) -> dict[str, tuple[int, ...]]:
        """The shape of each tap's output for one of these samples."""
        try:
            return {tap: tuple(y.shape[1:]) for tap, y in self(x[:1], taps).items()}
        except TpsgdError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            problem = f"{self.name} cannot take samples of shape {tuple(x.shape[1:])}"
            raise TpsgdError(f"{problem}: {str(error).splitlines()[0]}") from error


class Tap(nn.Module):
    """One tap of a backbone as a module, to put before an adaptor's layers in a model."""

    is_tap = True  # `tpsgd.split` makes one block of it, whatever it contains

    def __init__(self, backbone: Backbone, tap: str) -> None:
        super().__init__()
        self.backbone, self.tap = backbone, tap

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x, (self.tap,))[self.tap]


class _AllTapsRead(BaseException):
    """Ends a forward pass. Not an Exception, which the network itself might catch."""


@contextmanager
def _recording(model: nn.Module, paths: Mapping[str, str]) -> Iterator[dict[str, Tensor]]:
    """Outputs by tap, filled by hooks, the last of which ends the forward pass."""
    outputs: dict[str, Tensor] = {}

    def hook_of(tap: str) -> Any:
        def hook(module: nn.Module, _: Any, y: Any) -> None:
            if tap in outputs:
                return
            if not isinstance(y, Tensor) or y.dim() < 2:
                kind = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
                name = f"tap {tap!r} ({type(module).__name__})"
                raise TpsgdError(f"{name} gives {kind}, not one tensor: tap a module inside it")
            outputs[tap] = y
            if len(outputs) == len(paths):
                raise _AllTapsRead
            outputs[tap] = y.clone()  # the next module may write into it

        return hook

    hooks = [model.get_submodule(p).register_forward_hook(hook_of(t)) for t, p in paths.items()]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _paths(model: nn.Module, taps: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """The submodule of each tap, by its short name."""
    taps = [taps] if isinstance(taps, str) else taps
    paths = dict(taps) if isinstance(taps, Mapping) else {tap: tap for tap in taps}
    if not paths:
        raise TpsgdError("a backbone needs a tap: the name of a submodule to read from")
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for path in paths.values():
        if path not in names:
            hint = suggestion(str(path), names) if names else "it has no submodules"
            raise TpsgdError(f"{type(model).__name__} has no submodule {path!r}: {hint}")
    return paths
