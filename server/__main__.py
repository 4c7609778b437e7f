"""The `ropewalk` command."""

import sys

from server.own_packages import foreign_package
from server.process_memory import bound_memory
from server.thread_waiting import wait_briefly


def main() -> None:
    """Check that our own packages will be imported, then hand over to the command line."""
    problem = foreign_package()
    if problem is not None:
        sys.stderr.write(f"ropewalk: {problem}\n")
        sys.exit(2)
    bound_memory()
    wait_briefly()
    from server.command_line import ropewalk  # noqa: PLC0415  # not before the check

    ropewalk()


if __name__ == "__main__":
    main()
