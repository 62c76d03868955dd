"""A training step of a language model whose logits, tokens x vocabulary, never exist.

The last layer's logits are often the largest tensor of a step: 8,192 tokens by 128,256 classes are 2.1 GB in bf16, and
a loss that keeps its softmax in float32 another 4.2. Here a chunk of tokens has logits at a time; they become their own
gradient in place, and two matrix products take it from there. The loss and all gradients are those of the plain step.
"""

import torch
from torch import nn
from torch.nn import functional as F

import flashsoft
from flashsoft import Causal

VOCABULARY, WIDTH, LENGTH = 512, 64, 64


class Model(nn.Module):
    """Embedding, one layer of attention, and a head that is only a weight: whoever computes the loss applies it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.attention = flashsoft.FusedAttention(WIDTH, 4, mask=Causal(), rotary_base=10000.0)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return x + self.attention(self.norm(x))


def fused(model: Model, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return flashsoft.fused_linear_cross_entropy(model(tokens), model.head.weight, target, z_loss=1e-4)


def plain(model: Model, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = model.head(model(tokens)).flatten(0, 1)
    kept = target.flatten() != -100
    z = torch.logsumexp(logits, -1)[kept].square().sum() / kept.sum()
    return F.cross_entropy(logits, target.flatten()) + 1e-4 * z


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Model()
    text = torch.cumsum(torch.randint(1, 4, (4, LENGTH + 1)), 1) % VOCABULARY  # each token is 1 to 3 above the last
    tokens, target = text[:, :-1], text[:, 1:].clone()
    target[:, :4] = -100  # a prompt, which is not learned: such rows' logits are not read

    losses, gradients = [], []
    for step in (fused, plain):
        model.zero_grad()
        loss = step(model, tokens, target)
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)
    print(f"fused {losses[0]:.4f}, plain {losses[1]:.4f}: the same loss, and the same {len(gradients[0])} gradients")

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, 31):
        loss = fused(model, tokens, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
