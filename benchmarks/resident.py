"""`python -m benchmarks.resident MODEL -- OPTIONS`: the resident memory of `ropewalk serve`.

The server is a process of its own with one thread. Its memory is read from /proc after one answer,
and beside it stands what it was made for: the model's file, the weights as `inspect` counts them
and the KV cache.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import click

from benchmarks.own_server import completion_status, free_port
from ropewalk.model_runtime.attention.token_bytes import bytes_per_token
from ropewalk.model_runtime.loading.files.folder_files import weight_files
from ropewalk.model_runtime.loading.low_bits.planned import planned_storage
from ropewalk.model_runtime.loading.model_config import read_outline

_START_S = 600.0
_TOKENS = 8192  # of the cache
_BODY = json.dumps({"prompt": "The old harbour lies", "max_tokens": 32})
_MIB = 1 << 20
_GOAL = 1.15, 400e6  # of the file's size, and bytes besides it and the cache


def memory_of(pid: int) -> dict[str, int]:
    """Return the fields of /proc about memory, in bytes."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return {name: int(size) << 10 for name, size in re.findall(r"(\w+):\s+(\d+) kB", text)}


def measured(model: Path, options: tuple[str, ...]) -> dict[str, int]:
    """Start a server, ask for one answer, and return its memory. Raises ClickException."""
    port = free_port()
    limits = f"--port {port} --threads 1 --kv-cache-tokens {_TOKENS} --max-model-len {_TOKENS // 2}"
    command = [sys.executable, "-m", "ropewalk", "serve", str(model), *limits.split(), *options]
    root = str(Path(__file__).parents[1])
    process = subprocess.Popen(  # noqa: S603  # our own command
        command, env={**os.environ, "PYTHONPATH": root}, stderr=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + _START_S
        while time.monotonic() < end and process.poll() is None:
            if completion_status(port, _BODY, _START_S) == 200:
                return memory_of(process.pid)
            time.sleep(1)
        raise click.ClickException(f"no answer of {' '.join(command)}")
    finally:
        process.terminate()
        process.wait(60)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def main(model: Path, options: tuple[str, ...]) -> None:
    """Measure a folder or GGUF file; OPTIONS are those of `serve`, such as --weights int8."""
    found = measured(model, options)
    dtype = options[options.index("--dtype") + 1] if "--dtype" in options else "auto"
    outline = read_outline(model, dtype=dtype, device="cpu")
    weights = options[options.index("--weights") + 1] if "--weights" in options else "stored"
    storage = planned_storage(outline, weights, is_divided=False)  # type: ignore[arg-type]
    files = [model] if model.is_file() else weight_files(model)
    file_bytes = sum(path.stat().st_size for path in files)
    weight_bytes = outline.num_weight_bytes() if storage is None else storage.num_bytes
    cache_bytes = _TOKENS * bytes_per_token(outline.layers(), outline.dtype)
    besides = found["VmRSS"] - (weight_bytes or 0) - cache_bytes
    share, most = _GOAL
    rows = {
        "file": file_bytes,
        "weights": weight_bytes or 0,
        "KV cache": cache_bytes,
        "resident": found["VmRSS"],
        "resident, of files": found["RssFile"],
        "highest": found["VmHWM"],
        "besides weights and cache": besides,
        f"{share} of the file, the cache and 400 MB": int(share * file_bytes + cache_bytes + most),
    }
    click.echo("| memory | MiB |\n|---|---:|")
    for name, size in rows.items():
        click.echo(f"| {name} | {size / _MIB:.0f} |")


if __name__ == "__main__":
    main()
