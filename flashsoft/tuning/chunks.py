"""How many rows of logits are held at a time where those of all rows never exist."""

from __future__ import annotations

# Of a chunk's logits. A product of 2,048 rows by 128,256 classes (bf16: 512 MB) fills an H200 many times over, and its
# logits are a quarter of those of 8,192 tokens; on a CPU the reference also holds several copies in float32.
CHUNK_BYTES = {"cuda": 1 << 29, "cpu": 1 << 26}
# Chunks over which a gradient of half precision is summed in its own dtype. Rounding the sums of 1 to 4 chunks adds up
# to 1.6 of one rounding (rms) where their gradients are random, 1.4 where they are alike.
ROUNDED_CHUNKS = 4
TILE = 128  # rows of a tile of a matrix product, of which a chunk has whole ones


def chunk_rows(rows: int, n_cols: int, itemsize: int, device_type: str) -> int:
    """Rows of a chunk, so that chunks are of about the same size and none is larger than CHUNK_BYTES, or one tile."""
    most = CHUNK_BYTES.get(device_type, CHUNK_BYTES["cpu"]) // max(n_cols * itemsize, 1)
    most = max(most // TILE * TILE, TILE)
    chunks = max(-(-rows // most), 1)
    return -(-rows // chunks // TILE) * TILE if rows > most else max(rows, 1)
