"""A score of untrained layers: how well they tell samples apart.

Mellor, Turner, Storkey & Crowley, "Neural Architecture Search without Training" (2021).
"""

import math

import torch
from torch import Tensor, nn

from tpsgd.nets.modes import evaluating

RECTIFIERS = (nn.ReLU, nn.LeakyReLU, nn.PReLU)


@torch.no_grad()
def activation_overlap(model: nn.Module, x: Tensor) -> float | None:
    """How well an untrained model tells samples apart: log |det K|, higher is better.

    K_ij is the number of rectifier units (ReLU, LeakyReLU, PReLU; active where their input is above
    0) that are active for both samples i and j, or inactive for both. -inf where K is singular: two
    samples with the same code, or fewer units than samples. None without a rectifier.

    Examples:
        >>> two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])  # K = [[2, 1], [1, 2]]
        >>> round(math.exp(activation_overlap(nn.Sequential(nn.ReLU()), two)))
        3
    """
    rectifiers = [m for m in model.modules() if isinstance(m, RECTIFIERS)]
    if not rectifiers:
        return None
    K = torch.zeros(len(x), len(x), dtype=torch.float64, device=x.device)

    def count(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        signs = (args[0].flatten(1) > 0).float().mul_(2).sub_(1)  # 1 is active, -1 is not
        K.add_((signs.shape[1] + signs @ signs.T).double(), alpha=0.5)

    hooks = [m.register_forward_pre_hook(count) for m in rectifiers]
    try:
        with evaluating(model):
            model(x.clone())  # a module may write into its input
    finally:
        for hook in hooks:
            hook.remove()
    if int(torch.linalg.matrix_rank(K, hermitian=True)) < len(K):
        return -math.inf
    return float(torch.linalg.slogdet(K).logabsdet)
