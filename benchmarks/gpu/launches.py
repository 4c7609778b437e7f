"""`TRITON_INTERPRET=1 python -m benchmarks.gpu.launches`: kernels of a decode step, by layer.

No GPU is needed to count them. The step runs on the CPU, with Triton's interpreter for our own
kernels. A call of torch counts if it computes or copies, and not if it only describes memory. The
count of a layer is the difference between models of four and of two layers, halved.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import click
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM
from triton.runtime.interpreter import GridExecutor

from benchmarks.gpu.model_inputs import PAGE_SIZE
from benchmarks.gpu.report import Column, Row, table
from benchmarks.models.llama import Shape, llama_config
from ropewalk.model_runtime.attention.batch import Span, build_batch
from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.kv_cache import KVCache
from ropewalk.model_runtime.attention.paged_attention import STEP, LayerPlan, PagedContext
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.gpu.backend import TritonAttention
from ropewalk.model_runtime.gpu.launch import is_interpreted
from ropewalk.model_runtime.gpu.program.flat_forward import flat_forward
from ropewalk.model_runtime.gpu.rms_norm import candidates
from ropewalk.model_runtime.layers.match_norm import replace_norms
from ropewalk.model_runtime.loading.native_tables import read_native_rope
from ropewalk.model_runtime.loading.patch_model import patch_model
from ropewalk.rope import Profile

_NUM_LAYERS = (2, 4)
_CONTEXT = 2000  # positions before the token, so that the read is divided and merged
_MAX_LEN = 2048
# Calls that only describe memory, or reserve it.
_FREE = frozenset(
    {"alias", "as_strided", "detach", "empty", "empty_like", "expand", "new_empty", "permute"}
    | {"select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind"}
    | {"unsqueeze", "view", "_reshape_alias", "_unsafe_view"}
)
_PERHAPS_FREE = frozenset({"contiguous", "reshape", "to"})  # free if the memory is the argument's


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts kernels by name while it is entered: torch's calls, and launches of our own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._is_inside = False  # the interpreter calls torch for its own ends

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        is_free = name in _FREE or (
            name in _PERHAPS_FREE
            and result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
        )
        if not (self._is_inside or is_free):
            self.counts[name] += 1
        return result

    def run(self, work: Callable[[], object]) -> Mapping[str, int]:
        """Return the number of launches in a call, by kernel."""
        launch = GridExecutor.__call__

        def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self.counts[executor.fn.__name__] += 1
            self._is_inside = True
            try:
                return launch(executor, *args, **kwargs)
            finally:
                self._is_inside = False

        with patch.object(GridExecutor, "__call__", counted), self:
            work()
        return self.counts


Replace = Callable[[Any, Mapping[int, LayerPlan]], object]


def _nothing(model: Any, plans: Mapping[int, LayerPlan]) -> None:
    """Leave transformers' modules as they are."""


def _norms(model: Any, plans: Mapping[int, LayerPlan]) -> None:
    del plans
    replace_norms(model, candidates)


def _list(model: Any, plans: Mapping[int, LayerPlan]) -> None:
    model.forward = flat_forward(model, plans)


FORMS: Mapping[str, Replace] = {
    "transformers' modules": _nothing,
    "norms of one kernel": _norms,
    "a list of launches": _list,
}


def launches(num_layers: int, replace: Replace) -> Mapping[str, int]:
    """Return the launches of a decode step of a small Llama in bfloat16, by kernel."""
    shape = Shape(64, num_layers, 4, 2, 128, 256, head_dim=16)
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(shape, _MAX_LEN)).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    native = read_native_rope(model)
    plans = patch_model(model, native)
    replace(model, plans)
    cpu = torch.device("cpu")
    layout = CacheLayout(plans, torch.bfloat16, PAGE_SIZE)
    store = KVCache(layout, _MAX_LEN // PAGE_SIZE, cpu, row_keys=True)
    tables = RopeTables(native, PAGE_SIZE, _MAX_LEN, cpu)
    table_id = tables.id_of(Profile(native.tables[native.scaled_layer_type].scaling))
    pages = range(_MAX_LEN // PAGE_SIZE)
    batch = build_batch([Span([5], _CONTEXT, pages, table_id, [0])], PAGE_SIZE, cpu)
    step = PagedContext(batch, store, tables, plans, TritonAttention)
    with torch.inference_mode():
        return Launches().run(
            lambda: model(
                input_ids=batch.token_ids_1T,
                position_ids=batch.position_ids_1T,
                use_cache=False,
                logits_to_keep=batch.logit_rows_R,
                **{STEP: step},
            )
        )


def by_layer(replace: Replace) -> Mapping[str, int]:
    """Return the launches of one layer in a decode step, by kernel."""
    few, many = (Counter(launches(number, replace)) for number in _NUM_LAYERS)
    more = many - few
    num_more = _NUM_LAYERS[1] - _NUM_LAYERS[0]
    assert all(count % num_more == 0 for count in more.values()), more
    return {name: count // num_more for name, count in more.items()}


def rows() -> list[Row]:
    """Return one row for each form of the forward."""
    return [
        {"form": form, "kernels": dict(found), "launches": sum(found.values())}
        for form, found in ((form, by_layer(replace)) for form, replace in FORMS.items())
    ]


_COLUMNS: tuple[Column, ...] = (
    ("forward", lambda row: row["form"]),
    ("launches in a layer", lambda row: str(row["launches"])),
    (
        "which",
        lambda row: ", ".join(f"{count} {name}" for name, count in sorted(row["kernels"].items())),
    ),
)


@click.command()
def main() -> None:
    """Count the kernels of a layer in a decode step, and print a Markdown table."""
    if not is_interpreted():
        click.echo("benchmarks.gpu.launches: needs TRITON_INTERPRET=1", err=True)
        sys.exit(2)
    click.echo(table(rows(), _COLUMNS))


if __name__ == "__main__":
    main()
