"""Recurrent classifiers and taggers as classes, and a character transformer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GRUClassifier(nn.Module):
    """A GRU whose last state is classified."""

    def __init__(self, inputs: int = 8, hidden: int = 32, classes: int = 10, layers: int = 1):
        super().__init__()
        self.gru = nn.GRU(inputs, hidden, layers, batch_first=True)
        self.fc1 = nn.Linear(hidden, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of sequences."""
        out, _ = self.gru(x)
        return self.fc2(F.relu(self.fc1(out[:, -1])))


class LSTMClassifier(nn.Module):
    """An LSTM in both directions on embedded tokens; its last states are classified."""

    def __init__(self, vocabulary: int = 50, width: int = 16, hidden: int = 32, classes: int = 10):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(2 * hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of texts."""
        embedded = self.dropout(self.embedding(tokens))
        _, (hidden, _) = self.lstm(embedded)
        hidden = torch.cat((hidden[-2], hidden[-1]), dim=1)
        return self.fc(self.dropout(hidden))


class Tagger(nn.Module):
    """A label for every token: an embedding, GRUs and a linear layer."""

    def __init__(self, vocabulary: int, tags: int, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.gru1 = nn.GRU(width, hidden, batch_first=True, bidirectional=True)
        self.gru2 = nn.GRU(2 * hidden, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, tags)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (texts, steps, tags)."""
        x, _ = self.gru1(self.embedding(tokens))
        x, _ = self.gru2(x)
        return self.head(x)


class CausalLayer(nn.Module):
    """A layer of a transformer that reads what came before, norm first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens."""
        batch, steps, width = x.size()
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, steps, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, steps, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharacterModel(nn.Module):
    """The next character at every step, in the manner of nanoGPT."""

    def __init__(
        self, vocabulary: int, steps: int, width: int = 64, layers: int = 4, heads: int = 4
    ):
        super().__init__()
        self.steps = steps
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(steps, width)
        self.h = nn.ModuleList([CausalLayer(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (texts, steps, vocabulary)."""
        _, steps = tokens.size()
        assert steps <= self.steps, f"cannot read {steps} steps: at most {self.steps}"
        place = torch.arange(0, steps, dtype=torch.long, device=tokens.device)
        x = self.token(tokens) + self.position(place)
        for layer in self.h:
            x = layer(x)
        return self.head(self.norm(x))
