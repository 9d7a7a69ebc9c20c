"""Kinds of layers of which no part is exported, refused by their names before a net is cut."""

from torch import nn

from tpsgd.common.errors import TpsgdError

GATED = (nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell)


def check_kinds(model: nn.Module) -> None:
    """Refuse a model with attention, or with recurrent layers that have gates."""
    if not isinstance(model, nn.Module):
        return  # whoever cuts it says so
    for path, module in model.named_modules():
        place = f" ({path})" if path else ""
        if isinstance(module, nn.MultiheadAttention):
            raise TpsgdError(
                f"attention{place} is not exported; linear, convolutional and recurrent layers are"
            )
        if isinstance(module, GATED):
            raise TpsgdError(
                f"{type(module).__name__}{place} is not exported; nn.RNN and tpsgd.Recurrent are"
            )
