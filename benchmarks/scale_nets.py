"""What the blocks of a net take, counted for the model of scale (`scale_model.py`)."""

import copy
from typing import Any

import torch
from scale_model import Block
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tpsgd
from tpsgd.engine.settings import Settings
from tpsgd.memory.rehearse import Inputs
from tpsgd.zoo.words import factory
from tpsgd_parallel.stages import BlockCost, balanced_stages, block_costs

SAMPLES = 32  # of the rehearsal; costs are divided by it
NETS: dict[str, tuple[str, tuple[int, ...]]] = {  # by name: a word for the model, a sample's shape
    "mlp": (f"mlp:{','.join(['1024'] * 15)}", (784,)),
    "vgg11": ("vgg:11", (3, 160, 160)),
}


def blocks_of(model: nn.Module, shape: tuple[int, ...], rule: Any = None) -> list[Block]:
    """The costs of a net's blocks, for local learning (from the plan) and for backprop.

    In backprop, a gradient of weights or inputs takes the multiplications of a forward pass; the
    first block needs no gradient of its inputs.
    """
    inputs = Inputs(shape, samples=2 * SAMPLES)
    settings = Settings(batch_size=SAMPLES)
    costs, _ = block_costs(model, inputs, rule or tpsgd.rules.readout(), settings)
    blocks, products = tpsgd.split(model), forward_products(model, shape)
    return [
        Block(
            forward=forward,
            backward=forward * (2 if i else 1),
            local=cost.multiplications / SAMPLES,
            weights=sum(p.numel() for m in block.modules for p in m.parameters()),
            outputs=cost.outputs // SAMPLES,
        )
        for i, (forward, cost, block) in enumerate(zip(products, costs, blocks, strict=True))
    ]


def forward_products(model: nn.Module, shape: tuple[int, ...]) -> list[float]:
    """The multiplications of every block's forward pass, for one sample."""
    x, products = torch.empty(SAMPLES, *shape, device="meta"), []
    with torch.no_grad():
        for block in tpsgd.split(model):
            with FlopCounterMode(display=False) as counter:
                for module in block.modules:
                    x = on_meta(module)(x)
            products.append(counter.get_total_flops() / 2 / SAMPLES)
    return products


def on_meta(module: nn.Module) -> nn.Module:
    """A copy of a module whose tensors take no memory."""
    return copy.deepcopy(module).to("meta")


def stages_of(blocks: list[Block], ranks: int) -> tuple[int, ...]:
    """The cut that a pipeline of this many ranks chooses by multiplications."""
    costs = [BlockCost(round(block.local), 0, 0, 0) for block in blocks]
    return tuple(balanced_stages(costs, ranks))


def net(name: str) -> list[Block]:
    """The blocks of a net by its name."""
    word, shape = NETS[name]
    return blocks_of(factory(word, shape, 10, "relu")(), shape)
