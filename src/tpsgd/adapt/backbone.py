"""A frozen network with taps: named places in it whose output is read, by hooks, as it runs."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.engine.batch_form import Form
from tpsgd.errors import TpsgdError

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and deviation of its pictures


class Backbone(nn.Module):
    """Any module, frozen, with names for the places to read from.

    The module is frozen as it is: evaluation mode, no gradients, convolutions with their channels
    last in memory where that can do no harm. Its forward runs until the last
    tap that is asked for has spoken, and no further. A module that is called more than once speaks
    the first time. What it says comes as float32, whatever the backbone computes in.

    Args:
        model: a torchvision or timm model, one of ours, one of your own.
        taps: names of submodules (`"layer3"`), or a mapping of short names to them.
        mean: of the pictures that it was trained on, by channel, on a scale from 0 to 1.
        std: their deviation.
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
        self.mean, self.std = _scale(mean, "mean"), _scale(std, "std")
        if len(self.mean) != len(self.std):
            raise TpsgdError("mean and std go together: one number of each for every channel")
        centre, spread = (torch.tensor(v or (0.0,)).view(1, -1, 1, 1) for v in (mean, std))
        self.register_buffer("centre", centre, persistent=False)
        self.register_buffer("spread", spread, persistent=False)
        self.centre: Tensor
        self.spread: Tensor
        self.model = model.requires_grad_(False)
        self.eval()
        self.channels_last = Form.may_be_channels_last(model.modules())
        if self.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def like(self, model: nn.Module, name: str) -> "Backbone":
        """The same taps and scale on another module: a lighter copy, say."""
        scale = {"mean": self.mean, "std": self.std} if self.mean else {}
        return Backbone(model, self.taps, name=name, **scale)

    def train(self, mode: bool = True) -> "Backbone":
        """Stay in evaluation mode, whoever asks."""
        return super().train(False)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return tensors[0].device if tensors else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype | None:
        """What it computes in, if its weights say."""
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), None)

    def prepare(self, x: Tensor) -> Tensor:
        """Samples as the network wants them: bytes become numbers up to 1, then the usual scale."""
        given = x
        x = x.to(self.device, non_blocking=True)
        x = x.float().div_(255) if x.dtype is torch.uint8 else x
        if self.mean and not x.is_floating_point():
            raise TpsgdError(
                f"pictures must be bytes (uint8), or numbers from 0 to 1; these are {x.dtype}"
            )
        if self.mean:
            if x.dim() != 4 or x.shape[1] != len(self.mean):
                raise TpsgdError(
                    f"{self.name} reads pictures (samples, {len(self.mean)}, height, width), got "
                    f"{tuple(x.shape)}"
                )
            x = (x - self.centre) / self.spread
        if x.is_floating_point() and self.dtype is not None:
            x = x.to(self.dtype)
        if self.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return x.clone() if x is given else x  # a module may write into it

    @torch.no_grad()
    def forward(self, x: Tensor, taps: Sequence[str] | None = None) -> dict[str, Tensor]:
        """What the taps say about a batch."""
        wanted = {tap: self.path(tap) for tap in (self.taps if taps is None else taps)}
        x = self.prepare(x)
        with _listening(self.model, wanted) as heard, suppress(_Enough):
            self.model(x)
        if silent := [tap for tap in wanted if tap not in heard]:
            raise TpsgdError(f"{self.name} never runs {wanted[silent[0]]!r}: tap another module")
        return {tap: heard[tap] for tap in wanted}

    def path(self, tap: str) -> str:
        """The submodule behind a tap."""
        if tap not in self.taps:
            raise TpsgdError(f"{self.name} has no tap {tap!r}: choose from {', '.join(self.taps)}")
        return self.taps[tap]

    def shapes(self, x: Tensor, taps: Sequence[str] | None = None) -> dict[str, tuple[int, ...]]:
        """The shape of what each tap says about one of these samples."""
        try:
            heard = self(x[:1], taps)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if isinstance(error, TpsgdError):
                raise
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise TpsgdError(
                f"{self.name} cannot take samples of shape {tuple(x.shape[1:])}: {reason}"
            ) from error
        return {tap: tuple(y.shape[1:]) for tap, y in heard.items()}


class Tap(nn.Module):
    """One tap of a backbone as a module, so that it can stand before an adaptor in a model."""

    is_tap = True  # `tpsgd.split` makes a block of it whatever it holds

    def __init__(self, backbone: Backbone, tap: str, scale: float = 1.0) -> None:
        super().__init__()
        self.backbone, self.tap, self.scale = backbone, tap, scale

    def train(self, mode: bool = True) -> "Tap":
        """Stay in evaluation mode."""
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        """What the tap says."""
        x = x / self.scale if self.scale != 1.0 else x
        return self.backbone(x, (self.tap,))[self.tap]


class _Enough(BaseException):
    """All taps have spoken. Not an Exception, which the network might catch itself."""


@contextmanager
def _listening(model: nn.Module, wanted: Mapping[str, str]) -> Iterator[dict[str, Tensor]]:
    """Hooks on the wanted submodules, which end the forward when all of them have run."""
    heard: dict[str, Tensor] = {}

    def listen(tap: str) -> Any:
        def hook(module: nn.Module, _: Any, y: Any) -> None:
            if tap in heard:
                return
            if not isinstance(y, Tensor) or y.dim() < 2:
                found = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
                raise TpsgdError(
                    f"tap {tap!r} ({type(module).__name__}) must give one tensor (samples, ...), "
                    f"gives {found}: tap a module inside it"
                )
            heard[tap] = y
            if len(heard) == len(wanted):
                raise _Enough
            heard[tap] = y.clone()  # the next module may write into it

        return hook

    hooks = [model.get_submodule(p).register_forward_hook(listen(t)) for t, p in wanted.items()]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()
        for tap, y in heard.items():
            heard[tap] = y.float()


def _paths(model: nn.Module, taps: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    named = {taps: taps} if isinstance(taps, str) else taps
    found = dict(named) if isinstance(named, Mapping) else {tap: tap for tap in named}
    if not found:
        raise TpsgdError("a backbone needs a tap: the name of a submodule to read from")
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for path in found.values():
        if path not in known:
            close = difflib.get_close_matches(str(path), known, n=1, cutoff=0.0)
            hint = f"did you mean {close[0]!r}?" if close else "it has no submodules"
            raise TpsgdError(f"{type(model).__name__} has no submodule {path!r}: {hint}")
    return found


def _scale(values: Sequence[float] | None, name: str) -> tuple[float, ...]:
    found = tuple(map(float, values)) if values is not None else ()
    if name == "std" and any(v <= 0 for v in found):
        raise TpsgdError(f"std must be above 0 in every channel, got {found}")
    return found
