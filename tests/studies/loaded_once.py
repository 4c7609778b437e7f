"""Commands that measure a model, run in this process, load it once for equal settings of it."""

from functools import cache

import pytest

from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.server.settings.load import ServeSettings, load_settings
from ropewalk.server.startup.load_model import load_model

_OF_MODEL = ("model", "dtype", "device", "threads", "weights", "revision", "gguf_file")


def load_once(patch: pytest.MonkeyPatch, module: object) -> None:
    """Let a module's `load_model` return what an earlier call has loaded."""

    def load(settings: ServeSettings) -> Checkpoint:
        values = {name: getattr(settings, name) for name in _OF_MODEL}
        return _loaded(**{name: str(each) for name, each in values.items() if each is not None})

    patch.setattr(module, "load_model", load)


@cache
def _loaded(**values: str) -> Checkpoint:
    return load_model(load_settings(values))
