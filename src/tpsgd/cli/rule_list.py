"""The words of `--rule` as `tpsgd rules` lists them, without a second of importing torch.

A test holds the list equal to `tpsgd.comparison.arms.ALL`, and the default to `rules.default`.
"""

from tpsgd.common import plugins

DEFAULT = "readout-learned"
RULES = (  # the word, what it does, its source
    ("backprop", "gradients go through the whole net", ""),
    ("backprop-checkpointed", "backprop with activation checkpointing", "Chen et al. 2016"),
    ("backprop-micro", "backprop with gradient accumulation over micro-batches", ""),
    ("tpsgd-l2", "squared error to P y*", "Lomnitz et al. 2022"),
    ("tpsgd-l1", "absolute error to P y*", "Lomnitz et al. 2022"),
    ("drtp", "align with P y*", "Frenkel et al. 2021"),
    ("dfa", "align with the projected output error; waits for the output", "Nøkland 2016"),
    (
        "sdfa",
        "align with the projected sign of the output error; waits for the output",
        "Frenkel et al. 2021",
    ),
    ("readout", "local classifier through fixed random codes", "Mostafa et al. 2018"),
    ("readout-learned", "local classifier through learned codes", "Mostafa et al. 2018"),
    (
        "predsim",
        "samples of a class alike, and a learned local classifier",
        "Nøkland & Eidnes 2019",
    ),
    (
        "lls",
        "local classifier of the output's direction through fixed periodic codes",
        "Apolinario et al. 2025",
    ),
    (
        "auxiliary",
        "local classifier with a hidden layer, learned",
        "Belilovsky et al. 2020",
    ),
    ("frozen", "control: hidden blocks stay random", ""),
    ("random", "control: nothing is trained, not even the head", ""),
    ("lm-karnet", "least squares to P y* before the activation", "Zhuang et al. 2019"),
    ("elm", "control: random hidden layers, head by ridge", "Huang et al. 2006"),
)
OF_PLUGINS = {  # of tpsgd-peers and tpsgd-family
    "dladmm": ("alternating updates of all layers, full batch", "Wang et al. 2019"),
    "zorb": (
        "least squares to labels propagated back through the net",
        "Ranganathan & Lewandowski 2020",
    ),
    "feedback-alignment": (
        "backprop with fixed random backward matrices; waits for the output",
        "Lillicrap et al. 2016",
    ),
    "sign-symmetry": (
        "backprop with backward matrices that have the weights' signs; waits for the output",
        "Liao et al. 2016",
    ),
    "pepita": (
        "difference of two forward passes, the second of input plus projected error",
        "Dellaferrera & Kreiman 2022",
    ),
    "forward-forward": (
        "positive and negative samples by the size of the activity",
        "Hinton 2022",
    ),
    "forward-gradient-weights": (
        "directional derivative along random weights, times them; waits for the output",
        "Baydin et al. 2022",
    ),
    "forward-gradient-activations": (
        "directional derivative along random activities, times them; waits for the output",
        "Ren et al. 2023",
    ),
    "forward-gradient-local": (
        "local classifier, derivative in one random direction",
        "Ren et al. 2023",
    ),
    "weight-perturbation": (
        "difference of two losses along random weights, times them",
        "Jabri & Flower 1992",
    ),
    "target-propagation": (
        "targets through learned inverses; waits for the output",
        "Lee et al. 2015",
    ),
    "hsic-bottleneck": ("dependence on labels and input", "Ma et al. 2020"),
}
RESERVOIR = ("reservoir", "control: random leaky cells, head by least squares", "Jaeger 2001")


def rule_list() -> list[tuple[str, str, str]]:
    """The word, the description and the source of every rule, those of installed plug-ins too."""
    own = {word for word, *_ in (*RULES, RESERVOIR)}
    words = sorted(plugins.names(plugins.ARMS, own))
    of_plugins = [(word, *OF_PLUGINS.get(word, ("of a plug-in", ""))) for word in words]
    return [*RULES, *of_plugins, RESERVOIR]
