"""The law of (m, s), by hand: a softmax row summed in pieces, in any order, exactly as if read at once.

The state of a row is m, the largest score so far, and s, the sum of exp(x - m). Two states merge into one.
"""

import math
import random

State = tuple[float, float]
EMPTY: State = (-math.inf, 0.0)


def of(x: float) -> State:
    """The state of a single score."""
    return (x, 1.0) if x > -math.inf else EMPTY


def merge(a: State, b: State) -> State:
    """The state of both parts; each sum is rescaled to the common maximum, so nothing overflows."""
    m = max(a[0], b[0])
    if m == -math.inf:
        return EMPTY
    return m, a[1] * math.exp(a[0] - m) + b[1] * math.exp(b[0] - m)


def state(row: list[float]) -> State:
    total = EMPTY
    for x in row:
        total = merge(total, of(x))
    return total


def lse(s: State) -> float:
    return s[0] + math.log(s[1]) if s[1] > 0.0 else -math.inf


def main() -> None:
    random.seed(0)
    row = [random.gauss(0.0, 3.0) for _ in range(1000)]
    whole = state(row)
    print(f"read at once:          m = {whole[0]:.6f}  s = {whole[1]:.6f}  lse = {lse(whole):.12f}")

    pieces = [state(row[i : i + 64]) for i in range(0, 1000, 64)]
    random.shuffle(pieces)
    merged = EMPTY
    for piece in pieces:
        merged = merge(merged, piece)
    print(f"16 pieces, shuffled:   m = {merged[0]:.6f}  s = {merged[1]:.6f}  lse = {lse(merged):.12f}")
    assert math.isclose(lse(whole), lse(merged), rel_tol=1e-14)

    softmax = [math.exp(x - merged[0]) / merged[1] for x in row]
    print(f"softmax sums to:       {math.fsum(softmax):.15f}")

    far = state([x + 1e4 for x in row])
    print(f"shifted by 1e4:        m = {far[0]:.3f}  s = {far[1]:.6f}  (exp(1e4) alone would overflow)")

    hidden = state([-math.inf] * 5)
    print(f"a wholly masked row:   {hidden}, and merging it changes nothing: {merge(hidden, whole) == whole}")


if __name__ == "__main__":
    main()
