"""Make a schedule, check it, run it on NumPy arrays and draw it. No JAX, no native library.

python examples/draw_schedule.py -o tree.svg
jaxcoll draw dual_tree --ranks 16 -o tree.svg          the same picture by the command
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from jaxcoll import schedule


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("tree.svg"))
    parser.add_argument("--ranks", type=int, default=16)
    args = parser.parse_args(argv)
    tree = schedule.build("dual_tree", schedule.Kind.ALL_REDUCE, args.ranks)
    schedule.check(tree)  # raises with every fault, if there is one
    inputs = [np.arange(8, dtype=np.int64) + rank for rank in range(args.ranks)]
    right = all(np.array_equal(result, sum(inputs)) for result in schedule.interpret(tree, inputs))
    args.output.write_text(schedule.draw_svg(tree))
    edges = sum(len(graph.edges) for graph in tree.graphs)
    print(f"{tree.name}: {args.ranks} ranks, {tree.steps} steps, {len(tree.graphs)} chunk graphs, {edges} edges")
    print(f"sums on NumPy arrays are {'right' if right else 'WRONG'}; drawn in {args.output}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
