"""The tables of docs/settings.md and docs/router.md: `python -m tests.settings_page`.

`tests/test_docs.py` holds the page to them.
"""

from ropewalk.server.settings.fields import Section, unit_of
from ropewalk.server.settings.flags import default_text
from ropewalk.server.settings.foreign_flags import ALIASES, REFUSED
from ropewalk.server.settings.load import SECTIONS
from ropewalk.server.settings.problems import variable_of
from ropewalk.server.settings.route_settings import ROUTE_SECTIONS


def table(section: type[Section]) -> str:
    """One section with its heading."""
    lines = [
        f"## {section.__doc__}",
        "",
        "| flag | variable | unit or form | default | |",
        "|---|---|---|---|---|",
    ]
    for name, field in section.model_fields.items():
        flag = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
        default = f"`{default_text(field)}`" if default_text(field) else ""
        lines.append(
            f"| `{flag}` | `{variable_of(name)}` | {unit_of(field)} | {default} | "
            f"{field.description} |"
        )
    return "\n".join(lines)


def foreign_table() -> str:
    """The flags of other servers, and what is done with them."""
    rows: dict[str, list[str]] = {}
    for flag, name in ALIASES.items():
        own = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
        rows.setdefault(f"The same as `{own}`.", []).append(flag)
    for flag, sentence in REFUSED.items():
        rows.setdefault(f"Refused: {sentence}", []).append(flag)
    lines = [
        f"| {', '.join(f'`{flag}`' for flag in flags)} | {text} |" for text, flags in rows.items()
    ]
    return "\n".join(["| flags | |", "|---|---|", *lines])


def main() -> None:
    """Print all of them; behind them, those of docs/router.md."""
    pages = [*map(table, SECTIONS), foreign_table(), *map(table, ROUTE_SECTIONS)]
    print("\n\n".join(pages))  # noqa: T201


if __name__ == "__main__":
    main()
