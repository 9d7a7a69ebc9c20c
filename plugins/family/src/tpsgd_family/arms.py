"""The rules as words of `tpsgd rules`, as they are by default; not part of `--rules all`."""

from functools import partial

from tpsgd.rules import Entry
from tpsgd_family.feedback import feedback_alignment, sign_symmetry
from tpsgd_family.forward_forward import forward_forward
from tpsgd_family.forward_gradients import (
    forward_gradient,
    local_forward_gradient,
    weight_perturbation,
)
from tpsgd_family.hsic import hsic_bottleneck
from tpsgd_family.pepita import pepita
from tpsgd_family.target_propagation import target_propagation

_entry = partial(Entry, dash="--", feed_forward=False, recurrent=False)

FEEDBACK_ALIGNMENT = _entry(feedback_alignment, "Lillicrap et al. 2016", "#A6761D", "^")
SIGN_SYMMETRY = _entry(sign_symmetry, "Liao et al. 2016", "#7570B3", "v")
PEPITA = _entry(pepita, "Dellaferrera & Kreiman 2022", "#E7298A", "s")
FORWARD_FORWARD = _entry(forward_forward, "Hinton 2022", "#66A61E", "D")
FORWARD_GRADIENT_WEIGHTS = _entry(forward_gradient, "Baydin et al. 2022", "#2A9D8F", "<")
FORWARD_GRADIENT_ACTIVATIONS = _entry(
    partial(forward_gradient, activations=True), "Ren et al. 2023", "#117733", ">"
)
FORWARD_GRADIENT_LOCAL = _entry(local_forward_gradient, "Ren et al. 2023", "#44AA99", "P")
WEIGHT_PERTURBATION = _entry(weight_perturbation, "Jabri & Flower 1992", "#999933", "X")
TARGET_PROPAGATION = _entry(target_propagation, "Lee et al. 2015", "#882255", "p")
HSIC_BOTTLENECK = _entry(hsic_bottleneck, "Ma et al. 2020", "#6699CC", "h")
