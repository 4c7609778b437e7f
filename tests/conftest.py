"""Fixtures for every test: seeds, engines over tiny models, the embedded model, a server."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# Before triton is imported, which transformers does: where there is no GPU, its kernels are
# interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.text.template_processes import template_processes
from tests import leftovers, preloaded, sampling
from tests.device_faults import end_if_the_device_failed
from tests.engines import EngineFactory, tiny_checkpoint
from tests.processes import Server, running_server


def pytest_configure() -> None:
    """Mark the run's processes and its temporary folder, before workers start."""
    leftovers.begin()


def pytest_report_header() -> str:
    """Say how to repeat the draw of sampled matrices."""
    return sampling.header()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> Iterator[None]:
    """Leave out the cases of sampled tests that are not drawn, before the order is shuffled."""
    left_out = sampling.not_drawn(items)
    items[:] = [each for each in items if each not in left_out]
    config.hook.pytest_deselected(items=list(left_out))
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Look for processes and folders that outlive the tests, once the workers have ended."""
    template_processes().close()  # of this process, which keeps them warm as a server would
    preloaded.close()
    leftovers.end(session)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _device_works() -> Iterator[None]:
    """A kernel's fault is the fault of the case that launched it."""
    yield
    end_if_the_device_failed()


@pytest.fixture(scope="session")
def embedded() -> Checkpoint:
    """The shipped model, taken over."""
    return load_checkpoint(EMBEDDED_MODEL)


@pytest.fixture(scope="session")
def llama_checkpoint() -> Checkpoint:
    """A tiny Llama of four layers with a trained length of 64; its tokens are bytes.

    It is shared by all tests, so a test that changes a model makes its own.
    """
    return tiny_checkpoint("llama")


@pytest.fixture
def engines() -> Iterator[EngineFactory]:
    """Makes engines; stops them all at the end, and checks that nothing leaked."""
    factory = EngineFactory()
    yield factory
    factory.stop_all()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """`ropewalk serve` as a newcomer runs it, a process of its own on a free port."""
    with running_server() as running:
        yield running
