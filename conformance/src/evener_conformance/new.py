"""``evener new backend NAME`` and ``evener new model NAME``: a package that works as it is, to start from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from evener.cli.command import Command
from evener.errors import ConfigError, did_you_mean
from evener.plugins.discover import NAME
from evener_conformance.core_version import check_core_version

#: Kinds of package, and what to type in a new one.
KINDS = {
    "backend": ("pip install -e .", "{NAME}_PRETEND=1 evener doctor --backend {name}",
                "{NAME}_PRETEND=1 evener conformance --backend {name}",
                "{NAME}_PRETEND=1 evener explain MODEL --backend {name}   # a folder with a config.json is enough"),
    "model": ("pip install -e '.[test]'", "evener models", "pytest",
              "evener explain MODEL   # a folder whose config.json names {Class}ForCausalLM"),
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Write the package and say what to type in it."""
    command = Command("new", "Write a package that works as it is: new backend NAME, or new model NAME.", False,
                      "backend|model NAME")  # fmt: skip
    command.option("--into", metavar="FOLDER", default=".", help="where its folder goes")
    arguments, words = command.parse(argv)
    check_core_version()
    if len(words) != 2:
        raise ConfigError("evener new needs a kind and a name: evener new backend NAME, or evener new model NAME")
    kind, name = words
    if kind not in KINDS:
        raise ConfigError(f"evener new knows no kind {kind!r}{did_you_mean(kind, KINDS)}")
    folder = write(kind, name, Path(arguments.into))
    print(f"{folder} is a package that works as it is; now type (without a network, pip's --no-deps and "
          f"--no-build-isolation too):\n\n  cd {folder}")  # fmt: skip
    for line in KINDS[kind]:
        print("  " + line.format(**template_variables(name)))
    return 0


def write(kind: str, name: str, into: Path) -> Path:
    """Write ``evener-<kind>-<name>`` below ``into``; returns its folder.

    Raises:
        ConfigError: the name cannot be a package's, is taken by one that is installed, or the folder is there already.
    """
    if not NAME.fullmatch(name) or not name[0].isalpha():
        raise ConfigError(f"{name!r} cannot be a package's name; use lower case letters, digits, - and _, "
                          "a letter first")  # fmt: skip
    _check_name_is_free(kind, name)
    folder = into / f"evener-{kind}-{name}"
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} is there already; name another with --into FOLDER, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}; name another with --into FOLDER") from error
    for path, text in render(kind, name):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def render(kind: str, name: str) -> Iterator[tuple[str, str]]:
    """The package's files: path below its folder, and text."""
    import jinja2

    rules = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    words = template_variables(name)
    top = Path(__file__).parent / "templates" / kind
    for path in sorted(top.rglob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        place = path.relative_to(top).as_posix().removesuffix(".jinja")
        # A wheel of ours holds no folder of tests.
        place = place.replace(f"evener_{kind}/", f"evener_{kind}_{words['module']}/").replace("oracle/", "tests/")
        yield place, rules.from_string(source).render(words)


def template_variables(name: str) -> dict[str, str]:
    """What a template calls the package: ``my-chip`` → ``my_chip``, ``MY_CHIP``, ``MyChip``, ``My-chip``."""
    parts = re.split("[-_]+", name.strip("-_"))
    module = "_".join(parts)
    return {
        "name": name, "module": module, "NAME": module.upper(), "Class": "".join(p.capitalize() for p in parts),
        "Name": name.capitalize(),
    }  # fmt: skip


def _check_name_is_free(kind: str, name: str) -> None:
    from evener.plugins.discover import installed_catalog

    group = {"backend": "evener.backends", "model": "evener.plugins"}[kind]
    for package in installed_catalog().in_group(group):
        if package.name == name:
            raise ConfigError(f"{package.distribution} is installed and has the name {name!r}; choose another")
