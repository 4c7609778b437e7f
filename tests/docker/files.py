"""The files of docker/: YAML, patches of the manifest, and the cluster's own schemas."""

import copy
from pathlib import Path
from typing import Any

import yaml

from tests.servers.programs import missing

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"


def read(name: str) -> Any:
    """Return a YAML file of docker/."""
    return yaml.safe_load((DOCKER / name).read_text(encoding="utf-8"))


def objects_of(name: str) -> list[dict[str, Any]]:
    """Return the objects of a manifest in docker/."""
    return list(yaml.safe_load_all((DOCKER / name).read_text(encoding="utf-8")))


OBJECTS = {each["kind"]: each for each in objects_of("kubernetes.yaml")}


def patched(whole: Any, patch: Any) -> Any:
    """Return an object after a strategic merge patch.

    Parts of a list with the same name are merged.
    """
    if isinstance(patch, dict) and isinstance(whole, dict):
        merged = {**whole, **{name: patched(whole.get(name), each) for name, each in patch.items()}}
        if "type" in patch and patch["type"] != whole.get("type"):
            return patch  # another strategy keeps nothing of the one before
        return merged
    if isinstance(patch, list) and isinstance(whole, list) and "name" in patch[0]:
        by_name = {each["name"]: each for each in whole}
        for each in patch:
            by_name[each["name"]] = patched(by_name.get(each["name"]), each)
        return list(by_name.values())
    return copy.deepcopy(patch)


def check_objects(*objects: dict[str, Any]) -> None:
    """Validate objects by the schemas of the newest known version, which refuse unknown fields."""
    try:
        import kubernetes_validate
    except ImportError:
        missing("kubernetes-validate")
    newest = kubernetes_validate.latest_version()
    for each in objects:
        assert newest.startswith(kubernetes_validate.validate(each, newest, strict=True))
