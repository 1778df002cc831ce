"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters (LoRA) that come and go while the server runs.

The fields are those of vLLM's API. An operator allows it with ``server.lora_folder``, below which all adapters lie: a
client must not make the server read any folder that it can read.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import Field

from evener.errors import CheckpointError, RequestError
from evener_server.errors import ApiError
from evener_server.operator_folder import folder_below
from evener_server.protocol import PromptBody
from evener_server.service import Service

_Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapterBody(PromptBody):
    """POST /v1/load_lora_adapter."""

    lora_name: _Name
    #: A folder below ``server.lora_folder``: absolute, or relative to that.
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    #: Replace the adapter of this name; requests that have begun keep it.
    load_inplace: bool | None = None


class UnloadAdapterBody(PromptBody):
    """POST /v1/unload_lora_adapter."""

    lora_name: _Name


async def load_adapter(service: Service, root: str, body: LoadAdapterBody) -> str:
    """Load an adapter; the answer.

    Raises:
        ApiError: 404, there is no such folder below ``root``; 400, it cannot be used.
        RequestError: the name cannot be used, or too many adapters are loaded.
    """
    if body.lora_name in service.own_names:
        raise RequestError(f"lora_name {body.lora_name!r} is a name of the model; choose another", "lora_name")
    folder = folder_below(root, body.lora_path, "lora_path", "server.lora_folder", "adapter_not_found")
    try:
        await asyncio.to_thread(service.llm.adapters.load, body.lora_name, folder, bool(body.load_inplace))
    except CheckpointError as error:
        raise RequestError(str(error), "lora_path") from error
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


async def unload_adapter(service: Service, body: UnloadAdapterBody) -> str:
    """Forget an adapter; the answer.

    Raises:
        ApiError: 404, there is no such adapter.
    """
    if body.lora_name not in service.adapters:
        raise ApiError(404, f"no adapter {body.lora_name!r} is loaded; GET /v1/models lists them", "lora_name",
                       "adapter_not_found")  # fmt: skip
    await asyncio.to_thread(service.llm.adapters.unload, body.lora_name)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."
