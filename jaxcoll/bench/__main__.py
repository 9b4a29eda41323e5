"""`python -m jaxcoll.bench`: the same as `jaxcoll bench`."""

import sys

from jaxcoll.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
