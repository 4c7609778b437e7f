"""The `ropewalk` command."""

import gc
import sys

from ropewalk.server.process.preflight import bound_memory, keep_hangups, wait_briefly


def main() -> None:
    """Prepare the process before torch is imported, then run the command line."""
    keep_hangups(sys.argv[1:])
    bound_memory()
    wait_briefly()
    from ropewalk.cli import ropewalk  # noqa: PLC0415  # not before the limits

    try:
        ropewalk(prog_name="ropewalk")
    finally:
        # Else the interpreter looks through all objects of torch and transformers for garbage
        # before it ends. That took 1.4 of the 1.7 s from SIGTERM to the end of an idle server.
        gc.freeze()


if __name__ == "__main__":
    main()
