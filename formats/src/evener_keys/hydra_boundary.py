"""Hydra, used only for command lines that need it: config files (``CONFIG_NAME``, ``--config``), and values in its
grammar.

Old spellings are rewritten and keys are checked before Hydra sees them, because Hydra's own message for an unknown key
is misleading. Plain values are quoted, so that paths with ``=``, ``,`` or spaces work; Hydra reads ``[a,b]``,
``{a: 1}`` and quoted text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from evener.config.keys import Override, find_key_spec, flatten
from evener.config.packages import Packages
from evener.errors import ConfigError

_BASE = "evener_base"


def find_file(name: str, folder: Path | None = None) -> Path:
    """The file of ``CONFIG_NAME`` or ``--config``: a path, or a name with or without ``.yaml`` in ``folder`` (default:
    the current one) or in its ``config/``.

    Raises:
        ConfigError: there is none; the message lists the paths.
    """
    folder = Path.cwd() if folder is None else folder
    path = Path(name).expanduser()
    names = [path] if path.suffix == ".yaml" else [path, path.with_name(path.name + ".yaml")]
    tried = [base / candidate for candidate in names for base in (folder, folder / "config")]
    found = next((candidate for candidate in dict.fromkeys(tried) if candidate.is_file()), None)
    if found is None:
        raise ConfigError(
            f"config file {name!r} does not exist; looked for {', '.join(str(each) for each in dict.fromkeys(tried))}"
        )
    if found.suffix != ".yaml":
        raise ConfigError(f"config file {str(found)!r} must end in .yaml; rename it")
    return found


def read_file(path: Path) -> Mapping[str, Any]:
    """Compose the YAML file ``path``: its ``defaults`` list and interpolations are resolved, relative to its folder.

    Raises:
        ConfigError: Hydra or YAML refuses the file.
    """
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(path.parent.resolve())):
            tree = OmegaConf.to_container(compose(config_name=path.stem), resolve=True, throw_on_missing=True)
    except Exception as error:  # Hydra lets errors of YAML, OmegaConf and its own grammar through
        raise ConfigError(f"config file {str(path)!r} cannot be read: {_first_line(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"config file {str(path)!r} is not a mapping of keys to values")
    return {str(key): value for key, value in tree.items()}


def compose_flat(base: Iterable[Override], typed: Iterable[Override], packages: Packages) -> dict[str, Any]:
    """Dotted keys to values: ``base``, overridden by ``typed``, whose values are read with Hydra's grammar.

    Raises:
        ConfigError: a value that Hydra cannot read.
    """
    tree: dict[str, Any] = {}
    for override in base:
        section, _, name = override.key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = override.value
    ConfigStore.instance().store(name=_BASE, node=OmegaConf.create(tree))
    expressions = {override: _expression(override, packages) for override in typed}
    with initialize_config_module(version_base="1.3", config_module="evener.config"):  # faster: walks no stack
        try:
            return _compose(list(expressions.values()))
        except (HydraException, OmegaConfBaseException):
            for override, expression in expressions.items():
                _compose_one(override, expression, packages)
            raise


def _compose(expressions: list[str]) -> dict[str, Any]:
    tree = OmegaConf.to_container(compose(_BASE, expressions), resolve=True)
    return dict(flatten(cast("dict[str, Any]", tree)))


def _compose_one(override: Override, expression: str, packages: Packages) -> None:
    try:
        _compose([expression])
    except (HydraException, OmegaConfBaseException) as error:
        if find_key_spec(override, packages)[1].secret:
            raise ConfigError(f"{override.key} cannot be read; write it as [KEY,KEY], in quotes") from None
        raise ConfigError(f"{override.original!r} cannot be read: {_first_line(error)}") from error


def _expression(override: Override, packages: Packages) -> str:
    if not isinstance(override.value, str):
        return f"++{override.key}={override.value}"
    _, spec = find_key_spec(override, packages)
    structured = override.value.startswith(("[", "{")) and spec.kind == "names"
    quoted = len(override.value) > 1 and override.value[0] in "'\"" and override.value[-1] == override.value[0]
    return f"++{override.key}={override.value if structured or quoted else quote(override.value)}"


def quote(value: str) -> str:
    """``value`` as quoted text in Hydra's grammar: Hydra reads back exactly ``value``."""
    # A backslash is special only before a quote; the closing quote counts too.
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + r"\'", value)
    return "'" + re.sub(r"(\\+)\Z", lambda match: match[1] * 2, escaped) + "'"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
