"""Features of installed packages that have one part in the controller, one in each worker and perhaps one in the front
end: connectors, adapters (LoRA), and commands, which are work between steps other than requests. The configuration
chooses them; the engine knows only their interfaces.

A package announces commands in ``Descriptor.engine_commands``, as a class with static functions. Only packages that are
pinned to their core's version can: they work on the objects of the engine itself. ::

    front(llm: LLM) -> Any
    async_front(llm: AsyncLLM) -> Any
    run(controller: Controller, order: Command) -> list[FromController]
    execute(worker: Worker, order: Command) -> PendingStep

A front end sends a ``Command`` with the ``command`` method of its engine; a name that nobody announced is answered with
an error. ``run`` carries it out in the controller, between two messages. It returns events for the front end: first
those of steps that it ran itself, last the ``CommandDone``. If it needs the workers, it calls ``Executor.command``;
``execute`` then carries out the same command on each rank, while no step is in flight, and returns a step that is ready
and has ``every_rank`` set.
"""

from __future__ import annotations

from typing import Any

from evener.config.schema import Config
from evener.errors import CheckpointError, ConfigError
from evener.plugins.discover import installed_catalog


def find_connector(config: Config) -> Any | None:
    """The connector's class, see ``evener.contracts.connector``; None: the engine has none. The option ``kv_NAME`` of
    its package asks for connector NAME, and ``infer.kv_host_memory`` for "host". Where two are asked for, one class
    serves both, announced under both names: ``host+transfer``.

    Raises:
        ConfigError: no installed package has it, or the pair; or there is no prefix cache.
    """
    catalog, options = installed_catalog(), config.options
    names = [(name, f"{each.package}.kv_{name}") for name, each in catalog.lazy_imports("connector").items()
             if options.get(each.package, {}).get(f"kv_{name}")]  # fmt: skip
    names += [("host", "infer.kv_host_memory")] * (config.infer.kv_host_memory is not None)
    joint = "+".join(sorted(name for name, _ in names))
    if names and not (config.infer.prefix_cache and (len(names) < 2 or joint in catalog.lazy_imports("connector"))):
        raise ConfigError(f"{names[0][1]}: set infer.prefix_cache=true too, and nothing else that keeps its blocks")
    return catalog.need("connector", joint, names[0][1], "evener-offload") if names else None


def find_adapters(wanted: object) -> Any | None:
    """The class that serves adapters (LoRA), see ``evener.contracts.adapters``; None if it is not ``wanted``.

    Raises:
        ConfigError: no installed package has one.
    """
    what = "infer.max_loras or infer.lora_modules"
    return installed_catalog().need("maker of adapters", "", what, "evener-generation") if wanted else None


def find_commands(name: str) -> Any:
    """The class of the commands of this name.

    Raises:
        CheckpointError: no installed package has it.
    """
    catalog, what = installed_catalog(), f"changing {name} of a running engine"
    return catalog.need("engine command", name, what, "evener-offload", CheckpointError)
