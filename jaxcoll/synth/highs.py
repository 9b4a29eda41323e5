"""HiGHS as the all-to-all solvers use it: quiet, bounded in threads, and imported only when a solve needs it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from jaxcoll.errors import SynthesisError

if TYPE_CHECKING:
    import highspy

_lock = threading.Lock()
_threads = 0


def new_highs(threads: int | None = None, **options: str | int | float) -> highspy.Highs:
    """A silent solver with `options`, on at most `threads` threads (None: 1).

    Raises SynthesisError when highspy is missing, naming the extra that brings it.
    """
    try:
        import highspy
    except ImportError as error:
        raise SynthesisError(
            f"all_to_all needs the HiGHS solver ({error}); install it with: pip install 'jaxcoll[synth]'"
        ) from None

    class Quiet(highspy.Highs):
        """highspy's own constructor enables callbacks, and that prints a banner to standard output before anything
        can be silenced."""

        def __init__(self) -> None:
            super(highspy.Highs, self).__init__()
            self.setOptionValue("output_flag", False)

    global _threads
    with _lock:
        # The thread pool is one for the process and keeps its first size; a solver that asks for another fails.
        if threads and threads != _threads:
            highspy.Highs.resetGlobalScheduler(True)
        _threads = threads or _threads or 1
        solver = Quiet()
        solver.setOptionValue("threads", _threads)
        for key, value in options.items():
            solver.setOptionValue(key, value)
        return solver
