"""`python -m jaxcoll`: the same as the command `jaxcoll`."""

import sys

from jaxcoll.cli import main

sys.exit(main())
