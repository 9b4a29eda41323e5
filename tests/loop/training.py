"""What the test of a training under swaps runs: examples/train_digits.py, with a new table as often as can be."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import jaxcoll
from jaxcoll import launch
from jaxcoll.runtime import drain, loop

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_digits.py"


def main() -> None:
    drain._PATIENCE_S = drain._SAMPLED_S = 0.01  # many swaps in a short time
    initialize = launch.initialize

    def tuned(*args: Any, **kwargs: Any) -> Any:
        out = initialize(*args, **kwargs)
        jaxcoll.tune("shuffle", every=1, seed=3)
        return out

    launch.initialize = tuned
    try:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    finally:
        running = loop.current()
        assert running is not None
        print(f"swaps in force: {running.worker.swaps.commits}", flush=True)


if __name__ == "__main__":
    sys.argv[0] = str(EXAMPLE)
    main()
