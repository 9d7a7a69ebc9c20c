"""What layers are worth before they have learned: a score, and how well it ranks them.

The score is that of Mellor, Turner, Storkey & Crowley, "Neural Architecture Search without
Training" (2021): layers that tell samples apart before they have learned anything.
"""

import math
from collections.abc import Sequence
from statistics import correlation

import torch
from torch import Tensor, nn

RECTIFIERS = (nn.ReLU, nn.LeakyReLU, nn.PReLU)


@torch.no_grad()
def activation_overlap(model: nn.Module, x: Tensor) -> float | None:
    """How well an untrained model tells samples apart: log |det K|, higher is better.

    K_ij is the number of rectifier units (ReLU, LeakyReLU, PReLU; on where their input is above 0)
    that are on for both samples i and j, or off for both. -inf where K is singular: two samples
    with one code, or fewer units than samples. None without such a module.

    Examples:
        >>> two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])  # K = [[2, 1], [1, 2]]
        >>> round(math.exp(activation_overlap(nn.Sequential(nn.ReLU()), two)))
        3
    """
    K = torch.zeros(len(x), len(x), dtype=torch.float64, device=x.device)
    met = []

    def count(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        signs = (given[0].flatten(1) > 0).float().mul_(2).sub_(1)  # 1 is on, -1 is off
        K.add_((signs.shape[1] + signs @ signs.T).double(), alpha=0.5)
        met.append(module)

    found = [m for m in model.modules() if isinstance(m, RECTIFIERS)]
    hooks = [m.register_forward_pre_hook(count) for m in found]
    modes = [(m, m.training) for m in model.modules()]
    try:
        model.eval()(x.clone())  # a module may write into it
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes:
            module.training = mode
    if not met:
        return None
    if int(torch.linalg.matrix_rank(K, hermitian=True)) < len(K):
        return -math.inf
    return float(torch.linalg.slogdet(K).logabsdet)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation, ties at their mean rank; None of fewer than three pairs, or all ties.

    Examples:
        >>> spearman([1, 2, 3], [10, 30, 20])
        0.5
    """
    u, v = ([sum(x < y for x in s) + sum(x == y for x in s) / 2 for y in s] for s in (a, b))
    if len(u) < 3 or len(set(u)) == 1 or len(set(v)) == 1:
        return None
    return correlation(u, v)
