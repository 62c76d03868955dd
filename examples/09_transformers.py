"""Models of Hugging Face transformers on flashsoft's attention: the same logits, gradients and generated tokens."""

from typing import Any

import torch
from transformers import MistralConfig, MistralForCausalLM

from flashsoft.integrations import transformers as flashsoft_for_transformers

WINDOW = 8


def model(attention: str) -> Any:
    """A tiny Mistral, untrained: grouped heads, each token sees the last 8. The same weights for every attention."""
    config = MistralConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        sliding_window=WINDOW,
        pad_token_id=0,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    made = MistralForCausalLM(config).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def main() -> None:
    flashsoft_for_transformers.register()
    ours, theirs = model("online_softmax"), model("sdpa")

    torch.manual_seed(1)
    tokens = torch.randint(1, 96, (3, 24))
    keep = torch.ones_like(tokens)
    keep[0, :9] = keep[1, :4] = 0  # three prompts of 15, 20 and 24 tokens, padded on the left
    tokens = tokens * keep

    results = []
    for made in (ours, theirs):
        logits = made(tokens, attention_mask=keep).logits[keep.bool()]
        logits.logsumexp(-1).sum().backward()
        results.append((logits.detach(), [parameter.grad for parameter in made.parameters()]))
    (logits, gradients), (expected, expected_gradients) = results
    worst = max(distance(a, b) for a, b in zip(gradients, expected_gradients, strict=True))
    print(f"logits differ from sdpa's by {distance(logits, expected):.0e}, {len(gradients)} gradients by {worst:.0e}")
    assert max(worst, distance(logits, expected)) < 1e-4

    # documents packed into one row: positions that begin again say where one ends
    positions = torch.cat((torch.arange(14), torch.arange(10))).unsqueeze(0)
    packed = ours(tokens[2:], position_ids=positions, use_cache=False).logits
    alone = ours(tokens[2:, 14:]).logits
    print(f"a packed document does not see its neighbour: {distance(packed[:, 14:], alone):.0e} from being alone")
    assert distance(packed[:, 14:], alone) < 1e-4

    said = [made.generate(tokens, attention_mask=keep, max_new_tokens=12, do_sample=False) for made in (ours, theirs)]
    print("generated:", *said[0][0, 24:].tolist())
    assert torch.equal(*said)
    print("the same tokens as with sdpa, for all prompts")


if __name__ == "__main__":
    main()
