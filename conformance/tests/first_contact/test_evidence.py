"""Evidence files from strangers: what is checked before one counts, and the record that it becomes."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import importlib_metadata
import msgspec
import pytest

from evener.errors import ConfigError
from evener_conformance.first_contact.evidence_command import main
from evener_conformance.first_contact.evidence_file import FORMAT, LARGEST, Evidence, Part, Wheel, read, write
from evener_conformance.first_contact.levels import reached, read_records
from evener_conformance.first_contact.parts import PARTS
from evener_conformance.first_contact.private_data import Redactor
from evener_conformance.first_contact.wheel import installed_wheel, wheel_hash

KIT = importlib_metadata.version("evener-conformance")


def evidence(**changes: object) -> Evidence:
    parts = tuple(Part(each.name, "passed", 1.0, counts={"passed": 3} if each.area else {}) for each in PARTS)
    plain = Evidence(
        format=FORMAT, backend="chip", wheel=Wheel("evener-backend-chip", "1.0", "ab" * 32, 7, False), level="L5",
        date="2026-11-23", seed=1, simulated=False, pretended=False,
        versions={"evener-conformance": KIT, "torch": "2.13"},
        device={"name": "Chip 910"}, command="evener first-contact --backend chip", parts=parts,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "e.json", evidence())
    return tmp_path / "e.json"


def add(file: Path, folder: Path, *words: str) -> int:
    folder.mkdir(exist_ok=True)
    return main(["add", str(file), "--to", str(folder), *words])


def test_an_evidence_file_becomes_a_record_that_gives_the_backend_its_level(file: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    assert add(file, results) == 0
    (record,) = read_records([results / "support-chip.jsonl"])
    assert record["level"] == "L5" and record["outcome"] == "passed: 12 parts, 27 cases"
    assert record["wheel"] == "ab" * 32 and f"evener-conformance {KIT}" in record["software"]
    assert (results / record["file"]).read_bytes() == file.read_bytes()
    found = reached([record], "evener-backend-chip")
    assert (found.highest, found.date, found.devices) == ("L5", "2026-11-23", ("Chip 910",))


def test_added_twice_it_is_one_record_and_a_newer_file_takes_its_place(file: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    add(file, results)
    add(file, results)
    write(tmp_path / "newer.json", evidence(date="2026-12-01"))
    add(tmp_path / "newer.json", results)
    assert [each["date"] for each in read_records([results / "support-chip.jsonl"])] == ["2026-12-01"]


def test_records_of_other_checks_stay(file: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    other = {
        "subject": "evener-backend-chip",
        "check": "schemas",
        "outcome": "passed",
        "level": "L1",
        "date": "2026-11-01",
    }
    (results / "support-chip.jsonl").write_text(json.dumps(other) + "\n")
    add(file, results)
    found = reached(read_records([results / "support-chip.jsonl"]), "evener-backend-chip")
    assert found.levels == ("L1", "L5")
    assert (results / "support-chip.jsonl").read_text().splitlines()[0] == json.dumps(other)


def test_a_record_of_a_run_without_the_hardware_says_what_was_there_in_its_place(tmp_path: Path) -> None:
    there = {"name": "a host", "variant": "chip 2"}
    write(tmp_path / "e.json", evidence(pretended=True, level="L3", device=there))
    add(tmp_path / "e.json", tmp_path / "results")
    assert read_records([tmp_path / "results/support-chip.jsonl"])[0]["device"] == "a host in place of chip 2"


def test_a_run_that_did_not_pass_is_kept_and_gives_no_level(tmp_path: Path) -> None:
    parts = tuple(Part(p.name, "failed" if p.name == "model" else "passed", 1.0) for p in PARTS)
    write(tmp_path / "e.json", evidence(parts=parts, level=""))
    add(tmp_path / "e.json", tmp_path / "results")
    records = read_records([tmp_path / "results/support-chip.jsonl"])
    assert records[0]["outcome"] == "failed: model; 0 cases passed"
    assert reached(records, "evener-backend-chip").highest == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"simulated": True}, "its device is simulated"),
        ({"pretended": True}, "its device is simulated or was not asked for"),
        ({"parts": ()}, "its part 'packages' is not there"),
        ({"parts": tuple(Part(p.name, "passed", 1.0, counts={"failed": 1}) for p in PARTS)}, "did not pass"),
        ({"versions": {}}, "was made with evener-conformance of no version"),
        ({"versions": {"evener-conformance": "0.0.1"}}, "pip install evener-conformance==0.0.1"),
        ({"wheel": Wheel("evener-backend-chip", "1.0", "", 0, False)}, "names no hash of the backend's wheel"),
        ({"backend": "../../etc"}, "is no name of a backend"),
    ],
)
def test_a_claim_that_the_parts_do_not_show_is_refused(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    write(tmp_path / "e.json", evidence(**changes))
    with pytest.raises(ConfigError, match=words):
        add(tmp_path / "e.json", tmp_path / "results")
    assert not (tmp_path / "results/support-chip.jsonl").exists()


def test_an_edited_file_is_refused(file: Path, tmp_path: Path) -> None:
    file.write_text(file.read_text().replace("Chip 910", "Chip 911"))
    with pytest.raises(ConfigError, match="was changed after it was written"):
        add(file, tmp_path / "results")


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b'{"format": "1"}', b'{"format": 1}', b"\xff\xfe", b'{"format": 99}']
)
def test_something_other_than_an_evidence_file_is_refused_with_what_to_do(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "e.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"evener first-contact|reads 1"):
        read(tmp_path / "e.json")


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "e.json").open("wb") as file:
        file.truncate(LARGEST * 100)
    with pytest.raises(ConfigError, match="larger than 8 MiB"):
        read(tmp_path / "e.json")


def test_terminal_escapes_in_a_file_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "e.json", evidence(device={"name": "\x1b[31mChip"}))
    with pytest.raises(ConfigError, match="a text that no run writes"):
        read(tmp_path / "e.json")


def test_a_line_that_is_not_a_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "support-x.jsonl").write_text('{"subject": "x"}\n{"subject": 7}\n')
    with pytest.raises(ConfigError, match="line 2 is no record"):
        read_records([tmp_path / "support-x.jsonl"])


def test_the_hash_of_an_installation_is_that_of_its_wheel_and_a_changed_file_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = _write_wheel(tmp_path / "chip-1.0-py3-none-any.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # What pip writes beside the wheel's own files.
    with (site / "chip-1.0.dist-info/RECORD").open("a") as file:
        file.write(
            "chip-1.0.dist-info/INSTALLER,sha256=AAAA,4\nchip/__pycache__/x.pyc,,\n../../bin/chip,sha256=BBBB,5\n"
        )
    monkeypatch.syspath_prepend(str(site))
    found = installed_wheel("chip")
    assert (found.sha256, found.changed, found.files) == (wheel_hash(wheel), False, 2)
    (site / "chip/x.py").write_text("other")
    assert installed_wheel("chip").changed


def test_a_file_of_another_wheel_is_refused(file: Path, tmp_path: Path) -> None:
    wheel = _write_wheel(tmp_path / "chip-1.0-py3-none-any.whl")
    with pytest.raises(ConfigError, match="from another wheel"):
        add(file, tmp_path / "results", "--wheel", str(wheel))


def _write_wheel(path: Path) -> Path:
    from base64 import urlsafe_b64encode
    from hashlib import sha256

    files = {
        "chip/x.py": b"x = 1\n",
        "chip-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: chip\nVersion: 1.0\n",
    }
    lines = [
        f"{n},sha256={urlsafe_b64encode(sha256(d).digest()).rstrip(b'=').decode()},{len(d)}" for n, d in files.items()
    ]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr("chip-1.0.dist-info/RECORD", "\n".join([*lines, "chip-1.0.dist-info/RECORD,,"]) + "\n")
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("open /home/alice/models/x.py:3 failed", "open <path>/x.py:3 failed"),
        ("/usr/lib/python3/site-packages/torch_chip/ops.py:7", "torch_chip/ops.py:7"),
        ("node17 said no to alice", "<name> said no to <name>"),
        ("at 10.1.2.3 and fe80::1ff:fe23 and 02:42:ac:11:00:02", "at <address> and <address> and <address>"),
        ("GPU-8f1c2b3a-1111-2222-3333-444455556666 Serial Number: 0321", "<id> Serial Number: <id>"),
        ("mail bob@example.org, https://example.org/a?b=c", "mail <address>, <address>"),
        ("\x1b[31mred\x1b[0m\x07", "?red??"),
        ("versions 2.13.0 and 1.2.3.4.5, [1, 2], 3/4", "versions 2.13.0 and 1.2.3.4.5, [1, 2], 3/4"),
    ],
)
def test_private_data_is_removed_and_the_rest_is_left(text: str, expected: str) -> None:
    assert Redactor(("alice", "node17"))(text) == expected


def test_of_a_long_text_the_end_is_kept() -> None:
    assert Redactor(())("a" * 10_000 + "the end", 100).endswith("the end")
    assert len(Redactor(())("a" * 10_000, 100)) == 100
