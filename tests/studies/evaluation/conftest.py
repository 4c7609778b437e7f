"""The embedded model is loaded once for all runs of this folder."""

from collections.abc import Iterator

import pytest

from ropewalk.studies.evaluation import subject
from tests.studies.loaded_once import load_once


@pytest.fixture(scope="module", autouse=True)
def _model_is_loaded_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        load_once(patch, subject)
        yield
