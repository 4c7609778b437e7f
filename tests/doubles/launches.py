"""Counts what a GPU would run: launches of Triton kernels, and torch operations that compute."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


class Launches(TorchDispatchMode):
    """Counts by name. Operations inside a Triton kernel or a counted function are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self._depth = 0

    @contextmanager
    def one(self, name: str) -> Iterator[None]:
        """Count everything inside as one launch."""
        if self._depth == 0:
            self.names[name] += 1
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count an operation unless it only allocates memory or returns a view."""
        result = func(*args, **(kwargs or {}))
        if self._depth == 0 and _computes(func, (args, kwargs or {}), result):
            self.names[func.overloadpacket.__name__] += 1
        return result

    def counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, each of whose calls is one launch."""

        def counted(*args: Any, **named: Any) -> Any:
            with self.one(name):
                return function(*args, **named)

        return counted


def _computes(func: Any, given: Any, result: Any) -> bool:
    if func._schema.is_mutable:
        return True
    if "empty" in func.overloadpacket.__name__:
        return False
    known = {each.untyped_storage().data_ptr() for each in tree_leaves(given) if _is_tensor(each)}
    results = [each for each in tree_leaves(result) if _is_tensor(each)]
    return any(each.untyped_storage().data_ptr() not in known for each in results)


def _is_tensor(each: Any) -> bool:
    return isinstance(each, Tensor)


@contextmanager
def counted_launches() -> Iterator[Launches]:
    """Count the launches of a block, on a GPU or under Triton's interpreter."""
    launches = Launches()
    kinds = (JITFunction, InterpretedFunction)
    originals = [kind.run for kind in kinds]

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def launch(kernel: Any, *args: Any, **named: Any) -> Any:
            with launches.one(kernel.__name__):
                return run(kernel, *args, **named)

        return launch

    for kind, run in zip(kinds, originals, strict=True):
        kind.run = counted(run)
    try:
        with launches:
            yield launches
    finally:
        for kind, run in zip(kinds, originals, strict=True):
            kind.run = run
