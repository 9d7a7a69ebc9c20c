"""An adaptor in a folder: `adaptor.safetensors` and `adaptor.json`, without its backbone.

The file says which backbone the layers belong to: a hash of its weights, and what its taps say
about a picture of hashed noise. A backbone with other weights is taken, with a warning, only where
its taps say nearly the same (it is the same one in int8 or bfloat16, say).
"""

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.adapt.adaptor import COMBINATIONS, Adaptor
from tpsgd.adapt.backbone import Backbone
from tpsgd.adapt.features import fingerprint
from tpsgd.adapt.heads import Build, from_recipe, recipe
from tpsgd.errors import TpsgdError
from tpsgd.maths.random import Key
from tpsgd.projections import uniform

FORMAT = 1
ALIKE = 0.1  # relative difference of features up to which a backbone is the same one
FILES = ("adaptor.safetensors", "adaptor.json")


def save(adaptor: Adaptor, folder: Path) -> Path:
    """Write both files, each whole or not at all."""
    from tpsgd.files import writable_folder, write_whole

    to_bytes = _library().torch.save
    writable_folder(folder)
    state = {f"{i}.{k}": v for i, head in enumerate(adaptor.layers) for k, v in _own(head).items()}
    state |= {"weights": adaptor.weights}
    state |= {f"probe.{i}": f for i, f in enumerate(_probe(adaptor.backbone, adaptor))}
    weights = to_bytes({k: v.detach().cpu().contiguous() for k, v in state.items()})
    config = _config(adaptor) | {"weights_sha256": hashlib.sha256(weights).hexdigest()}
    write_whole(folder / FILES[0], weights)
    write_whole(folder / FILES[1], json.dumps(config, indent=1).encode())
    return folder


def load(folder: str | Path, backbone: Backbone, layers: Build | None = None) -> Adaptor:
    """An adaptor out of its folder, onto the backbone that it belongs to.

    Args:
        folder: what `Adaptor.save` wrote.
        backbone: must have the same taps and say the same at them.
        layers: what made the layers, where that was a function of your own.
    """
    config, state = _read(Path(folder))
    try:
        taps, shape = config["taps"], tuple(config["shape"])
        shapes = {tap: tuple(found["shape"]) for tap, found in taps.items()}
        made = from_recipe(config["layers"]) if config["layers"] is not None else layers
        combine, classes = COMBINATIONS[config["combine"]], list(config["classes"])
        prepared = {k: tuple(v) for k, v in config["preprocessing"].items()}
        if not all(isinstance(n, int) and n > 0 for s in (shape, *shapes.values()) for n in s):
            raise TypeError("a shape that is none")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = "there is no" if isinstance(error, KeyError) else "it does not say what it should:"
        raise TpsgdError(f"{folder}/adaptor.json is not whole: {reason} {error}") from error
    if made is None:
        raise TpsgdError(f"{folder} has layers of your own making: pass layers=, what made them")
    _check_taps(folder, backbone, taps, prepared)
    heads = {tap: made(shapes[tap], len(classes)) for tap in taps}
    adaptor = Adaptor(
        backbone, heads, classes, build=made, shape=shape, tap_shapes=shapes, combine=combine,
        seed=config.get("seed", 0),
    )  # fmt: skip
    _fill(folder, adaptor, state)
    _check_backbone(folder, adaptor, config, state)
    return adaptor.to(backbone.device).eval()


def _config(adaptor: Adaptor) -> dict[str, Any]:
    backbone = adaptor.backbone
    taps = {
        tap: {"module": backbone.taps[tap], "shape": adaptor.tap_shapes[tap]}
        for tap in adaptor.taps
    }
    return {
        "format": FORMAT,
        "backbone": backbone.name,
        "backbone_sha256": fingerprint(backbone.model),
        "taps": taps,
        "shape": adaptor.shape,
        "classes": adaptor.classes,
        "layers": recipe(adaptor.build),
        "combine": adaptor.combine.name,
        "preprocessing": {"mean": backbone.mean, "std": backbone.std},
        "seed": adaptor.seed,
        "training": {tap: run.settings for tap, run in adaptor.runs.items()},
    }


def _probe(backbone: Backbone, adaptor: Adaptor) -> list[Tensor]:
    """What each tap says about a sample of hashed noise, which is the same everywhere."""
    x = uniform(3**-0.5)(adaptor.shape, 1, Key(0, 0), "cpu").abs()  # from 0 to 1
    heard = {tap: y[0] for tap, y in backbone(x.to(backbone.device), adaptor.taps).items()}
    return [_averaged(heard[tap]) for tap in adaptor.taps]


def _averaged(y: Tensor) -> Tensor:
    """The mean over space, or over tokens, of what a tap says about one sample."""
    return y.flatten(1).mean(1) if y.dim() > 2 else y.mean(0) if y.dim() == 2 else y


def _check_taps(
    folder: Any, backbone: Backbone, taps: dict[str, Any], prepared: dict[str, Any]
) -> None:
    for tap, found in taps.items():
        if tap not in backbone.taps:
            raise TpsgdError(
                f"the adaptor in {folder} reads tap {tap!r} ({found['module']}), which "
                f"{backbone.name} has not: {', '.join(backbone.taps)}"
            )
        if backbone.taps[tap] != found.get("module"):
            raise TpsgdError(
                f"the adaptor in {folder} reads tap {tap!r} at {found.get('module')!r}, this "
                f"backbone has it at {backbone.taps[tap]!r}"
            )
    if prepared != {"mean": backbone.mean, "std": backbone.std}:
        raise TpsgdError(
            f"the adaptor in {folder} was trained on pictures scaled by {prepared}, the backbone "
            f"scales them by mean {backbone.mean} and std {backbone.std}"
        )


def _check_backbone(
    folder: Any, adaptor: Adaptor, config: dict[str, Any], state: dict[str, Tensor]
) -> None:
    """Refuse a backbone whose taps say something else than the adaptor has learned from."""
    backbone = adaptor.backbone
    x = torch.zeros(1, *adaptor.shape)
    if (found := backbone.shapes(x, adaptor.taps)) != adaptor.tap_shapes:
        raise TpsgdError(
            f"the adaptor in {folder} was trained on taps of shape {adaptor.tap_shapes}, this "
            f"backbone's have {found}: it is another one"
        )
    now = _probe(backbone, adaptor)
    known = [state.get(f"probe.{i}", f.new_zeros(1)).to(f.device) for i, f in enumerate(now)]
    if any(a.shape != b.shape for a, b in zip(now, known, strict=True)):
        raise TpsgdError(f"the adaptor in {folder} is not whole: save it again")
    gaps = [
        float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(now, known, strict=True)
    ]
    if not max(gaps) <= ALIKE:
        raise TpsgdError(
            f"the adaptor in {folder} belongs to another backbone: the features of this one differ "
            f"by {max(gaps):.0%} from those it was trained on"
        )
    if config.get("backbone_sha256") == fingerprint(backbone.model):
        return
    warnings.warn(
        f"the backbone's weights are not those that the adaptor in {folder} was trained on, but "
        f"its features are within {max(gaps):.1%} of them",
        stacklevel=3,
    )


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    library = _library()
    for name in FILES:
        if not (folder / name).is_file():
            raise TpsgdError(f"{folder} holds no adaptor: there is no {name}")
    try:
        config = json.loads((folder / FILES[1]).read_text())
        state = library.torch.load((folder / FILES[0]).read_bytes())
    except (ValueError, UnicodeDecodeError, library.SafetensorError) as error:
        raise TpsgdError(f"the adaptor in {folder} is not whole: {error}") from error
    if isinstance(config, dict) and config.get("weights_sha256") != _sha(folder / FILES[0]):
        raise TpsgdError(f"{folder}: adaptor.json and adaptor.safetensors do not belong together")
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise TpsgdError(f"{folder}/adaptor.json is no adaptor of format {FORMAT}")
    return config, state


def _sha(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _fill(folder: Any, adaptor: Adaptor, state: dict[str, Tensor]) -> None:
    """Copy the weights into the layers, if all of them are there and fit."""
    own = {f"{i}.{k}": v for i, head in enumerate(adaptor.layers) for k, v in _own(head).items()}
    own |= {"weights": adaptor.weights}
    for name, value in own.items():
        found = state.get(name)
        if found is None or found.shape != value.shape:
            what = "missing" if found is None else f"of shape {tuple(found.shape)}"
            raise TpsgdError(
                f"the adaptor in {folder} does not fit its layers: {name} should have shape "
                f"{tuple(value.shape)}, it is {what}"
            )
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(state[name])


def _own(head: nn.Module) -> dict[str, Tensor]:
    return dict(head.state_dict(keep_vars=True))


def _library() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise TpsgdError("to save and load adaptors, run: pip install safetensors") from error
    return safetensors
