"""``kv_transfer_params``: a prompt is computed by one server and answered by another, as routers made for vLLM ask.

A router sends a request with ``do_remote_decode`` and one token to the first server. It sends the same request to the
second server, with the ``kv_transfer_params`` that the first one answered. The tokens of the prompt say which blocks
are meant, so the list of block ids, which other engines need, is empty.
"""

from __future__ import annotations

from typing import Any

from evener.errors import RequestError
from evener_server.protocol import TokenOutputs, TransferParams
from evener_server.service import Service

#: Fields that say nothing if this server takes part in no transfers.
_FIELDS = ("do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_block_ids", "remote_host",
           "remote_port", "remote_request_id", "tp_size")  # fmt: skip


def own_address(service: Service) -> tuple[str, int] | None:
    """Where other servers fetch blocks from this one; None: they cannot."""
    address = service.info.setting("offload.kv_transfer").value
    if not address:
        return None
    host, _, port = str(address).rpartition(":")
    return host, int(port)


def asked_transfer(service: Service, body: TokenOutputs) -> str:
    """What the engine is told, see ``SamplingParams.transfer``; "": nothing.

    Raises:
        RequestError: the fields contradict each other, or the request has several answers.
    """
    params = body.kv_transfer_params
    if params is None or own_address(service) is None or not (params.do_remote_decode or params.do_remote_prefill):
        return ""
    if params.do_remote_decode and params.do_remote_prefill:
        message = "do_remote_decode and do_remote_prefill contradict each other; send one of them"
        raise RequestError(message, "kv_transfer_params")
    if body.samples != 1 or body.beams is not None or body.prompt_count != 1:
        raise RequestError("with kv_transfer_params a request has one prompt and one answer", "kv_transfer_params")
    if params.do_remote_decode:
        return "hold"
    if params.remote_host is None or params.remote_port is None:
        message = "do_remote_prefill needs remote_host and remote_port, as the other server answered them"
        raise RequestError(message, "kv_transfer_params")
    return f"{params.remote_host}:{params.remote_port}/{params.remote_request_id or ''}"


def unused_fields(service: Service, body: TokenOutputs) -> list[str]:
    """Fields of ``kv_transfer_params`` that have no effect on this server."""
    params = body.kv_transfer_params
    if params is None or own_address(service) is not None:
        return []
    return [f"kv_transfer_params.{name}" for name in _FIELDS if name in params.model_fields_set]


def transfer_answer(service: Service, params: TransferParams | None, request_id: str) -> dict[str, Any]:
    """The field of the response, with which another server goes on; nothing if that was not asked for."""
    address = own_address(service)
    if params is None or not params.do_remote_decode or address is None:
        return {}
    answer = {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": service.fingerprint,
        "remote_block_ids": [], "remote_host": address[0], "remote_port": address[1], "remote_request_id": request_id,
    }  # fmt: skip
    return {"kv_transfer_params": answer}
