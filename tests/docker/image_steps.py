"""The Dockerfile's steps on this machine, without a container engine.

All differences from a real build:

- The base image is this machine and a Python of it. Steps that change the system (`groupadd`,
  `useradd`, `apt-get`; `chown` unless we are root) are not run; `Image.not_replayed` lists them.
- The image's folders lie under a temporary one. Absolute paths in RUN, ENV, WORKDIR and COPY are
  moved there, unless their first folder is the system's. Every stage is built at the same place and
  then set aside, because a virtual environment cannot be moved.
- RUN also sees pip's own configuration (PIP_*, HOME, certificates, proxies), as a builder would be
  given its own.
- Processes run as USER if we are root, else as ourselves.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.docker.dockerfile import Dockerfile, Ignored, Instruction, Stage, argument, expand

_SYSTEM = "bin|boot|dev|etc|lib|lib64|proc|run|sbin|sys|tmp|usr|var"
_ABSOLUTE = re.compile(rf"(?<![^\s\"'=:])/(?!(?:{_SYSTEM})\b)(?=[a-z])")
_FOR_PIP = re.compile(r"PIP_\w+|HOME|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|\w+_proxy|\w+_PROXY")
_RUN_S = 600


@dataclass
class Image:
    """The image that the steps left behind."""

    root: Path
    env: dict[str, str]
    workdir: Path
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    declared: dict[str, str] = field(default_factory=dict)
    not_replayed: list[str] = field(default_factory=list)
    stages: dict[str, Path] = field(default_factory=dict)

    def path(self, inside: str) -> Path:
        """The path of the image's file on this machine."""
        return self.root / inside.lstrip("/") if _ABSOLUTE.match(inside) else self.workdir / inside

    def identity(self) -> dict[str, int | list[int]]:
        """USER as subprocess takes it; only root can become another user."""
        if os.geteuid() != 0:
            return {}
        user, _, group = self.user.partition(":")
        return {"user": int(user), "group": int(group or user), "extra_groups": []}

    def start(self, argv: list[str], **variables: str) -> subprocess.Popen[str]:
        """Start a process in the image, with its variables alone, its user and its folder."""
        return subprocess.Popen(
            argv,
            env={**self.env, **variables},
            cwd=self.workdir,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **self.identity(),
        )

    def run(self, argv: list[str], **variables: str) -> tuple[int, str]:
        """Run a process in the image to its end; returns its exit status and output."""
        with self.start(argv, **variables) as process:
            try:
                output, _ = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return process.returncode, output


def base_python() -> Path:
    """A Python 3.11 or later with venv that the image's user can run; ours, if it can."""
    identity = Image(Path(), {}, Path("/"), "10001:10001").identity()
    check = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"
    for folder in (f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin"):
        python = Path(folder, "python3")
        try:
            ended = subprocess.run([python, "-c", check], check=False, cwd="/", **identity)
        except OSError:
            continue
        if ended.returncode == 0:
            return python
    raise AssertionError("no Python 3.11 with venv is readable for a user other than root")


def build(dockerfile: Dockerfile, context: Path, at: Path, build_args: Mapping[str, str]) -> Image:
    """Replay every stage; returns the last one's image."""
    base_env = {"PATH": f"{base_python().parent}:/usr/bin:/bin", "LANG": "C.UTF-8"}
    images: dict[str, Image] = {}
    for stage in dockerfile.stages:
        for name, earlier in images.items():
            if earlier.root == at / "image":
                earlier.root = earlier.root.rename(at / f"stage-{name}")
        (at / "image").mkdir()
        stages = {name: earlier.root for name, earlier in images.items()}
        images[stage.name] = Image(at / "image", dict(base_env), at / "image", stages=stages)
        _Steps(images[stage.name], context, build_args).replay(stage)
    return images[dockerfile.stages[-1].name]


class _Steps:
    """One stage's instructions, applied to its image."""

    def __init__(self, image: Image, context: Path, build_args: Mapping[str, str]) -> None:
        self._image, self._context, self._build_args = image, context, build_args
        self._ignored = Ignored((context / ".dockerignore").read_text())
        self._args: dict[str, str] = {}

    def replay(self, stage: Stage) -> None:
        for step in stage.instructions:
            match step.name:
                case "ARG":
                    name, default = argument(step)
                    self._args[name] = self._build_args.get(name, default)
                case "ENV":
                    self._set_variables(step)
                case "WORKDIR":
                    self._image.workdir = self._image.path(step.text)
                    self._image.workdir.mkdir(parents=True, exist_ok=True)
                case "COPY":
                    self._copy(step)
                case "RUN":
                    self._run(step)
                case "USER":
                    self._image.user = step.text
                case "ENTRYPOINT" | "CMD":
                    setattr(self._image, step.name.lower(), step.argv())
                case "HEALTHCHECK":
                    command = Instruction("CMD", {}, step.text.removeprefix("CMD "))
                    self._image.healthcheck = command.argv()
                case other:  # EXPOSE, STOPSIGNAL, VOLUME change nothing in the files
                    self._image.declared[other] = step.text

    def _moved(self, text: str) -> str:
        return _ABSOLUTE.sub(lambda _: f"{self._image.root}/", text)

    def _set_variables(self, step: Instruction) -> None:
        for word in step.words():
            name, _, value = word.partition("=")
            self._image.env[name] = expand(self._moved(value), self._image.env)

    def _copy(self, step: Instruction) -> None:
        *sources, target = step.words()
        at = self._image.path(target)
        into_folder = target.endswith("/") or len(sources) > 1
        for source in sources:
            if "from" in step.flags:
                path = self._image.stages[step.flags["from"]] / source.lstrip("/")
                files = [each for each in path.rglob("*") if each.is_symlink() or each.is_file()]
            else:
                path = self._context / source
                files = self._ignored.kept(self._context, [path])
            assert path.exists(), f"COPY {source}: there is no such thing"
            for file in files:
                # A folder is copied as what is in it, a file under its name or the target's.
                inner = file.relative_to(path) if path.is_dir() else Path(path.name)
                to = at / inner if into_folder else at
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, to, follow_symlinks=False)

    def _run(self, step: Instruction) -> None:
        system = {"groupadd", "useradd", "apt-get"} | ({"chown"} if os.geteuid() != 0 else set())
        if step.words()[0] in system:
            self._image.not_replayed.append(step.text)
            return
        for_pip = {name: value for name, value in os.environ.items() if _FOR_PIP.fullmatch(name)}
        ended = subprocess.run(
            ["/bin/sh", "-c", self._moved(step.text)],
            env={**for_pip, **self._image.env, **self._args},
            cwd=self._image.workdir,
            capture_output=True,
            text=True,
            timeout=_RUN_S,
            check=False,
            umask=0o022,
            **self._image.identity(),
        )
        assert ended.returncode == 0, f"RUN {step.text}\n{ended.stdout}\n{ended.stderr}"
