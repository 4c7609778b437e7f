"""The part of a checkpoint that reads text, if it has towers for images or sound beside it.

transformers has a class of the whole model, which knows the names of all weights. Text passes its
decoder and its head alone. So the other parts are left out, and their weights are not read.
"""

from copy import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from ropewalk.model_runtime.errors import ModelError


def factory_of(config: Any) -> Any:
    """Return what makes and loads the model of a config: its class, or AutoModelForCausalLM."""
    kind = _whole_class(config)
    return AutoModelForCausalLM if kind is None or _has_text_class(config) else _for_text(kind)


def empty_model(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Return the model of a config without memory for its weights."""
    with torch.device("meta"):
        return factory_of(config).from_config(config, trust_remote_code=trust_remote_code)


def config_of_model(config: Any) -> Any:
    """Return the config of the model that `factory_of` makes, which may be that of the text."""
    return config.get_text_config() if _has_text_class(config) else config


def parts_left_out(config: Any) -> tuple[str, ...]:
    """Return the names of the parts that text does not pass, such as `visual`; most have none.

    Raises ModelError for a model that writes no text, or has no decoder of its own for text.
    """
    kind = _whole_class(config)
    if kind is None:
        _refuse_other_work(config)
        return ()
    with torch.device("meta"):
        model = kind(config)
    if model.get_decoder() not in model.base_model.children() and not _has_text_class(config):
        raise ModelError(
            f"{kind.__name__} has no decoder for text that can be served without its other parts"
        )
    return tuple(_left_out(model))


def _refuse_other_work(config: Any) -> None:
    """Raise ModelError for a class that predicts no next token, such as an encoder."""
    has_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if not has_code and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        name = (getattr(config, "architectures", None) or [config.model_type])[0]
        raise ModelError(
            f"{name} (model_type {config.model_type}) is no model in transformers that continues "
            "text"
        )


def _whole_class(config: Any) -> Any:
    """Return the class of a model with parts beside its text decoder; None for other models."""
    kind = type(config)
    is_known = kind.__module__.startswith("transformers.")  # a checkpoint's own code may be alike
    if config.get_text_config() is config or not is_known:
        return None
    return MODEL_FOR_MULTIMODAL_LM_MAPPING.get(kind, None)


def _has_text_class(config: Any) -> bool:
    """Return whether transformers has a class of the text alone, which reads such a checkpoint."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return bool(kind.config_class is not type(config))


def _left_out(model: Any) -> list[str]:
    """Return the names of the modules beside the decoder; none if it stands elsewhere."""
    decoder, children = model.get_decoder(), dict(model.base_model.named_children())
    beside = [name for name, child in children.items() if child is not decoder]
    return beside if len(beside) < len(children) else []


def _for_text(kind: Any) -> Any:
    """Return a class whose models have only the parts that text passes.

    It has the name of `kind`, by which transformers finds the names of the stored weights.
    """

    def make(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        kind.__init__(self, copy(config), *arguments, **named)
        for name in _left_out(self):
            setattr(self.base_model, name, None)
            # Then transformers does not warn of these weights.
            self._keys_to_ignore_on_load_unexpected.add(rf"^{self.base_model_prefix}\.{name}\.")
        for name in self.config.sub_configs:
            if getattr(self.config, name) is not self.config.get_text_config():
                setattr(self.config, name, None)

    def from_config(of: Any, config: Any, *, trust_remote_code: bool = False) -> Any:  # noqa: ARG001
        return of(config)

    members = {"__init__": make, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), {**members, "from_config": classmethod(from_config)})
