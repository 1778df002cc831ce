"""The FastAPI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, StreamingResponse

from evener.async_llm import AsyncLLM
from evener.errors import EvenerError, OverloadedError
from evener_server import status
from evener_server.adapters import LoadAdapterBody, UnloadAdapterBody, load_adapter, unload_adapter
from evener_server.anthropic.body import ConversationBody, MessagesBody
from evener_server.anthropic.job import ERROR_SCHEMA as ANTHROPIC_ERROR_SCHEMA
from evener_server.anthropic.job import MessageJob, TokenCounter, error_body
from evener_server.api_keys import ApiKeys, KeyCheck
from evener_server.batch import BatchBody, BatchJob
from evener_server.body import BodyLimits, read_object
from evener_server.chat import ChatJob
from evener_server.completions import CompletionJob
from evener_server.decisions import DecisionBody, DecisionJob
from evener_server.embeddings import EmbeddingBody, EmbeddingChat, EmbeddingJob, embedding_body
from evener_server.errors import ERROR_SCHEMA, ApiError, handle_error, handle_unknown_url, log_fields
from evener_server.ksanallm.body import ForwardBody, GenerateBody
from evener_server.ksanallm.encoding import ERROR_SCHEMA as KSANALLM_ERROR_SCHEMA
from evener_server.ksanallm.encoding import Encoding, described
from evener_server.ksanallm.forward import ANSWER_SCHEMA as FORWARD_SCHEMA
from evener_server.ksanallm.forward import ForwardJob
from evener_server.ksanallm.generate import ANSWER_SCHEMA as GENERATE_SCHEMA
from evener_server.ksanallm.generate import GenerateJob
from evener_server.metrics import CONTENT_TYPE
from evener_server.middleware import HEADER, IGNORED_HEADER, HostCheck, RequestLog, RootPath
from evener_server.msgpack_body import read_either
from evener_server.options import ServerOptions
from evener_server.page import add_page
from evener_server.protocol import ChatBody, CompletionBody, PromptBody, parse_body
from evener_server.responses.background import BackgroundResponses
from evener_server.responses.body import ResponsesBody
from evener_server.responses.job import InputCounter, ResponseJob
from evener_server.responses.store import ResponseStore
from evener_server.router_info import add_router_info
from evener_server.scores import RerankBody, RerankJob, ScoreBody, ScoreJob
from evener_server.service import Service
from evener_server.status_page import add_status_page, needs_no_key
from evener_server.streaming import GenerationResponse, Job, to_json
from evener_server.tokens import DetokenizeBody, TokenizeChat, TokenizeText, TokenService, tokenize_body
from evener_server.unknown_fields import header
from evener_server.weights import UpdateWeightsBody, VersionHeader, add_weights

if TYPE_CHECKING:
    from evener_server.request_traces import Traces

B = TypeVar("B", bound=PromptBody)

_STREAM = "text/event-stream"
#: Fields of pairs of texts.
_PAIRS = frozenset({"text_1", "queries", "data_1"})
_ERROR_TEXTS = {
    400: "The body, a field or the prompt is wrong; the message says which.",
    401: "The API key is missing or wrong.",
    404: "The server has another model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON in UTF-8.",
    429: "Too many requests are waiting; see Retry-After.",
    500: "The server failed on this request.",
    503: "The engine is starting, stopping or gone; see Retry-After.",
    504: "max_time passed before the first token.",
}


def _errors(
    texts: Mapping[int, str] = _ERROR_TEXTS, schema: str = "Error", also: str | None = None
) -> dict[int | str, dict[str, Any]]:
    """The errors that an endpoint may answer with. ``also``: the media type that an answer may have besides JSON."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    found: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "content": content} for status, text in texts.items()
    }
    return found if also is None else {200: {"content": {also: {"schema": {"type": "string"}}}}, **found}


def create_app(
    llm: AsyncLLM, limits: BodyLimits | None = None, hosts: Collection[str] | None = None,
    options: ServerOptions | None = None, keys: ApiKeys | None = None, traces: Traces | None = None,
) -> FastAPI:  # fmt: skip
    """The application for one engine; the caller closes the engine. ``app.state.service`` is its ``Service``.

    Args:
        hosts: names that the ``Host`` header may have, see ``HostCheck``; None: any.
        traces: makes the spans of requests; None: they are not traced.
        keys: API keys, one of which a request must have, see ``KeyCheck``; None or empty: none is needed.
    """
    service = Service(llm, limits or BodyLimits(), options)
    app = FastAPI(title="evener", version=service.version, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    # The middleware that is added last is called first: the key is checked after the host, and both are logged.
    if keys:
        service.key_uses = keys.uses
        # People type their key into the page, so they must be able to load it first.
        page = {"is_open": needs_no_key} if service.options.page else {}
        app.add_middleware(KeyCheck, keys=keys, is_crowded=service.is_crowded, **page)
    if origins := service.options.origins:
        # Before the key is checked: browsers ask first (OPTIONS), without one. Cookies are not used.
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=("GET", "POST", "DELETE"), allow_headers=("*",),
            expose_headers=(HEADER, IGNORED_HEADER, "Retry-After"),
        )  # fmt: skip
    if hosts is not None:
        app.add_middleware(HostCheck, hosts=hosts)
    if traces is not None:
        from evener_server.request_traces import RequestTraces

        app.add_middleware(RequestTraces, traces=traces, model_of=service.answering_model)
    app.add_middleware(RequestLog, responses=service.metrics.responses)
    if service.options.weights_folder is not None:
        app.add_middleware(VersionHeader, llm=llm)
    if root := service.options.root_path.strip("/"):
        app.add_middleware(RootPath, root=f"/{root}")
    app.add_exception_handler(HTTPException, handle_unknown_url)
    app.add_exception_handler(ApiError, handle_error)
    app.add_exception_handler(EvenerError, handle_error)

    async def handle_refusal(request: Request, error: Exception) -> Response:
        service.metrics.rejections += 1
        return await handle_error(request, error)

    app.add_exception_handler(OverloadedError, handle_refusal)
    if service.options.page:
        add_page(app)
    _add_status(app, service)
    add_status_page(app, service)
    add_router_info(app, service)
    _add_generation(app, service)
    _add_pooled(app, service)
    _add_invocations(app, service)
    _add_translated(app, service)
    _add_ksanallm(app, service)
    _add_tokens(app, service)
    if service.options.lora_folder is not None:
        _add_adapters(app, service, service.options.lora_folder)
    if service.options.weights_folder is not None:
        add_weights(app, service, service.options.weights_folder, _schema(UpdateWeightsBody), _errors())
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]  # FastAPI's way to add schemas
    return app


def _add_status(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def list_models() -> Response:
        return _json(status.model_list(service))

    @app.get("/v1/models/{model:path}", responses=_errors({404: _ERROR_TEXTS[404]}))
    async def get_model(model: str) -> Response:
        service.check_model(model)
        return _json(status.model_card(service, model))

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        # The status is 200 also while the reason says why not: a supervisor ends what is not alive.
        reason = status.not_ready_reason(service.llm)
        return _json({"status": "alive", "ready": reason is None, "reason": reason})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses=_errors({503: _ERROR_TEXTS[503]}))
    async def ready() -> Response:
        status.check_ready(service.llm)
        return _json({"status": "ready"})

    @app.get("/stats")
    async def stats() -> Response:
        return _json(await status.stats(service))

    @app.get("/load")
    async def load() -> Response:
        return _json({"server_load": len(service.running)})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(await status.metrics(service), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def version() -> Response:
        return _json(status.version_info(service))


async def _read(request: Request, service: Service, kind: type[B]) -> B:
    return _accept(request, service, kind, await read_object(request, service.limits))


def _accept(request: Request, service: Service, kind: type[B], value: dict[str, Any]) -> B:
    body, ignored = parse_body(kind, value)
    log_fields(request.scope).update(model=body.model, user=body.user, ignored=header(ignored) or None)
    if body.model is not None:
        service.check_model(body.model)
    status.check_ready(service.llm)
    return body


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", openapi_extra=_schema(ChatBody), responses=_errors(also=_STREAM))
    async def chat_completions(request: Request) -> Response:
        return GenerationResponse(ChatJob(service, await _read(request, service, ChatBody)))

    @app.post("/v1/chat/completions/batch", openapi_extra=_schema(BatchBody), responses=_errors())
    async def chat_batch(request: Request) -> Response:
        return GenerationResponse(BatchJob(service, await _read(request, service, BatchBody)))

    @app.post("/v1/decisions", openapi_extra=_schema(DecisionBody), responses=_errors())
    async def decisions(request: Request) -> Response:
        return GenerationResponse(DecisionJob(service, await _read(request, service, DecisionBody)))

    @app.post("/v1/completions", openapi_extra=_schema(CompletionBody), responses=_errors(also=_STREAM))
    async def completions(request: Request) -> Response:
        return GenerationResponse(CompletionJob(service, await _read(request, service, CompletionBody)))


def _add_pooled(app: FastAPI, service: Service) -> None:
    answers = _errors(also="application/octet-stream")

    @app.post("/v1/embeddings", openapi_extra=_schema(EmbeddingBody, EmbeddingChat), responses=answers)
    async def embeddings(request: Request) -> Response:
        value = await read_object(request, service.limits)
        body: EmbeddingBody | EmbeddingChat = _accept(request, service, embedding_body(value), value)
        return GenerationResponse(EmbeddingJob(service, body))

    async def rerank(request: Request) -> Response:
        return GenerationResponse(RerankJob(service, await _read(request, service, RerankBody)))

    async def score(request: Request) -> Response:
        return GenerationResponse(ScoreJob(service, await _read(request, service, ScoreBody)))

    # Cohere's, Jina's and vLLM's names of the same.
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        app.post(path, openapi_extra=_schema(RerankBody), responses=_errors())(rerank)
    for path in ("/score", "/v1/score"):
        app.post(path, openapi_extra=_schema(ScoreBody), responses=_errors())(score)


def _add_invocations(app: FastAPI, service: Service) -> None:
    kinds = (ChatBody, CompletionBody, EmbeddingBody, EmbeddingChat, RerankBody, ScoreBody)

    @app.post("/invocations", openapi_extra=_schema(*kinds), responses=_errors(also=_STREAM))
    async def invocations(request: Request) -> Response:
        """SageMaker's name for all: a conversation, a prompt, texts to embed, or to compare."""
        value = await read_object(request, service.limits)
        # Traces name the request by what it asks for.
        request.state.acts_as, job = _invoked(request, service, value)
        return GenerationResponse(job)


def _invoked(request: Request, service: Service, value: dict[str, Any]) -> tuple[str, Job]:
    """What the fields of a body ask for, and the path that does the same. A conversation is embedded by a model that
    embeds, else answered."""
    status.check_ready(service.llm)
    if "input" in value or ("messages" in value and service.info.pooling is not None):
        body: EmbeddingBody | EmbeddingChat = _accept(request, service, embedding_body(value), value)
        return "/v1/embeddings", EmbeddingJob(service, body)
    if "messages" in value:
        return "/v1/chat/completions", ChatJob(service, _accept(request, service, ChatBody, value))
    if "query" in value:
        return "/rerank", RerankJob(service, _accept(request, service, RerankBody, value))
    if value.keys() & _PAIRS:
        return "/score", ScoreJob(service, _accept(request, service, ScoreBody, value))
    return "/v1/completions", CompletionJob(service, _accept(request, service, CompletionBody, value))


def _add_tokens(app: FastAPI, service: Service) -> None:
    tokens = TokenService(service)

    @app.post("/tokenize", openapi_extra=_schema(TokenizeText, TokenizeChat), responses=_errors())
    async def tokenize(request: Request) -> Response:
        value = await read_object(request, service.limits)
        body: TokenizeText | TokenizeChat = _accept(request, service, tokenize_body(value), value)
        return Response(await tokens.tokenize(body), media_type="application/json")

    if service.options.tokenizer_info:

        @app.get("/tokenizer_info", responses=_errors({404: "The server has no tokenizer."}))
        async def tokenizer_info() -> Response:
            return Response(await tokens.info(), media_type="application/json")

    @app.post("/detokenize", openapi_extra=_schema(DetokenizeBody), responses=_errors())
    async def detokenize(request: Request) -> Response:
        body = await _read(request, service, DetokenizeBody)
        return Response(await tokens.detokenize(body), media_type="application/json")


def _add_adapters(app: FastAPI, service: Service, folder: str) -> None:
    loading = asyncio.Lock()  # those that wait take no thread from other requests

    text: dict[str, Any] = {"response_class": PlainTextResponse, "responses": _errors()}

    @app.post("/v1/load_lora_adapter", openapi_extra=_schema(LoadAdapterBody), **text)
    async def load_lora_adapter(request: Request) -> Response:
        body = await _read(request, service, LoadAdapterBody)
        async with loading:
            return Response(await load_adapter(service, folder, body), media_type="text/plain")

    @app.post("/v1/unload_lora_adapter", openapi_extra=_schema(UnloadAdapterBody), **text)
    async def unload_lora_adapter(request: Request) -> Response:
        body = await _read(request, service, UnloadAdapterBody)
        return Response(await unload_adapter(service, body), media_type="text/plain")


def _add_translated(app: FastAPI, service: Service) -> None:
    responses = ResponseStore()
    background = BackgroundResponses(responses)

    @app.post("/v1/responses", openapi_extra=_schema(ResponsesBody), responses=_errors(also=_STREAM))
    async def create_response(request: Request) -> Response:
        body = await _read(request, service, ResponsesBody)
        job = ResponseJob(service, responses, body)
        if body.background:
            queued = background.start(job)
            if body.stream:
                return _followed(background.events(job.id))
            return Response(queued, media_type="application/json")
        return GenerationResponse(job)

    counts = InputCounter(service, responses)

    @app.post("/v1/responses/input_tokens", openapi_extra=_schema(ResponsesBody), responses=_errors())
    async def count_input_tokens(request: Request) -> Response:
        body = await _read(request, service, ResponsesBody)
        return Response(await counts.count(body), media_type="application/json")

    kept = _errors({400: _ERROR_TEXTS[400], 404: "The server does not keep this response."}, also=_STREAM)

    @app.get("/v1/responses/{response_id}", responses=kept)
    async def get_response(request: Request, response_id: str) -> Response:
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            after = request.query_params.get("starting_after", "-1")
            if not (after.isdecimal() and after.isascii() and len(after) < 10) and after != "-1":
                raise ApiError(400, "starting_after must be the sequence number of an event", "starting_after")
            return _followed(background.events(response_id, int(after)))
        return Response(responses.response(response_id), media_type="application/json")

    @app.post("/v1/responses/{response_id}/cancel", responses=_errors({404: "The server does not keep this response."}))
    async def cancel_response(response_id: str) -> Response:
        return Response(await background.cancel(response_id), media_type="application/json")

    @app.delete("/v1/responses/{response_id}", responses=_errors({404: "The server does not keep this response."}))
    async def delete_response(response_id: str) -> Response:
        responses.remove(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    counter = TokenCounter(service)

    messages: dict[str, Any] = {
        "openapi_extra": _schema(MessagesBody), "responses": _errors(schema="AnthropicError", also=_STREAM),
    }  # fmt: skip

    @app.post("/v1/messages", **messages)
    async def create_message(request: Request) -> Response:
        request.state.error_format = error_body
        return GenerationResponse(MessageJob(service, await _read(request, service, MessagesBody)))

    @app.post(
        "/v1/messages/count_tokens", openapi_extra=_schema(ConversationBody), responses=_errors(schema="AnthropicError")
    )
    async def count_tokens(request: Request) -> Response:
        request.state.error_format = error_body
        body = await counter.count(await _read(request, service, ConversationBody))
        return Response(body, media_type="application/json")


def _add_ksanallm(app: FastAPI, service: Service) -> None:
    async def read(request: Request, encoding: Encoding, kind: type[B]) -> B:
        encoding.use_for_errors(request)
        value = await read_either(request, service.limits, encoding.packed)
        if isinstance(name := value.pop("model_name", None), str) and name:
            value.setdefault("model", name)
        return _accept(request, service, kind, value)

    errors = _errors(schema="KsanaLLMError")
    texts = {200: described(GENERATE_SCHEMA, streams=True), **errors}
    numbers = {200: described(FORWARD_SCHEMA, streams=False), **errors}

    @app.post("/generate", openapi_extra=_schema(GenerateBody), responses=texts)
    async def generate(request: Request) -> Response:
        encoding = Encoding.of(request)
        return GenerationResponse(GenerateJob(service, await read(request, encoding, GenerateBody), encoding))

    @app.post("/forward", openapi_extra=_schema(ForwardBody), responses=numbers)
    async def forward(request: Request) -> Response:
        encoding = Encoding.of(request)
        return GenerationResponse(ForwardJob(service, await read(request, encoding, ForwardBody), encoding))


def _followed(events: AsyncIterator[bytes]) -> Response:
    """A stream that others may read too: it goes on when this reader leaves."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events, media_type=_STREAM, headers=headers)


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")


def _schema(*kinds: type[PromptBody]) -> dict[str, Any]:
    references = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in kinds]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The API's description. Our code parses the bodies, not FastAPI, so their schemas are added here."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        kinds = (ChatBody, BatchBody, CompletionBody, DecisionBody, ResponsesBody, MessagesBody, ConversationBody,
                 EmbeddingBody, EmbeddingChat, RerankBody, ScoreBody, GenerateBody, ForwardBody, TokenizeText,
                 TokenizeChat, DetokenizeBody, LoadAdapterBody, UnloadAdapterBody, UpdateWeightsBody)  # fmt: skip
        for kind in kinds:
            schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[kind.__name__] = schema
        schemas["Error"], schemas["AnthropicError"] = ERROR_SCHEMA, ANTHROPIC_ERROR_SCHEMA
        schemas["KsanaLLMError"] = KSANALLM_ERROR_SCHEMA
        app.openapi_schema = document
    return app.openapi_schema
