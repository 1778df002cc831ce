"""Whether the tests over vendors' own software have to run: their packages or the contracts changed since they passed.

    python scripts/vendor_tests.py changed   # exit code 0 and the changed files' folders, or 1 if nothing changed
    python scripts/vendor_tests.py record    # after they passed: remember what they ran on

They need environments of hundreds of megabytes (torch_npu's wheel, Huawei's compilers), so ``.ci/run`` runs some of
them, and only then: ``make test-vendors-changed``. ``make test-vendors`` runs all and writes the record, which is
``docs/results/vendor-tests.json``.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs/results/vendor-tests.json"
#: Folders whose files decide: the vendors' packages, what they share or load, and the contracts.
WATCHED = (
    "backends/ascend", "backends/hygon", "backends/muxi", "backends/gcu", "backends/parts", "backends/triton/src",
    "core/src/evener/contracts",
)  # fmt: skip


def digests(root: Path = ROOT) -> dict[str, str]:
    """For each watched folder a digest of the names and contents of its tracked files, without prose."""
    found = {}
    for folder in WATCHED:
        done = subprocess.run(["git", "ls-files", folder], cwd=root, capture_output=True, text=True, check=True)
        names = [n for n in done.stdout.splitlines() if not n.endswith(".md") and (root / n).is_file()]
        whole = hashlib.sha256()
        for name in sorted(names):
            whole.update(name.encode() + b"\0" + hashlib.sha256((root / name).read_bytes()).digest())
        found[folder] = whole.hexdigest()[:16]
    return found


def changed(record: Path = RECORD, root: Path = ROOT) -> list[str]:
    """The folders that differ from the record; all of them if there is none."""
    known = json.loads(record.read_text("utf-8"))["folders"] if record.is_file() else {}
    return [folder for folder, digest in digests(root).items() if known.get(folder) != digest]


def main(argv: Sequence[str]) -> int:
    """See the module."""
    if list(argv) == ["record"]:
        said = {"date": datetime.date.today().isoformat(), "folders": digests()}
        RECORD.write_text(json.dumps(said, indent=1) + "\n", "utf-8")
        return 0
    if list(argv) != ["changed"]:
        print(__doc__, file=sys.stderr)
        return 2
    found = changed()
    print("\n".join(found) or "no vendor's package and no contract changed since the vendors' tests passed")
    return 0 if found else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
