"""`python -m jaxcoll`: the same as the command `jaxcoll`."""

import sys


def main() -> int:
    """`jaxcoll.cli.main`; Ctrl-C ends it with a line and status 130 from its first import on."""
    try:
        from jaxcoll import cli

        return cli.main()
    except KeyboardInterrupt:
        sys.stderr.write("jaxcoll: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
