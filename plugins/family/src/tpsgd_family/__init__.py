"""Published relatives of tpSGD as rules; `docs/family.md` has their sources and conventions.

feedback_alignment   the error goes back through fixed random matrices
sign_symmetry        ... through matrices with the signs of the weights
pepita               a second pass, of the input plus the projected error
forward_forward      positive and negative samples, told apart by the size of the activity
forward_gradient     a directional derivative times its random direction
weight_perturbation  the same by a difference of two losses
target_propagation   targets go back through learned inverses
hsic_bottleneck      outputs depend on the labels and not on the input
"""

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

ALL = {  # the rules as they are by default, by name
    "feedback-alignment": feedback_alignment,
    "sign-symmetry": sign_symmetry,
    "pepita": pepita,
    "forward-forward": forward_forward,
    "forward-gradient-weights": forward_gradient,
    "forward-gradient-activations": lambda: forward_gradient(activations=True),
    "forward-gradient-local": local_forward_gradient,
    "weight-perturbation": weight_perturbation,
    "target-propagation": target_propagation,
    "hsic-bottleneck": hsic_bottleneck,
}

__all__ = [
    "ALL",
    "feedback_alignment",
    "forward_forward",
    "forward_gradient",
    "hsic_bottleneck",
    "local_forward_gradient",
    "pepita",
    "sign_symmetry",
    "target_propagation",
    "weight_perturbation",
]
