"""One own primitive for each of JAX's collective primitives: JAX's rules, jaxcoll's lowering.

`table` says what each operation is, one row an operation; `lockstep` sends JAX's own rules through our primitives;
`define` makes the primitives out of both.
"""

from __future__ import annotations

from jaxcoll.primitives.lockstep import Options as Options
from jaxcoll.primitives.lockstep import run as run
from jaxcoll.primitives.table import ROWS as ROWS
from jaxcoll.primitives.table import Row as Row
