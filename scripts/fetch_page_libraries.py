"""Fetch the JavaScript libraries of the server's page, at the versions pinned here: ``make page-libraries``.

npm downloads each package; its hash is compared with the one below, and only the files that the page needs are taken.
To update a library, change its version and its hash (``npm view NAME@VERSION dist.integrity``) and run this again.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

WEB = Path(__file__).resolve().parent.parent / "server/src/evener_server/web/libraries"
#: Of one file of a package.
MAX_BYTES = 4 << 20
_FONTS = (
    "AMS-Regular", "Caligraphic-Bold", "Caligraphic-Regular", "Fraktur-Bold", "Fraktur-Regular", "Main-Bold",
    "Main-BoldItalic", "Main-Italic", "Main-Regular", "Math-BoldItalic", "Math-Italic", "SansSerif-Bold",
    "SansSerif-Italic", "SansSerif-Regular", "Script-Regular", "Size1-Regular", "Size2-Regular", "Size3-Regular",
    "Size4-Regular", "Typewriter-Regular",
)  # fmt: skip


@dataclass(frozen=True)
class Library:
    """One package: its name and version at npm, the SHA-512 of its archive in base64, its folder here, and the files
    that are taken: path in the package to path in the folder."""

    package: str
    version: str
    sha512: str
    folder: str
    files: dict[str, str]


LIBRARIES = (
    Library("marked", "18.2.1",
            "ii4bxCTCqqwpT86XZWgJNs+ZnAIZksmLGYMViWA7PDIXYIeNo1x6cDdX3JOip9NM/cI6p8z57FxliACboTruMA==", "marked",
            {"lib/marked.esm.js": "marked.js", "LICENSE": "LICENSE"}),
    Library("dompurify", "3.4.18",
            "ofe3wI/uNm68HInABYFJYqQxRw1EaKAjNdrFVKqjUY+UZurvNd2L/HuQe097s/4RivWiZyP6tT7aoT8atjfhwg==", "dompurify",
            {"dist/purify.min.js": "purify.min.js", "LICENSE": "LICENSE"}),
    Library("@highlightjs/cdn-assets", "11.12.0",
            "KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==", "highlight",
            {"es/highlight.min.js": "highlight.min.js", "LICENSE": "LICENSE"}),
    Library("katex", "0.19.1",
            "jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA==", "katex",
            {"dist/katex.min.js": "katex.min.js", "dist/katex.min.css": "katex.min.css", "LICENSE": "LICENSE",
             **{f"dist/fonts/KaTeX_{name}.woff2": f"fonts/KaTeX_{name}.woff2" for name in _FONTS}}),
)  # fmt: skip
#: For the tests only; not part of the page.
AXE = Library("axe-core", "4.14.1",
              "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==", "axe",
              {"axe.min.js": "axe.min.js"})  # fmt: skip


def main() -> int:
    """Fetch the libraries; 0 if all have the pinned hashes."""
    parser = argparse.ArgumentParser(description="Fetch the JavaScript libraries of the server's page.")
    parser.add_argument("--axe", metavar="FOLDER", type=Path, help="fetch only axe-core, for the tests, into FOLDER")
    axe: Path | None = parser.parse_args().axe
    try:
        if axe is not None:
            if not (axe / "axe" / AXE.version).exists():
                fetch(AXE, axe)
                (axe / "axe" / AXE.version).touch()
            return 0
        for library in LIBRARIES:
            fetch(library, WEB)
            print(f"{library.package} {library.version}")
        (WEB / "versions.json").write_text(json.dumps(versions(), indent=2) + "\n", "utf-8")
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"page libraries: {error}", file=sys.stderr)
        return 1
    return 0


def versions() -> dict[str, str]:
    """The version of each library of the page."""
    return {library.package: library.version for library in LIBRARIES}


def fetch(library: Library, target: Path) -> None:
    """Take the files of ``library`` into its folder under ``target``.

    Raises:
        ValueError: npm is not installed, or the package is another than the pinned one.
        OSError: a file cannot be written.
        subprocess.CalledProcessError: npm could not download it.
    """
    if shutil.which("npm") is None:
        raise ValueError(f"npm fetches {library.package}, and is not installed; type: apt-get install npm")
    with tempfile.TemporaryDirectory() as temp:
        command = ["npm", "pack", "--silent", f"{library.package}@{library.version}"]
        name = subprocess.run(command, cwd=temp, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]
        archive = Path(temp, name)
        found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if found != library.sha512:
            raise ValueError(f"{library.package} {library.version} has the SHA-512 {found}, not {library.sha512}")
        folder = target / library.folder
        with tarfile.open(archive) as files:
            for source, name in library.files.items():
                member = files.getmember(f"package/{source}")
                content = files.extractfile(member)
                if content is None or member.size > MAX_BYTES:
                    raise ValueError(f"{library.package}: {source} is no file of at most {MAX_BYTES} bytes")
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())


if __name__ == "__main__":
    raise SystemExit(main())
