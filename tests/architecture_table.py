"""The table of architectures in model_runner/README.md, made from the registry. `make tables` writes it."""

from __future__ import annotations

from pathlib import Path

from protos.architectures import REGISTRY

README = Path(__file__).parents[1] / "model_runner" / "README.md"
BEGIN = "<!-- begin architectures: `make tables` -->\n"
END = "<!-- end architectures -->\n"


def with_table(text: str) -> str:
    """The text, with the table of today between its marks."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    lines = ["| architecture | backend | what sets it apart | not supported, and refused |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {row.backend} | {row.about} | {row.limits} |" for name, row in REGISTRY.items()]
    return head + BEGIN + "\n".join(lines) + "\n" + END + tail


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
