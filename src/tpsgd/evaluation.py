"""How often a model is right."""

from typing import Any

import torch
from torch import Tensor, nn

from .errors import TpsgdError
from .learner import hits
from .sources import Form, source


@torch.no_grad()
def evaluate(model: nn.Module, data: Any, *, batch_size: int = 1024) -> float:
    """The share of samples that a model classifies correctly, between 0 and 1.

    Labels are class indices, or float rows: soft labels when every row sums to 1 (the largest entry
    counts), otherwise several classes at once, all of which must be right (subset accuracy). A
    single output, or rows of yes-or-no labels, is cut at 0 for logits and at 0.5 after a Sigmoid.

    >>> model = nn.Linear(2, 2)
    >>> _ = model.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
    >>> evaluate(model, (torch.eye(2), torch.tensor([0, 1])))
    1.0
    """
    first = next(model.parameters(), torch.empty(0))
    modules = list(model.modules())
    form = Form(
        first.device,
        first.dtype,
        batch_size,
        (0,),
        channels_last=any(isinstance(m, nn.Conv2d) for m in modules),
        whole_numbers=any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in modules),
    )
    cut = 0.5 if isinstance(modules[-1], nn.Sigmoid) else 0.0
    modes = [(m, m.training) for m in modules]
    model.eval()
    right, seen = torch.zeros((), dtype=torch.long, device=first.device), 0
    try:
        for x, y in source(data, form, None, None).batches():
            right += _right(model(x), y, cut)
            seen += len(y)
    finally:
        for module, mode in modes:
            module.training = mode
    if not seen:
        raise TpsgdError("the data is empty: there is nothing to evaluate on")
    return int(right) / seen


def _right(out: Tensor, y: Tensor, cut: float) -> Tensor:
    if out.dim() == 2 and out.shape[1] == 1:
        return hits(out - cut, y.reshape(-1, 1).to(out.dtype), several=True)
    if not y.is_floating_point():
        return hits(out, y, several=False)
    soft = bool(((y.sum(1) - 1).abs() < 1e-3).all())
    return hits(out if soft else out - cut, y, several=not soft)
