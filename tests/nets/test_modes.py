"""Evaluation mode for a while, and which models have a batch normalisation."""

import pytest
from torch import nn

from tpsgd.nets.blocks import has_batch_norm
from tpsgd.nets.modes import evaluating


def test_each_submodule_gets_its_mode_back_also_after_an_error():
    net = nn.Sequential(nn.Sequential(nn.Dropout(), nn.Linear(2, 2)), nn.BatchNorm1d(2).eval())
    modes = [m.training for m in net.modules()]
    with pytest.raises(KeyboardInterrupt), evaluating(net):
        assert not any(m.training for m in net.modules())
        raise KeyboardInterrupt
    assert [m.training for m in net.modules()] == modes == [True, True, True, True, False]


def test_any_batch_norm_counts_and_no_other_norm():
    inside = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.SyncBatchNorm(2)))
    assert has_batch_norm(inside.modules()) and not has_batch_norm([inside])
    assert not has_batch_norm([nn.LayerNorm(2), nn.InstanceNorm1d(2)])
