"""Keys and their bounds, from a file and the settings."""

from pathlib import Path

import pytest

from ropewalk.server.access.allowance import KeyMetrics
from ropewalk.server.access.key_ring import KeyRing
from ropewalk.server.access.keys import (
    UNNAMED,
    KeyBounds,
    KeyChanges,
    KeyTable,
    changes_between,
    named_key,
)
from ropewalk.server.metrics import MetricFactory
from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.startup.gate import key_table_of


def table(tmp_path: Path, lines: str, **flags: str) -> KeyTable:
    """The keys of a file with these lines."""
    path = tmp_path / "keys"
    path.write_text(lines)
    return key_table_of(load_settings({"api_key_file": str(path), **flags}))


def ring_of(found: KeyTable) -> KeyRing:
    """A ring with metrics of its own."""
    return KeyRing(found, KeyMetrics(MetricFactory()))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("alice:secret", ("alice", "secret")),
        ("alice: secret:with:colons", ("alice", "secret:with:colons")),
        ("plain-key", (UNNAMED, "plain-key")),
        ("unnamed:a/b:c", (UNNAMED, "a/b:c")),
        ("x" * 64 + ":rest", ("x" * 64, "rest")),
    ],
)
def test_a_line_has_a_name_or_is_a_key(line: str, expected: tuple[str, str]) -> None:
    """A name has up to 64 letters, digits, points, hyphens and underscores."""
    assert named_key(line) == expected


def test_comments_and_empty_lines_are_no_keys(tmp_path: Path) -> None:
    """A comment would otherwise be a key that everybody can guess."""
    ring = ring_of(table(tmp_path, "# old keys below\n\n  # alice:gone\nalice:a#1\r\n"))
    assert len(ring.table.keys) == 1
    assert ring.find("a#1") is not None
    for comment in ("# old keys below", "# alice:gone", "gone", "#"):
        assert ring.find(comment) is None
    with pytest.raises(SettingsError, match="contains no key"):
        table(tmp_path, "# nothing else\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a b:secret", "the name before the colon must be up to 64 letters"),
        ("x" * 65 + ":secret", "the name before the colon must be up to 64 letters"),
        ("x:secret two", "a key must be one or more printable ASCII characters without spaces"),
        ("x:secret\u00e9", "a key must be one or more printable ASCII characters without spaces"),
        ("x: ", "there must be a key after the colon"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    """The sentence names the file and the line, and holds nothing of the line."""
    with pytest.raises(SettingsError) as raised:
        table(tmp_path, f"# comment\nalice:a\n{line}\n")
    told = str(raised.value)
    assert told.startswith(f"api_key_file: {tmp_path / 'keys'}, line 3: {message}")
    assert "secret" not in told
    assert "\n" not in told


def test_keys_are_found_by_name_and_two_keys_may_share_one(tmp_path: Path) -> None:
    """Two keys of one name serve while one replaces the other."""
    ring = ring_of(table(tmp_path, "alice:old\nalice:new\nbob:b\nplain\n"))
    names = {key: found and found.name for key in ("old", "new", "b") if (found := ring.find(key))}
    assert names == {"old": "alice", "new": "alice", "b": "bob"}
    assert ring.find("old") is ring.find("new")
    unnamed = ring.find("plain")
    assert unnamed is not None
    assert unnamed.name == UNNAMED
    for wrong in ("alice:old", "ol", "old ", "", "alice"):
        assert ring.find(wrong) is None


def test_no_key_is_kept_or_shown(tmp_path: Path) -> None:
    """Only digests are held, and they are in no text of the table."""
    found = table(tmp_path, "alice:secret-of-alice\n")
    assert "secret" not in repr(found)
    assert str(found.keys[0].digest) not in repr(found)


def test_bounds_are_those_of_the_name(tmp_path: Path) -> None:
    """Bounds of `unnamed` hold for all keys without a name together."""
    bounds = '[{"name": "alice", "max_running": 2}, {"name": "unnamed"}]'
    found = table(tmp_path, "alice:a\nplain\n", keys=bounds)
    assert found.bounds == {"alice": KeyBounds(2, None), UNNAMED: KeyBounds()}


@pytest.mark.parametrize(
    ("lines", "bounds", "message"),
    [
        ("alice:a", '[{"name": "bob"}]', "keys: bob has no key, add a line `bob:KEY`"),
        ("alice:a", '[{"name": "alice"}, {"name": "alice"}]', "name must be given once"),
        ("alice:a", '[{"name": "alice", "max_runing": 1}]', "Did you mean `max_running`"),
        ("alice:a", '[{"name": "alice", "max_running": 0}]', "keys: alice: max_running: "),
        ("alice:a\nbob:a", "[]", "api_key_file: alice and bob have the same key"),
        ("alice:a", '[{"name": "web site"}]', "keys: name must be up to 64 letters, digits"),
        ("\n".join(f"n{i}:k{i}" for i in range(201)), "[]", "at most 200 different names, got 201"),
    ],
)
def test_a_wrong_file_or_bound_is_one_sentence(
    tmp_path: Path, lines: str, bounds: str, message: str
) -> None:
    """The sentence names the setting, the entry and the limit, and never the key."""
    with pytest.raises(SettingsError) as raised:
        table(tmp_path, lines, keys=bounds)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_replaced_table_forgets_names_and_their_series(tmp_path: Path) -> None:
    """A name that stays keeps its allowance, because its requests may run."""
    factory = MetricFactory()
    ring = KeyRing(table(tmp_path, "alice:a\nbob:b"), KeyMetrics(factory))
    kept = ring.find("a")
    ring.replace(table(tmp_path, "alice:a2\ncarol:c"))
    assert ring.find("a2") is kept
    assert ring.find("a") is None
    assert ring.find("b") is None
    labels = {
        sample.labels["key"] for metric in factory.registry.collect() for sample in metric.samples
    }
    assert labels == {"alice", "carol"}


def test_changes_are_told_by_name(tmp_path: Path) -> None:
    """Another key, one key more and other bounds are changes; another order is none."""
    before = table(tmp_path, "alice:a\nbob:b\ncarol:c\ndave:d\ndave:e\neve:f\n")
    bounds = '[{"name": "bob", "max_running": 1}]'
    after = table(tmp_path, "dave:e\ndave:d\nnew:n\nalice:a2\nbob:b\neve:f\neve:g\n", keys=bounds)
    found = changes_between(before, after)
    assert found == KeyChanges(("new",), ("alice", "bob", "eve"), ("carol",))
    assert changes_between(after, after) == KeyChanges((), (), ())
