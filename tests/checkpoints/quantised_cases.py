"""One tiny checkpoint for each quantised format, with the config of a published one.

Published examples: Qwen3-8B-FP8, Mistral's FP8, DeepSeek V3.1, neuralmagic's W4A16, W8A8 and FP8,
TheBloke's GPTQ and AWQ.
"""

from typing import Any

import torch

from tests.checkpoints.quantised_files import Case, awq, compressed, fp8, gptq

_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
_INT4_ZERO = {**_INT4, "group_size": 32, "symmetric": False}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_INT8_TENSOR = {**_INT8, "strategy": "tensor"}
_INT8_ZERO = {**_INT8, "symmetric": False}
_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
_FP8_BLOCK = {**_FP8, "strategy": "block", "block_structure": [64, 128]}
_FP8_TENSOR = {**_FP8, "strategy": "tensor"}
_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def _compressed_config(kind: str, *groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
        **more,
    }


def _group(weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    plain = {"weights": weights, "targets": ["Linear"], "input_activations": None}
    return {**plain, "output_activations": None, **more}


def _gptq_config(bits: int, group_size: int, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "damp_percent": 0.1,
        "desc_act": False,
        "sym": True,
        "true_sequential": True,
        **more,
    }


_FP8_BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
_BY_BLOCK = fp8((128, 128), torch.bfloat16, ("weight_scale_inv",))

CASES = (
    Case("fp8-blocks", _FP8_BLOCKS, _BY_BLOCK, "fp8 in blocks of 128 x 128"),
    Case("fp8-experts", _FP8_BLOCKS, _BY_BLOCK, "fp8 in blocks of 128 x 128", "qwen3_moe",
         {"moe_intermediate_size": 128}),
    Case("fp8-powers-of-two", {**_FP8_BLOCKS, "scale_fmt": "ue8m0"},
         fp8((128, 128), torch.float8_e8m0fnu, ("scale",)), "fp8 in blocks of 128 x 128"),
    Case("fp8-static", {**_FP8_BLOCKS, "weight_block_size": None, "activation_scheme": "static"},
         fp8(None, torch.bfloat16, ("weight_scale_inv", "activation_scale")),
         "fp8 with a scale per tensor"),
    Case("fp8-without-size", {"quant_method": "fp8"},
         fp8(None, torch.float32, ("weight_scale", "input_scale")), "fp8"),
    Case("w4a16", _compressed_config("pack-quantized", _group(_INT4)),
         compressed("pack-quantized", **_INT4), "compressed-tensors (int4 in groups of 128)"),
    Case("w4a16-zero-points", _compressed_config("pack-quantized", _group(_INT4_ZERO)),
         compressed("pack-quantized", **_INT4_ZERO), "compressed-tensors (int4 in groups of 32)"),
    Case("w8a16-rows", _compressed_config("pack-quantized", _group(_INT8_ZERO)),
         compressed("pack-quantized", **_INT8_ZERO),
         "compressed-tensors (int8 with a scale per row)"),
    Case("w8a8", _compressed_config("int-quantized", _group(_INT8, input_activations=_TOKENS)),
         compressed("int-quantized", **_INT8), "compressed-tensors (int8 with a scale per row)"),
    Case("w8a8-zero-points", _compressed_config("int-quantized", _group(_INT8_ZERO)),
         compressed("int-quantized", **_INT8_ZERO),
         "compressed-tensors (int8 with a scale per row)"),
    Case("fp8-dynamic", _compressed_config("float-quantized", _group(_FP8)),
         compressed("float-quantized", **_FP8), "compressed-tensors (fp8 with a scale per row)"),
    Case("fp8-compressed-blocks", _compressed_config("float-quantized", _group(_FP8_BLOCK)),
         compressed("float-quantized", **_FP8_BLOCK),
         "compressed-tensors (fp8 in blocks of 64 x 128)"),
    Case("naive-int8", _compressed_config("naive-quantized", _group(_INT8_TENSOR)),
         compressed("naive-quantized", **_INT8_TENSOR),
         "compressed-tensors (int8 with a scale per tensor)"),
    Case("naive-fp8", _compressed_config("naive-quantized", _group(_FP8_TENSOR),
                                         quantization_status="frozen"),
         compressed("naive-quantized", **_FP8_TENSOR),
         "compressed-tensors (fp8 with a scale per tensor)"),
    Case("mixed", _compressed_config(
            "mixed-precision",
            _group(_INT4, format="pack-quantized"),
            _group(_FP8, format="float-quantized", targets=["re:.*down_proj", "re:.*o_proj"])),
         {"down_proj": compressed("float-quantized", **_FP8),
          "gate_proj": compressed("pack-quantized", **_INT4),
          "k_proj": compressed("pack-quantized", **_INT4)},
         "compressed-tensors (int4 in groups of 128 and fp8 with a scale per row)"),
    Case("gptq", _gptq_config(4, 128), gptq(4, 128, symmetric=True, shuffled=False, version=1),
         "gptq (int4 in groups of 128)"),
    Case("gptq-ordered", _gptq_config(4, 32, sym=False, desc_act=True),
         gptq(4, 32, symmetric=False, shuffled=True, version=1), "gptq (int4 in groups of 32)"),
    Case("gptq-8-bits", _gptq_config(8, -1, checkpoint_format="gptq"),
         gptq(8, -1, symmetric=True, shuffled=False, version=1),
         "gptq (int8 with a scale per row)"),
    Case("gptq-2-bits", _gptq_config(2, 64, sym=False),
         gptq(2, 64, symmetric=False, shuffled=False, version=1), "gptq (int2 in groups of 64)"),
    Case("gptq-format-2", _gptq_config(4, 64, checkpoint_format="gptq_v2", sym=False),
         gptq(4, 64, symmetric=False, shuffled=False, version=2), "gptq (int4 in groups of 64)"),
    Case("awq", {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm",
                 "zero_point": True, "modules_to_not_convert": None},
         awq(64), "awq (int4 in groups of 64)"),
)  # fmt: skip


def case(name: str) -> Case:
    """Return the case of a name."""
    return next(each for each in CASES if each.name == name)
