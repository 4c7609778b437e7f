"""The embedded model is loaded once for all runs of this folder with equal settings of it."""

from collections.abc import Iterator
from functools import cache

import pytest

from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.server.settings.load import ServeSettings, load_settings
from ropewalk.server.startup.load_model import load_model
from ropewalk.studies.evaluation import subject

_OF_MODEL = ("model", "dtype", "device", "threads", "weights", "revision", "gguf_file")


@cache
def _loaded(**values: str) -> Checkpoint:
    return load_model(load_settings(values))


@pytest.fixture(scope="module", autouse=True)
def _model_is_loaded_once() -> Iterator[None]:
    def load(settings: ServeSettings) -> Checkpoint:
        values = {name: getattr(settings, name) for name in _OF_MODEL}
        return _loaded(**{name: str(each) for name, each in values.items() if each is not None})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "load_model", load)
        yield
