"""From logits to probabilities at once: temperature, bias, mask, top-k, softmax."""

import torch

import flashsoft
from flashsoft import Causal


def show(name: str, p: torch.Tensor) -> None:
    print(f"{name:<34}" + "  ".join(f"{value:.3f}" for value in p.tolist()))


def main() -> None:
    logits = torch.tensor([2.0, 1.0, 3.0, 3.0, 0.0, 3.0])
    show("logits", logits)
    show("softmax", flashsoft.softmax(logits))
    show("temperature 0.5 is sharper", flashsoft.fused_softmax(logits, temperature=0.5))
    show("temperature 5 is flatter", flashsoft.fused_softmax(logits, temperature=5.0))

    # exactly k survive, the lowest index first among equals
    show("top_k=2 of three equals", flashsoft.fused_softmax(logits, top_k=2))

    # True = takes part (masked_fill means the opposite)
    keep = torch.tensor([True, True, False, True, True, True])
    show("index 2 masked, top_k=2", flashsoft.fused_softmax(logits, mask=keep, top_k=2))
    show("a bias on index 4", flashsoft.fused_softmax(logits, bias=torch.tensor([0, 0, 0, 0, 4.0, 0])))

    # a row of which nothing is kept is 0, never NaN, and so is its gradient
    show("nothing kept", flashsoft.fused_softmax(logits, mask=torch.zeros(6, dtype=torch.bool)))

    # rows of a batch may each have their own temperature and k
    p = flashsoft.fused_softmax(
        logits.expand(3, 6), temperature=torch.tensor([0.3, 1.0, 3.0]), top_k=torch.tensor([1, 3, 6])
    )
    for row, (t, k) in zip(p, ((0.3, 1), (1.0, 3), (3.0, 6)), strict=True):
        show(f"its own row: T={t}, k={k}", row)

    # on a table of scores (..., Sq, Sk) a mask may be a value, which is never built
    print("Causal() on 4 x 4 scores of zero:")
    for row in flashsoft.fused_softmax(torch.zeros(4, 4), mask=Causal()):
        show("", row)

    # learn a temperature: the gradient reaches it through the same kernel
    temperature = torch.full((1,), 1.0, requires_grad=True)
    p = flashsoft.fused_softmax(logits.unsqueeze(0), temperature=temperature)
    p.square().sum().backward()
    print(f"d(sum p^2)/dT = {temperature.grad.item():.4f}: a higher temperature spreads the mass")


if __name__ == "__main__":
    main()
