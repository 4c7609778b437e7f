"""Followers that all tests of this folder share; they are forks, as servers are."""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ropewalk.model_runtime.parallel import followers
from ropewalk.model_runtime.parallel.ranks import Ranks
from tests.model_runtime.parallel.divided_models import remove_folders
from tests.servers import preloaded
from tests.servers.preloaded import Fork


class Groups:
    """The ranks that run; one number of them at a time."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None

    def of(self, size: int) -> Ranks:
        """Return ranks of that number, which may have served other tests."""
        if self._ranks is None or self._ranks.size != size:
            self.close()
            self._ranks = Ranks(size)
        return self._ranks

    def close(self) -> None:
        """End them."""
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None


def fork(command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> Popen[bytes] | Fork:
    """Start a follower as `subprocess.Popen` would; it ends with the process that forks."""
    *_, module, end, _ = command
    parent = preloaded.parent()
    return parent.fork(
        module,
        (end, str(parent.pid)),
        call="main",
        stdout=1,
        stderr=2,
        env={"TRANSFORMERS_VERBOSITY": "error"},
        pass_fds=pass_fds,
    )


@pytest.fixture(scope="session")
def groups() -> Iterator[Groups]:
    """Ranks of one thread each; this process is the first."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    groups = Groups()
    with pytest.MonkeyPatch.context() as patch:
        started = SimpleNamespace(
            Popen=fork, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
        )
        patch.setattr(followers, "subprocess", started)
        yield groups
        groups.close()
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session", autouse=True)
def _folders_of_models() -> Iterator[None]:
    yield
    remove_folders()


@pytest.fixture
def ranks(request: pytest.FixtureRequest, groups: Groups) -> Ranks:
    """Ranks, as many as the parameter says.

    They are not the parameter of a fixture of the session: pytest ends such a fixture after each
    test that has other parameters beside it.
    """
    return groups.of(request.param)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Run the tests of two ranks before those of four, so that each group is started once."""
    folder = Path(__file__).parent
    places = [
        place
        for place, item in enumerate(items)
        if item.path.parent == folder and "ranks" in item.fixturenames
    ]
    ordered = sorted((items[place] for place in places), key=_num_ranks)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def _num_ranks(item: Any) -> int:
    num_ranks: int = item.callspec.params["ranks"]
    return num_ranks
