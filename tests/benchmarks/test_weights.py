"""Steps beside reading: fewer bits are fewer bytes, and wrong ways are refused."""

import re

import pytest
import torch
from click.testing import CliRunner

from benchmarks.weights import main
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL

pytestmark = pytest.mark.costly(by="file")


def test_a_step_with_random_weights_of_a_type_reads_its_bytes() -> None:
    """A table of two rows; Q4_1 has 5 bits for 32, and the cache of the context is the same."""
    num_threads = torch.get_num_threads()
    arguments = [str(EMBEDDED_MODEL), "--roofline", "--ways", "float32,Q4_1", "--rounds", "1"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    torch.set_num_threads(num_threads)
    rows = dict(re.findall(r"^\| (\w+) \| (\d+) \|", done.output, re.MULTILINE))
    assert list(rows) == ["float32", "Q4_1"], done.output
    assert 0 < int(rows["Q4_1"]) < 0.3 * int(rows["float32"])
