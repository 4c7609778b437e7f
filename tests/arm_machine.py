"""An aarch64 machine played by qemu: `python -m tests.arm_machine FOLDER [pytest's arguments]`.

Debian's qemu-user runs Debian's Python for arm64 with the published aarch64 wheels, all unpacked
into FOLDER; nothing of the machine itself is changed but for qemu-user, which has to be installed.
Without arguments it runs the tests of the kernels, the self-check and one completion of the
embedded model. It needs 6 GB and Debian; half an hour is a good time for it.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_DEBIAN = (
    "libc6 libgcc-s1 libstdc++6 libgomp1 libpython3.11-minimal libpython3.11-stdlib "
    "python3.11-minimal zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libssl3 libuuid1 "
    "libcrypt1 libreadline8 libtinfo6 libncursesw6 libdb5.3 libnsl2 libtirpc3 media-types"
)
_PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in range(39, 16, -1)]
_TESTS = ("pytest", "pytest-timeout", "pytest-randomly")
_CPU = "neoverse-n1"
# The libraries' own look at the processor: the emulator passes the machine's files through.
_CPU_FILE = """processor\t: 0
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""  # noqa: E501
_MIDR = "0x00000000413fd0c1\n"
_DEFAULT = (
    "tests/model_runtime/cpu_kernels/test_simd.py",
    "tests/promises/test_any_processor.py",
    "tests/model_runtime/cpu_kernels/test_attention_block.py",
    "tests/model_runtime/layers/test_rms_norm.py",
    "tests/model_runtime/layers/test_activations.py",
)


def _run(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd)


def _unpack_debian(folder: Path) -> None:
    """Debian's Python for arm64, under FOLDER/root."""
    lists, packages, root = folder / "lists", folder / "debs", folder / "root"
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    packages.mkdir(exist_ok=True)
    options = [
        "-oAPT::Architecture=arm64",
        "-oAPT::Architectures=arm64",
        f"-oDir::State::Lists={lists}",
    ]
    _run("apt-get", *options, "-qq", "update")
    _run("apt-get", *options, "-qq", "download", *_DEBIAN.split(), cwd=packages)
    for package in sorted(packages.glob("*.deb")):
        _run("dpkg", "-x", str(package), str(root))
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc" / "cpuinfo").write_text(_CPU_FILE)
    identification = root / "sys/devices/system/cpu/cpu0/regs/identification"
    identification.mkdir(parents=True, exist_ok=True)
    (identification / "midr_el1").write_text(_MIDR)


def _install_wheels(folder: Path) -> None:
    """Install the project's packages, for aarch64 and Python 3.11, in FOLDER/site."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    platforms = [f"--platform={each}" for each in (*_PLATFORMS, "manylinux2014_aarch64", "any")]
    _run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder / "site")),
        *("--only-binary=:all:", "--python-version=3.11", "--implementation=cp"),
        *("--abi=cp311", "--abi=abi3", "--abi=none", *platforms),
        *("--constraint", str(ROOT / "requirements.lock"), *project["dependencies"], *_TESTS),
    )


def main(folder: Path, *arguments: str) -> None:
    """Make the machine if it is not there, and run pytest on it."""
    if not (folder / "ready").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _unpack_debian(folder)
        _install_wheels(folder)
        (folder / "ready").touch()
    root, site = folder / "root", folder / "site"
    libraries = [*site.glob("nvidia/*/lib"), *root.glob("**/lib/aarch64-linux-gnu")]
    variables = {
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        "PYTHONPATH": str(site),
        "OMP_NUM_THREADS": "1",
        "NUMBA_CACHE_DIR": str(folder / "numba"),
    }
    command = ["qemu-aarch64", "-cpu", _CPU, "-L", str(root)]
    for name, value in variables.items():
        command += ["-E", f"{name}={value}"]
    command += [str(root / "usr/bin/python3.11"), "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["-W", "default", "--timeout=3000", *(arguments or _DEFAULT)]
    os.chdir(ROOT)
    os.execvp(command[0], command)  # noqa: S606  # the emulator takes this process' place


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), *sys.argv[2:])
