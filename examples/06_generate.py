"""Generation with a KV cache: a token a step, and the same numbers as one pass over everything."""

import time

import torch

import flashsoft
from flashsoft import Causal, FusedAttention, KVCache, Window

WIDTH, HEADS, KV_HEADS, VOCABULARY = 128, 8, 2, 100


class Model(torch.nn.Module):
    """Two attention layers, the second one seeing only the last 16 tokens; untrained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(
            FusedAttention(WIDTH, HEADS, KV_HEADS, mask=mask, rotary_base=10000.0)
            for mask in (Causal(), Window(left=15))
        )
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, caches: list[KVCache] | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer, cache in zip(self.layers, caches or [None, None], strict=True):
            x = x + layer(x, cache=cache)
        return self.head(x)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model().to(device)
    prompt = torch.randint(VOCABULARY, (1, 20), device=device)
    caches = [KVCache(1, KV_HEADS, 200, WIDTH // HEADS, device=device) for _ in model.layers]

    # the prompt in one pass, then a token a step; each logit is kept to be checked
    tokens, seen = prompt, [prompt]
    logits = []
    started = time.perf_counter()
    for _ in range(100):
        logits.append(model(tokens, caches))
        # drawn from the logits, of which no probabilities are written
        tokens = flashsoft.sample(logits[-1][:, -1], temperature=0.8, top_k=10, top_p=0.95)[:, None]
        seen.append(tokens)
    seconds = time.perf_counter() - started
    print(f"100 tokens in {seconds:.2f} s; {caches[0]}")
    print("sampled:", torch.cat(seen[1:], 1)[0, :16].tolist(), "...")

    whole = model(torch.cat(seen[:-1], 1))
    print(f"logits against one full pass: largest difference {(torch.cat(logits, 1) - whole).abs().max():.1e}")

    try:
        model(prompt.repeat(1, 5), caches)
    except ValueError as full:
        print("more than fits:", full)
    for cache in caches:
        cache.reset()
    again = model(prompt, caches)
    print(f"after reset(), the prompt again: largest difference {(again - logits[0]).abs().max():.1e}")


if __name__ == "__main__":
    main()
