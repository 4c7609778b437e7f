"""Choose the products of linears and experts whose weights are held as codes, by format and card.

A candidate multiplies rows that are drawn at random, and is compared with the product of the
widened weight. A linear whose candidate is wrong or fails keeps that product.

Shapes: R = rows, K = inputs, N = outputs, G = groups of inputs, B = blocks of outputs.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import structlog
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.formats.codes import Codes
from ropewalk.model_runtime.layers.low_bits import humming
from ropewalk.model_runtime.layers.low_bits.stored import (
    Grouped,
    Multiply,
    StoredEmbedding,
    StoredExperts,
    StoredLinear,
    ends_of,
    grouped_product,
    widened_product,
)

DEVICE_TYPE = "cuda"  # of the library's products
_TRIAL_ROWS = 13  # no multiple of what products want
# Largest distance from the product of the widened weight, relative to it.
_MOST_ERROR = 0.01  # scales that a library rounds to the served type
_MOST_ROUNDED = 0.08  # E4M3 has three bits behind the first
_FP8 = torch.float8_e4m3fn
_FP8_ALIGNED = 16  # inputs and outputs of scaled_mm
_FP8_CARD = (8, 9)  # the oldest that multiplies it
_BLOCK = (
    128  # outputs and inputs that share a scale of a weight, and inputs that share one of a row
)
_BLOCK_CARDS = 9  # torch 2.13 multiplies such blocks on cards of this major capability only
_BLOCK_ROWS = 4  # rows are padded to a multiple

_Product = TypeVar("_Product", bound=Callable[[Tensor, Any], Tensor])

_log = structlog.get_logger(__name__)


def choose_products(model: nn.Module, *, keeps_fp8: bool = False) -> None:
    """Give linears and experts the products of a library where it serves them, in place.

    `keeps_fp8`: but not those that `round_to_fp8` will replace.
    """
    shared = {id(each.codes) for each in model.modules() if isinstance(each, StoredEmbedding)}
    for module in model.modules():
        if isinstance(module, StoredLinear) and module.codes is not None:
            is_kept = keeps_fp8 and _rounds_to_fp8(module.codes)
            if not is_kept and id(module.codes) not in shared:
                _try_library(module)
        elif isinstance(module, StoredExperts):
            _try_library_of_experts(module)


def round_to_fp8(model: nn.Module) -> bool:
    """Round the rows of linears with weights in FP8 to it, in place; return whether any could."""
    done = False
    for module in model.modules():
        if not isinstance(module, StoredLinear) or module.codes is None:
            continue
        if _rounds_to_fp8(module.codes):
            make = partial(_fp8_product, module.codes)
            done |= _replaced(module, make, "scaled_mm", _MOST_ROUNDED)
    return done


def fp8_fault(device: torch.device) -> str | None:
    """Return why a GPU does not multiply FP8; None if it does."""
    card = torch.cuda.get_device_capability(device)
    if card < _FP8_CARD:
        least = ".".join(map(str, _FP8_CARD))
        return f"activations: fp8 needs compute capability {least}, the GPU has {card[0]}.{card[1]}"
    return None


def multiplies_blocks(device: torch.device) -> bool:
    """Return whether torch multiplies FP8 with scales for 128 x 128 on a GPU."""
    return torch.cuda.get_device_capability(device)[0] == _BLOCK_CARDS


def _rounds_to_fp8(codes: Codes) -> bool:
    """Return whether torch multiplies a weight by rows in FP8.

    The weight has one scale for each output, for all of them, or for 128 x 128.
    """
    (scale, *others) = codes.scale
    sizes = codes.num_inputs, codes.num_outputs
    if codes.lower.dtype != _FP8 or others or any(each % _FP8_ALIGNED for each in sizes):
        return False
    if scale.columns == 0:
        return scale.rows in (0, 1)
    is_block = scale.rows == scale.columns == _BLOCK and codes.num_inputs % _BLOCK == 0
    return is_block and multiplies_blocks(codes.lower.device)


def _fp8_product(codes: Codes) -> Multiply:
    """Return the product with rows that are rounded to FP8.

    A row has a scale of its own, or one for each group of inputs that shares one in the weight.
    """
    scale, kinds = codes.scale[0], nn.functional.ScalingType
    numbers, weight_KN = scale.numbers.float(), codes.lower.t()
    if scale.columns:
        num_rows, group = _BLOCK_ROWS, scale.columns
        recipes = kinds.BlockWise1x128, kinds.BlockWise128x128
        # cuBLASLt reads scales of four blocks of inputs at a time.
        scale_GB = nn.functional.pad(numbers, (0, -numbers.shape[-1] % 4)).t()
    else:
        num_rows, group = 1, codes.num_inputs
        recipes = kinds.RowWise, kinds.RowWise
        scale_GB = numbers.expand(codes.num_outputs, 1).contiguous().t()
    most = torch.finfo(_FP8).max

    def multiply(x: Tensor, bias: Tensor | None) -> Tensor:
        x_RK = x.reshape(-1, x.shape[-1])
        padded_RK = nn.functional.pad(x_RK, (0, 0, 0, -len(x_RK) % num_rows))
        groups = padded_RK.view(len(padded_RK), -1, group)
        scale_RG = (groups.abs().amax(-1).float() / most).clamp(min=1e-12)
        rounded_RK = (groups / scale_RG[..., None]).clamp(-most, most).to(_FP8).flatten(1)
        out_RN = nn.functional.scaled_mm(
            rounded_RK,
            weight_KN,
            scale_RG.t().contiguous().t(),
            recipes[0],
            scale_GB,
            recipes[1],
            output_dtype=torch.bfloat16,
        )
        out_RN = out_RN[: len(x_RK)].to(x.dtype)
        out_RN = out_RN if bias is None else out_RN + bias
        return out_RN.reshape(*x.shape[:-1], -1)

    return multiply


def _try_library(module: StoredLinear) -> None:
    codes, dtype = module.codes, module.weight.dtype
    assert codes is not None
    if not _has_library(codes):
        return
    if _replaced(module, lambda: humming.product(codes, dtype), humming.NAME, _MOST_ERROR):
        module.codes = None  # the library has its own layout of them


def _has_library(codes: Codes) -> bool:
    is_on_gpu = codes.lower.device.type == DEVICE_TYPE
    return is_on_gpu and humming.is_there() and humming.could_serve(codes)


def _try_library_of_experts(module: StoredExperts) -> None:
    """Give experts the library's products, if it has those of all their parts."""
    all_codes = [codes for parts in module.matrices.values() for codes in parts]
    if not all(codes.order is None and _has_library(codes) for codes in all_codes):
        return
    dtype: torch.dtype = module.down_proj.dtype
    row_S = torch.arange(_TRIAL_ROWS, device=all_codes[0].lower.device)
    end_E = ends_of(row_S * module.num_experts // _TRIAL_ROWS, module.num_experts)
    products: dict[str, list[Grouped]] = {}
    for name, parts in module.matrices.items():
        for codes in parts:
            make = partial(humming.product_of_experts, codes, dtype)
            exact = partial(grouped_product, codes)
            found = _tried(
                make, exact, codes, dtype, other=end_E, name=humming.NAME, most_error=_MOST_ERROR
            )
            if found is None:
                return
            products.setdefault(name, []).append(found)
    module.use(products, humming.NAME)


def _replaced(
    module: StoredLinear, make: Callable[[], Multiply], name: str, most_error: float
) -> bool:
    """Give a linear the product that `make` returns, if it multiplies alike."""
    codes = module.codes
    assert codes is not None
    exact = partial(widened_product, codes)
    found = _tried(
        make, exact, codes, module.weight.dtype, other=None, name=name, most_error=most_error
    )
    if found is None:
        return False
    module.multiply, module.product_name = found, name
    return True


def _tried(
    make: Callable[[], _Product],
    exact: Callable[[Tensor, Any], Tensor],
    codes: Codes,
    dtype: torch.dtype,
    *,
    other: Tensor | None,
    name: str,
    most_error: float,
) -> _Product | None:
    """Return the product that `make` returns, if it multiplies like `exact`; None if not.

    `other`: the second argument of both.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TRIAL_ROWS, codes.num_inputs, generator=generator)
    x = x.to(codes.lower.device, dtype)
    expected = exact(x, other).float()
    try:
        multiply = make()
        error = float((multiply(x, other).float() - expected).norm() / expected.norm())
    except Exception as failure:  # noqa: BLE001  # a library's own, or its compiler's
        _log.warning("product_failed", weights=codes.name, by=name, reason=str(failure)[:200])
        return None
    if not error <= most_error:
        _log.warning("product_wrong", weights=codes.name, by=name, error=error, most=most_error)
        return None
    return multiply


def products_text(model: nn.Module) -> str:
    """Return how weights held as codes are multiplied, for the banner: most bytes first.

    It is empty for a model without such weights.
    """
    found: Counter[tuple[str, str]] = Counter()
    lacks_library = False
    for module in model.modules():
        if isinstance(module, StoredLinear):
            found[module.product_name, module.format] += module.num_bytes
            if not module.product_name and module.codes is not None:
                lacks_library |= not humming.is_there() and humming.could_serve(module.codes)
        elif isinstance(module, StoredExperts):
            for codes in (each for parts in module.matrices.values() for each in parts):
                found[module.product_name, f"experts in {codes.name}"] += codes.num_bytes
                if not module.product_name:
                    lacks_library |= not humming.is_there() and humming.could_serve(codes)
    by_product: dict[str, list[str]] = {}
    for (name, weights), _ in found.most_common():
        by_product.setdefault(name, []).append(weights)
    parts = [
        f"{' and '.join(weights)} {f'by {name}' if name else 'widened for each product (slow)'}"
        for name, weights in by_product.items()
    ]
    if lacks_library:
        parts.append("the extra gpu-weights has a faster product")
    return "; ".join(parts)
