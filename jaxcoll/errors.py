"""The exceptions that jaxcoll raises. Every message says what happened, where, and how to mend it.

Some stand beside what raises them, and are JaxcollErrors too: `jaxcoll.ops.UnboundAxisError`,
`jaxcoll.lowering.CannotLower`, `jaxcoll.runtime.native.NativeError`, `jaxcoll.testbed.Unavailable` and
`jaxcoll.synth.Cancelled`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxcoll.schedule import Finding


MALFORMED = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, EOFError, RecursionError)
"""What Python and numpy raise over data that isn't what it should be (text that is no UTF-8, JSON that is cut short or
lies too deep, a number too large, a field that is missing): readers of files catch it, and name the file."""


class JaxcollError(Exception):
    """Base of all errors raised by jaxcoll."""


class UsageError(JaxcollError, ValueError):
    """A call, a setting or a file that can't be used as it is; the message says what is accepted."""


class ScheduleError(UsageError):
    """An unknown schedule, or one that can't do this collective or this number of ranks."""


class ScheduleInvalid(ScheduleError):
    """A schedule (with its table) that doesn't compute its collective; `findings` holds every fault found."""

    def __init__(self, message: str, findings: tuple[Finding, ...] = ()):
        super().__init__(message)
        self.findings = tuple(findings)


class TopologyError(UsageError):
    """A topology with a fault: the message names the node, link or line."""


class SynthesisError(JaxcollError):
    """A synthesis that can't give a schedule; the message says why."""


class CollectiveError(JaxcollError, RuntimeError):
    """The ranks couldn't be joined: a process that didn't come in time, links or a store that can't be reached.

    A collective that fails later (a lost peer, a deadline, ranks that disagree) raises JAX's own error from within the
    program, `jax.errors.JaxRuntimeError`, with a text that says "jaxcoll:" and names rank, operation, step and edge.
    """
