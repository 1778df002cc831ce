"""What the operator's pages promise to be complete is complete."""

from __future__ import annotations

import re

from docs_blocks import DOCS

from evener import errors


def test_every_error_class_has_a_place_in_troubleshooting() -> None:
    text = (DOCS / "troubleshooting.md").read_text("utf-8")
    shown = {name for heading in re.findall(r"^### (.+)$", text, re.MULTILINE) for name in heading.split(", ")}
    classes = {name for name, value in vars(errors).items()
               if isinstance(value, type) and issubclass(value, errors.EvenerError)}  # fmt: skip
    assert shown == classes


def test_the_operators_pages_lead_to_each_other() -> None:
    guide = (DOCS / "operator.md").read_text("utf-8")
    for name in ("serving", "configuration", "troubleshooting", "from-other-engines", "performance"):
        assert f"({name}.md)" in guide
