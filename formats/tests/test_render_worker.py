"""The render process's loop, in this process."""

from __future__ import annotations

import io
import json

import jinja2
import pytest

from evener_formats.chat import render_worker, template


def test_only_the_templates_that_were_used_last_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_template(source: str) -> jinja2.Template:
        compiled.append(source)
        return template.compile_template(source)

    monkeypatch.setattr(render_worker, "compile_template", compile_template)
    asked = ["a", "a", *"bcdefgh", "a", "i", "j", "b", "a"]
    fields = {"messages": [], "continue_final_message": False, "variables": {}}
    lines = [json.dumps({"template": source, **fields}).encode() + b"\n" for source in asked]
    answers = io.BytesIO()
    render_worker.serve(io.BytesIO(b"".join(lines)), answers, 1 << 30, 60.0)
    assert [json.loads(line)["text"] for line in answers.getvalue().splitlines()] == asked
    assert compiled == [*"abcdefgh", "i", "j", "b"]
