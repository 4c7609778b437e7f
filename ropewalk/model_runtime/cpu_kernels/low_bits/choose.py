"""The choice of a format's function in a compiled kernel.

A kernel holds the functions of its formats only, because each one takes time to compile.
"""

from collections.abc import Iterable
from typing import Any

from ropewalk.model_runtime.cpu_kernels.jit import jit


def chooser(functions: Iterable[tuple[int, Any]]) -> Any:
    """Compiled: run(number, arguments) calls the function of the format with this number.

    `functions`: numbers of formats, and compiled functions of the same arguments. The last one is
    called for any other number.
    """
    (number, this), *others = functions
    if not others:

        @jit(inline=True)
        def run(_: int, arguments: Any) -> None:
            this(*arguments)

        return run
    run_other = chooser(others)

    @jit(inline=True)
    def choose(found: int, arguments: Any) -> None:
        if found == number:
            this(*arguments)
        else:
            run_other(found, arguments)

    return choose
