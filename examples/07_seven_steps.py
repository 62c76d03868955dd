"""Row softmax in seven steps from naive to the roof: what each reads and writes, counted.

A softmax does almost no arithmetic, so its time is the memory it moves: at best one read and one write of each element,
2 N for a row of N. A step that moves k N reaches at most 2 / k of the speed of a copy, however well it is written.
"""

from collections import Counter

import torch

import flashsoft
from flashsoft.reference.softmax import merge_states, update
from flashsoft.tuning.timing import Clock

TILE = 2048  # elements that a program keeps on chip
EMPTY = torch.tensor(-torch.inf), torch.tensor(0.0)  # the state (m, s) of no element


class Softmax(Counter):  # of multiples of N that cross to and from the GPU's memory; what stays on chip is not counted
    def load(self, x):
        self["read"] += x.numel() / 4 / TILE
        return x

    def store(self, x):
        self["written"] += x.numel() / 4 / TILE
        return x

    def operators(self, x):  # three operators, each with a tensor of its own
        e = self.store(torch.exp(self.load(x)))
        return self.store(self.load(e) / self.load(self.store(self.load(e).sum(-1, keepdim=True))))

    def safe(self, x):  # the maximum goes first: exact for any x, at the price of two operators more
        m = self.store(self.load(x).amax(-1, keepdim=True))
        return self.operators(self.store(self.load(x) - self.load(m)))

    def three_passes(self, x):  # one kernel: what lies between the passes is computed again, not stored
        m = self.load(x).amax(-1, keepdim=True)
        s = torch.exp(self.load(x) - m).sum(-1, keepdim=True)
        return self.store(torch.exp(self.load(x) - m) / s)

    def online(self, x):  # maximum and sum in one pass: the sum so far is rescaled whenever the maximum grows
        m, s = EMPTY
        for tile in x.split(TILE, -1):
            m, s, _, _ = update(m, s, self.load(tile))
        return torch.cat([self.store(torch.exp(self.load(tile) - m) / s) for tile in x.split(TILE, -1)], -1)

    def on_chip(self, x):  # a row that fits stays on chip: at the roof, if rows are many and not too long
        _, s, _, p = update(*EMPTY, self.load(x))
        return self.store(p / s)

    def finish(self, tile, states):  # every program of a row joins the states of all, by the law
        m, s = EMPTY
        for state in states:
            m, s, _, _ = merge_states(m, s, *self.load(state))
        return self.store(torch.exp(tile - m) / s)

    def split(self, x):  # few long rows: a program a tile; a first launch leaves states, a second reads all again
        states = [self.store(torch.stack(update(*EMPTY, self.load(tile))[:2])) for tile in x.split(TILE, -1)]
        return torch.cat([self.finish(self.load(tile), states) for tile in x.split(TILE, -1)], -1)

    def exchanged(self, x):  # one launch: tiles stay on chip while the programs of a row exchange their states
        tiles = [self.load(tile) for tile in x.split(TILE, -1)]
        states = [self.store(torch.stack(update(*EMPTY, tile)[:2])) for tile in tiles]
        return torch.cat([self.finish(tile, states) for tile in tiles], -1)


if __name__ == "__main__":
    x = 3 * torch.randn(1, 4 * TILE, generator=torch.Generator().manual_seed(0))
    print("step               reads  writes  of a copy's speed, at most")
    for number, step in enumerate(("operators", "safe", "three_passes", "online", "on_chip", "split", "exchanged"), 1):
        y = getattr(counted := Softmax(), step)(x)
        torch.testing.assert_close(y.double(), torch.softmax(x.double(), -1), rtol=1e-5, atol=1e-9)
        print(f"{number} {step:<13} {counted['read']:6.2f} N  {counted['written']:4.2f} N  {2 / counted.total():4.0%}")
    print(f"Only the first overflows, from 89 on: {not Softmax().operators(x + 89).isfinite().all()}")
    if torch.cuda.is_available():
        x = torch.randn(8192, 32768, device="cuda")
        ways = {"a copy": x.clone, "safe": lambda: Softmax().safe(x), "flashsoft": lambda: flashsoft.softmax(x)}
        times = {name: one.quantiles()[0] for name, one in Clock().measure(ways).items()}
        print("measured:", ", ".join(f"{name} {times['a copy'] / ms:.0%}" for name, ms in times.items()))
