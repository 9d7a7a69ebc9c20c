"""Write a rule: align with the projected label by angle only, so that features cannot grow.

DRTP pulls a block's output along P y* without end; with an unbounded activation the features
explode. The cosine has a minimum. docs/adding.md explains every step.

    python examples/add_a_rule.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tpsgd
from tpsgd.objectives import Objective, Site, aim
from tpsgd.projections import normal
from tpsgd.rules import Rule


def cosine() -> Rule:
    """Minus the cosine between a block's output and its projected label."""

    def loss(y: Tensor, s: Tensor, P: Tensor) -> Tensor:
        return -F.cosine_similarity(y.flatten(1), aim(P, s).flatten(1)).mean()

    def objective(site: Site) -> Objective:
        return Objective(loss, tensors=(site.draw(normal()),))  # no closed form: autograd on y

    return Rule("cosine", objective, about="align with P y* by angle")


tpsgd.check_rule(cosine())
print("check_rule: cosine keeps the contract")

digits = tpsgd.data.load("digits")
print(f"{'rule':9} {'accuracy':>8}  {'deviation of the features':>26}")
for rule in (cosine(), tpsgd.rules.drtp(), tpsgd.rules.frozen()):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(), nn.Linear(128, 10))
    tpsgd.fit(net, digits.train, rule=rule, epochs=8, batch_size=32)
    with torch.no_grad():
        spread = net[:3](digits.test[0]).std()
    print(f"{rule.name:9} {tpsgd.evaluate(net, digits.test):8.1%}  {spread:26.2f}")
