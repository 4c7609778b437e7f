"""The tables of the two pages of settings in docs/reference: `python -m tests.settings_page`.

`tests/test_docs.py` holds the page to them.
"""

from ropewalk.server.settings.fields import Section, flags_of, unit_of
from ropewalk.server.settings.flags import default_text
from ropewalk.server.settings.load import SECTIONS
from ropewalk.server.settings.route_settings import ROUTE_SECTIONS


def table(section: type[Section]) -> str:
    """One section with its heading."""
    lines = [
        f"## {section.__doc__}",
        "",
        "| flag | unit or form | default | |",
        "|---|---|---|---|",
    ]
    for name, field in section.model_fields.items():
        flags = [*(["MODEL"] if name == "model" else []), *flags_of(name, field)]
        shown = ", ".join(f"`{flag}`" for flag in flags)
        default = f"`{default_text(field)}`" if default_text(field) else ""
        lines.append(f"| {shown} | {unit_of(field)} | {default} | {field.description} |")
    return "\n".join(lines)


def main() -> None:
    """Print all of them; behind them, those of router-settings.md."""
    pages = [*map(table, SECTIONS), *map(table, ROUTE_SECTIONS)]
    print("\n\n".join(pages))  # noqa: T201


if __name__ == "__main__":
    main()
