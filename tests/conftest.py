"""Fixtures for every test: seeds, engines over tiny models, the embedded model, a server."""

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import leftovers
from tests.servers import preloaded

if TYPE_CHECKING:
    from ropewalk.model_runtime.loading.checkpoint import Checkpoint
    from tests.doubles.engines import EngineFactory
    from tests.servers.processes import Server

# Files `test_*` of eight seconds or more in `make test`. All begin before the others.
_LONGEST = """
    adversarial_weights any_serving architectures batch_invariance chat cpu_backend doc_commands
    eight_bits evaluation exact_batches expert_lines fingerprint flat_forward fused_decoder
    fused_mixtures gguf_architectures gguf_hybrids gpu_states grammar key_ranges kv_disk lifecycle
    light_imports low_bit_experts low_bit_models low_bit_products metrics mixed_steps_ahead nginx
    packed_linear page page_tells patch_model planned_storage positions quantised_on_disk
    quantised_pages quantised_warm_up quantised_weights rounded_pages rounded_products route
    same_bits smollm2 states static_parity stored_weights transformers_parity
    triton_backend triton_prefill triton_ranges windows
"""


# Triton is imported by transformers, and that by the conftest of a folder that is named to pytest.
# If there is no GPU, its kernels are interpreted, and it has to know before it is imported.
_GPU_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
if not any(Path(each).exists() for each in _GPU_DRIVERS):
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Mark the run's processes and its temporary folder, before workers start.

    Torch is imported by those that run tests only; xdist's first process would be late by it.
    """
    leftovers.begin()
    # A shell starts what runs beside it with the signal ignored, and commands would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        import torch

        if not torch.cuda.is_available():  # a driver alone is no GPU
            os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Let the longest files come first, so that no worker is left with one at the end."""
    longest = {f"test_{each}" for each in _LONGEST.split()}
    items.sort(key=lambda item: item.path.stem not in longest)


def pytest_collection_finish() -> None:
    """Leave what was imported out of the collections of garbage that each load asks for."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say which files took longest, with what their tests set up."""
    if not config.option.durations:
        return
    seconds = Counter[str]()
    for reports in terminalreporter.stats.values():
        for each in reports:
            if isinstance(each, pytest.TestReport):
                seconds[each.nodeid.partition("::")[0]] += each.duration
    terminalreporter.section(f"slowest files, of {seconds.total():,.0f} s")
    for name, taken in seconds.most_common(config.option.durations):
        terminalreporter.write_line(f"{taken:7.2f}s {name}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Look for processes and folders that outlive the tests, once the workers have ended."""
    if "ropewalk.model_runtime.text.template_renderer" in sys.modules:
        from ropewalk.model_runtime.text.template_renderer import template_renderer

        template_renderer().close()  # of this process, which keeps them warm as a server would
    preloaded.close()
    leftovers.end(session)


@pytest.fixture(scope="session", autouse=True)
def _plain_tracebacks() -> None:
    """A logged error with every local variable, as rich draws it, takes two seconds."""
    import structlog

    structlog.get_config()["processors"][-1].exception_formatter = structlog.dev.plain_traceback


@pytest.fixture(scope="session", autouse=True)
def _fast_interpreter() -> None:
    """Kernels that Triton interprets, on a machine that has it."""
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
        from tests import interpreter

        interpreter.hasten()


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """A call of httpx without a client reads those of all authorities, 30 ms of processor time."""
    from httpx._transports import default

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", cache(default.create_ssl_context))
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _device_works() -> Iterator[None]:
    """A kernel's fault is the fault of the case that launched it."""
    from tests.doubles.device_faults import end_if_the_device_failed

    yield
    end_if_the_device_failed()


@pytest.fixture(scope="session")
def embedded() -> "Checkpoint":
    """The shipped model, taken over."""
    from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
    from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL

    return load_checkpoint(EMBEDDED_MODEL)


@pytest.fixture(scope="session")
def llama_checkpoint() -> "Checkpoint":
    """A tiny Llama of four layers with a trained length of 64; its tokens are bytes.

    It is shared by all tests, so a test that changes a model makes its own.
    """
    from tests.doubles.engines import tiny_checkpoint

    return tiny_checkpoint("llama")


@pytest.fixture
def engines() -> "Iterator[EngineFactory]":
    """Makes engines; stops them all at the end, and checks that nothing leaked."""
    from tests.doubles.engines import EngineFactory

    factory = EngineFactory()
    yield factory
    factory.stop_all()


@pytest.fixture(scope="session")
def server() -> "Iterator[Server]":
    """`ropewalk serve` as a newcomer runs it, a process of its own on a free port."""
    from tests.servers.processes import running_server

    with running_server() as running:
        yield running
