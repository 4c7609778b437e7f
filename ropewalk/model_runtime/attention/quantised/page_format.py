"""The formats of quantised pages and their bytes; settings read them without torch.

Shapes: see `cpu_kernels/quantised/records.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.gpu_nodes import Device, has_gpu_kernels
from ropewalk.model_runtime.page_groups import LayerShape

_LINE = 64  # bytes in a cache line; a record is a whole number of them
_PARAMETER_BYTES = 4  # of a row of keys or values: a lowest number and a step
_FOUR_BITS = 4


def key_parts(key_bits: int) -> int:
    """Return how many parts of a channel have a lowest number and a step of their own."""
    return 2 if key_bits == _FOUR_BITS else 1


@dataclass(frozen=True, slots=True)
class PageFormat:
    """The bits of keys and of values in a quantised page."""

    name: str
    key_bits: int
    value_bits: int
    group: int | None = None  # dimensions of a value that share a step; all of them

    def value_groups(self, value_dim: int) -> int:
        """Return the steps of a token's value: one if its dimensions are no whole groups."""
        return 1 if self.group is None or value_dim % self.group else value_dim // self.group

    def key_rows(self, key_dim: int) -> int:
        """Return the steps of a page's keys: one a channel, one each half of it in four bits."""
        return key_dim * key_parts(self.key_bits)

    def record_bytes(self, layer: LayerShape, page_size: int) -> int:
        """Return the bytes of one page of one key head."""
        return -(-self.parameter_bytes(layer, page_size)[1] // _LINE) * _LINE

    def parameter_bytes(self, layer: LayerShape, page_size: int) -> tuple[int, int]:
        """Return where the parameters of a record begin and end; its codes are before them."""
        bits = layer.key_dim * self.key_bits + layer.value_dim * self.value_bits
        first = page_size * bits // 8
        rows = self.key_rows(layer.key_dim) + page_size * self.value_groups(layer.value_dim)
        return first, first + _PARAMETER_BYTES * rows

    def page_bytes(self, layers: Mapping[int, LayerShape], page_size: int) -> int:
        """Return the bytes of one quantised page over all layers."""
        return sum(
            layer.num_key_heads * self.record_bytes(layer, page_size) for layer in layers.values()
        )

    def check(self, layers: Mapping[int, LayerShape]) -> None:
        """Raise ModelError if a layer has no such pages."""
        odd = next((each.value_dim for each in layers.values() if each.value_dim % 2), None)
        if self.value_bits < 8 and odd is not None:
            raise ModelError(
                f"kv_cache_dtype {self.name} packs two dimensions of a value into a byte, and a "
                f"layer of this model has {odd}: use int8 or auto"
            )


FORMATS = {
    each.name: each
    for each in (
        PageFormat("int8", 8, 8),
        PageFormat("k8v4", 8, 4, group=32),
        PageFormat("int4", 4, 4, group=64),
    )
}
EXACT = "auto"  # numbers of the served dtype, as they were written
ROUNDED = "bfloat16"  # numbers of two bytes, rounded at the write
FIXED8 = "fixed8"  # numbers of one byte with fixed scales (attention/eight_bits.py)


def quantises(kv_cache_dtype: str) -> bool:
    """Return whether a cache of this setting holds full pages in few bits."""
    return kv_cache_dtype in FORMATS


def refuse_format_on(device: Device, name: str) -> None:
    """Raise ModelError if no kernels of the format `name` serve the device."""
    if device.type == "cpu" or name == EXACT:
        return
    if name != FIXED8:
        raise ModelError(
            f"kv_cache_dtype {name} needs the model on a CPU, and it is on {device}: on a GPU it "
            f"must be {EXACT} or {FIXED8}"
        )
    if not has_gpu_kernels(device):
        raise ModelError(
            f"kv_cache_dtype {name} needs the model on a CPU or on a GPU with triton, and it is on "
            f"{device}"
        )


def most_staged(num_tokens: int, num_sequences: int, page_size: int) -> int:
    """Return the most pages that a step stages: those that it fills beside its tail pages.

    Two tokens of a sequence may lie in two pages, and each `page_size` tokens more in one more.
    """
    num_prompts = min(num_sequences, num_tokens // 2)
    return num_prompts and num_prompts + (num_tokens - 2 * num_prompts) // page_size
