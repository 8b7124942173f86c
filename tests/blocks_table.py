"""`docs/blocks.md`: which block covers which weights, of each network of the zoo. To renew it: python tests/blocks_table.py"""

from pathlib import Path

import torch

import linlap as ll
from zoo import ZOO

DOCUMENT = Path(__file__).parents[1] / "docs" / "blocks.md"

KINDS = {"kron": "matrices in two bases", "table": "tables", "dense": "exact blocks", "diagonal": "diagonal"}

HEAD = """# Which block covers which weights

`curvature="kron"` gives every weight a block, of whatever network. Counted here are the weights of small networks of many kinds,
as `ll.inspect` shows them: matrices of linear layers, convolutions and attention in the eigenbases of their two sides; tables of
embeddings with their rows apart; norms, offsets, tokens, positions, depthwise filters and what is parametrised or fused in
exact blocks of up to 1,024 numbers; the rest in an exact diagonal. No weight is left out.
"""


def row(name: str) -> str:
    """One network's numbers of weights under each kind of block."""
    entry = ZOO[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, inputs = entry.build(), entry.inputs(8)
    counts = dict.fromkeys(KINDS, 0)
    for line in ll.inspect(net, inputs).weights:
        counts[line.block] += torch.Size(line.shape).numel()
    assert sum(counts.values()) == sum(p.numel() for p in net.parameters())
    return (
        " | ".join([f"| {name}", f"{sum(counts.values()):,}", *(f"{c:,}" if c else "" for c in counts.values())]) + " |"
    )


def table() -> str:
    """The whole document."""
    columns = ["network", "weights", *KINDS.values()]
    lines = [f"| {' | '.join(columns)} |", "| --- " + "| ---: " * (len(columns) - 1) + "|"]
    return "\n".join([HEAD, *lines, *map(row, ZOO)]) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(table(), encoding="utf-8")
