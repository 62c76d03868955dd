"""A transformer block of FusedAttention learns to reverse a sequence, which takes the right look-up."""

import torch
from torch import nn
from torch.nn import functional as F

from flashsoft import FusedAttention

SYMBOLS, LENGTH, WIDTH = 16, 8, 64


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = FusedAttention(width, heads, num_kv_heads=heads // 2, qk_norm=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Reverser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(WIDTH, 4), Block(WIDTH, 4))
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.symbol(tokens) + self.place.weight))


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Reverser().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    print(model.blocks[0].attention)
    for step in range(61):
        tokens = torch.randint(SYMBOLS, (64, LENGTH), device=device)
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            right = (logits.argmax(-1) == tokens.flip(1)).float().mean()
            print(f"step {step:>3}   loss {loss.item():.3f}   symbols right {right.item():4.0%}")
    given = torch.randint(SYMBOLS, (1, LENGTH), device=device)
    print("given   ", given[0].tolist(), "\nreversed", model(given).argmax(-1)[0].tolist())


if __name__ == "__main__":
    main()
