"""``evener completion SHELL``: a script that completes commands, options, keys and values in a shell.

The script has the words of what is installed now, from the same tables as ``evener config --keys``. Tools such as
``argcomplete`` and ``shtab`` read argparse parsers, which do not know our keys.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Mapping

from evener.cli.command import Command
from evener.cli.main import BUILTIN_NAMES, find_command, installed_commands
from evener.config.packages import Packages
from evener.config.schema import key_specs
from evener.errors import ConfigError, did_you_mean
from evener.key_spec import KeySpec

#: Commands that take a model and keys.
_MODEL_COMMANDS = frozenset({"run", "chat", "serve", "explain", "config"})


def main(argv: list[str]) -> int:
    """Print the script."""
    command = Command("completion", "Print a completion script for bash, zsh or fish.", False, "bash|zsh|fish")
    command.option("--json", action="store_true", help="print the words as JSON instead of a script")
    arguments, words = command.parse(argv)
    if arguments.json:
        print(json.dumps({"commands": commands(), "keys": keys()}, indent=2))
        return 0
    if len(words) != 1 or words[0] not in _SCRIPTS:
        given = words[0] if words else ""
        raise ConfigError(f"evener completion needs a shell, not {given!r}{did_you_mean(given, _SCRIPTS)} "
                          'For bash: eval "$(evener completion bash)"')  # fmt: skip
    print(_SCRIPTS[words[0]](commands(), keys()), end="")
    return 0


def commands() -> dict[str, list[str]]:
    """Every command that is installed, with its own options."""
    return {name: _options(name) for name in sorted({*BUILTIN_NAMES, *installed_commands()})}


def _options(name: str) -> list[str]:
    """Read from the help text, so that it works for commands of packages too."""
    if name == "completion":
        return ["bash", "zsh", "fish", "--json"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        find_command(name)(["--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]+(?![\w.])", out.getvalue())) - {"--key"})


def keys() -> dict[str, list[str]]:
    """Every key, with its named values."""
    packages = Packages()
    specs: dict[str, KeySpec] = {**key_specs(), **packages.options}
    found = {key: _values(spec) for key, spec in specs.items()}
    return {**found, **{f"ops.{op}": ["reference"] for op in sorted(packages.ops)}}


def _values(spec: KeySpec) -> list[str]:
    words = [str(choice) for choice in spec.choices]
    words += ["true", "false"] if spec.kind == "bool" else []
    words += (["auto"] if spec.auto else []) + (["none"] if spec.none else [])
    return list(dict.fromkeys(words))


def _bash(own: Mapping[str, list[str]], keyed: Mapping[str, list[str]]) -> str:
    options = "\n".join(f"    {name}) words='{' '.join(words)}' ;;" for name, words in own.items())
    values = "\n".join(f"    {key}) words='{' '.join(words)}' ;;" for key, words in keyed.items() if words)
    return f"""# bash completion of evener; eval "$(evener completion bash)"
_evener() {{
  local line="${{COMP_LINE:0:COMP_POINT}}" word words command="${{COMP_WORDS[1]}}"
  word="${{line##*[[:space:]]}}"
  COMPREPLY=()
  if [[ $line != *[[:space:]]*[[:space:]]* ]]; then
    COMPREPLY=($(compgen -W '{" ".join(own)}' -- "$word"))
    return
  fi
  if [[ $word == *=* && {_condition("$command", "||")} ]]; then
    case "${{word%%=*}}" in
{values}
    *) words='' ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{word#*=}}"))
    [[ -z $words ]] && COMPREPLY=($(compgen -f -- "${{word#*=}}"))
    return
  fi
  case "$command" in
{options}
    *) words='' ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  if [[ {_condition("$command", "||")} ]]; then
    compopt -o nospace 2>/dev/null
    COMPREPLY+=($(compgen -S= -W '{" ".join(keyed)}' -- "$word") $(compgen -f -- "$word"))
  fi
}}
complete -F _evener evener
"""


def _condition(variable: str, joint: str) -> str:
    inner = f" {joint} ".join(f"{variable} == {name}" for name in sorted(_MODEL_COMMANDS))
    return f"( {inner} )"


def _zsh(own: Mapping[str, list[str]], keyed: Mapping[str, list[str]]) -> str:
    # zsh can run bash completions.
    return "#compdef evener\nautoload -U +X bashcompinit && bashcompinit\n" + _bash(own, keyed)


def _fish(own: Mapping[str, list[str]], keyed: Mapping[str, list[str]]) -> str:
    lines = ["# fish completion of evener; evener completion fish | source"]
    lines += [f"complete -c evener -f -n __fish_use_subcommand -a {name}" for name in own]
    for name, words in own.items():
        seen = f"'__fish_seen_subcommand_from {name}'"
        lines += [
            f"complete -c evener -n {seen} -l {word[2:]}" if word.startswith("--") else
            f"complete -c evener -f -n {seen} -a {word}" for word in words
        ]  # fmt: skip
    seen = f"'__fish_seen_subcommand_from {' '.join(sorted(_MODEL_COMMANDS))}'"
    for key, values in keyed.items():
        typed = " ".join(f"{key}={value}" for value in values) or f"{key}="
        lines.append(f"complete -c evener -n {seen} -a '{typed}'")
    return "\n".join(lines) + "\n"


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
