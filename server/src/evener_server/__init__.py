"""The HTTP server of evener: the OpenAI API for its engine, and a chat page.

Importing this package imports neither FastAPI nor torch.

========================  =======================================================================================
module                    content
========================  =======================================================================================
``command``               ``evener serve``
``run_command``           ``evener run``; ``run_outputs``: the folder that it writes
``local_engine``          the engine of these commands, in this process
``early_reading``         the weights, read while modules are imported
``torch_libraries``       torch's libraries, loaded while modules are imported
``collector``             when Python's garbage collector runs, during a start and at the end
``chat_command``          ``evener chat``
``chat_models``           what answers there: a model in this process, or a server
``chat_screen``           how answers are shown there
``client_command``        ``evener client``; ``client_http``: how it asks a server
``completion_script``     ``evener completion``
``process``               the serving process: socket, signals, draining
``app``                   the FastAPI application and its routes
``status``                models, health, readiness, version
``metrics``               counters and histograms for Prometheus
``dashboard``             a dashboard of them for Grafana (``grafana.json``)
``vllm_metrics``          the same under vLLM's names
``options``               keys of the server itself
``stats_logger``          the periodic log line
``trace_settings``        whether requests are traced: opens what makes and sends their spans
``trace_places``          where spans go, by keys and variables
``request_traces``        their spans, for OpenTelemetry
``nodes``                 one process started per machine: starts torchrun
``router_info``           what routers ask: the server's and the model's limits
``kv_events``             events of the prefix cache, for routers
``service``               what the endpoints share
``sampling_defaults``     what requests get that name no temperature and the like
``status_page``           GET /status, for programs and people
``page``                  the chat page at /; ``web/`` has its files
``adapters``              adapters (LoRA) that are loaded while the server runs
``weights``               sleep and wake, and new weights while the server runs
``operator_folder``       folders that clients name, below one of the operator's
``api_keys``              which keys requests may have, and the check of each
``key_file``              the file that they are in; ``key_use``: what each uses, and limits
``tls``                   the certificate
``connections``           limits on connections, and on the time that a request takes to arrive
``middleware``            request ids, access log, unexpected errors
``body``                  from a request's bytes to a JSON object
``protocol``              request bodies: every field, and what is refused
``unknown_fields``        fields of a request that this API does not have
``field_types``           types of fields that need a check of their own
``messages``              the messages of a chat
``images``                images in messages, decoded
``bad_words``             texts that must not be generated
``structured``            what an answer has to be: ``response_format``, ``structured_outputs``, ``guided_*``
``grammar_check``         checks a request's grammar in a process of its own
``chat`` ``completions``  the two endpoints
``batch``                 several chats in one request
``beams``                 beam search for a request
``fill_in_middle``        ``suffix``: a text between two others
``decisions``             POST /v1/decisions: the probability of each of several options
``transfers``             prompts that one server computes and another answers
``held``                  grammars of answers: forms, forced calls, reasoning before them
``translated``            what APIs share that are translated into chat completions
``responses``             OpenAI's Responses API
``anthropic``             Anthropic's Messages API
``embeddings``            text embeddings; ``vector_bytes``: as bytes
``scores``                POST /score and /rerank; ``pair_text``: what the model reads for a query and a document
``shortened``             texts of which fewer tokens are left
``pooled``                what embeddings and scores have in common
``ksanallm``              KsanaLLM's /generate and /forward; ``msgpack_body``: requests in msgpack
``tools``                 the tools of a chat
``parsers``               which parsers read tool calls and reasoning
``turns``                 the newest turns of a conversation that is too long
``prompt_tokens``         token ids of texts and chats, to show or count them, or to cut a prompt
``message_parts``         content, reasoning and tool calls of a generated message
``tokens``                tokenize and detokenize
``echo``                  completions that begin with their prompt
``embedded_prompts``      prompts and parts of chats as embeddings; ``saved_tensor``: the file of one tensor
``watermark``             seeds that mark sampled texts, and finding the mark
``generation``            the samples of one API request, and the set of running ones
``streaming``             a generation as an HTTP response, whole or as server-sent events
``logprobs``              log-probabilities in OpenAI's format
``errors``                every error in OpenAI's shape
========================  =======================================================================================
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor, Option

descriptor = Descriptor(
    name="server",
    summary="The OpenAI API over HTTP (`evener serve`); in a terminal, one answer (`evener run`) or a chat.",
    contracts={"descriptor": 1, "request_plugin": 1},
    launchers={"torchrun": "evener_torchrun.ranks:TorchrunEnv"},
    request_plugins={"ksana_plugin": "evener_server.ksanallm.plugin_file:PluginFile"},
    options={
        "vllm_metrics": Option(
            type=bool, default=True, help="Serve /metrics under vLLM's names too, for dashboards made for it."
        ),
        "tool_parser": Option(
            type=str,
            default="auto",
            help="Which parser reads tool calls: its name, none, or auto: by the chat template.",
        ),
        "api_key_file": Option(
            type=str,
            default=None,
            help="File with API keys, in addition to serve.api_keys: one a line, or .yaml or "
            ".jsonl with names, priorities and limits. It is read again when it changes.",
        ),
        "api_key_strict": Option(
            type=bool, default=True, help="Refuse requests without a valid API key; false: they come after all others."
        ),
        "cors_origins": Option(
            type=str, default="", help="Web sites whose pages may ask this server, separated by commas; *: any."
        ),
        "trust_plugin_file": Option(
            type=bool,
            default=False,
            help="Let request.plugins=ksana_plugin run ksana_plugin.py of the model's "
            "folder. It is a program with the server's rights.",
        ),
        "tls_cert": Option(
            type=str,
            default=None,
            help="PEM file with the server's certificate chain, for https. It is read again, "
            "with its key, when it changes.",
        ),
        "tls_key": Option(type=str, default=None, help="PEM file with the certificate's key, without a password."),
        "tls_client_ca": Option(
            type=str,
            default=None,
            help="PEM file with certificates, one of which must have signed the certificate "
            "that each client then has to show.",
        ),
        "chat_template": Option(
            type=str, default=None, help="File with a chat template (Jinja), used instead of the model's own."
        ),
        "exclude_tools_when_tool_choice_none": Option(
            type=bool,
            default=True,
            help="Do not show the tools to the model with tool_choice none; false: the prompt "
            "stays the same, and so does what the prefix cache has of it.",
        ),
        "forward_bytes": Option(
            type=int, default=64 << 20, help="Bytes of the numbers that one request to /forward may ask for."
        ),
        "force_include_usage": Option(
            type=bool,
            default=False,
            help="Give the usage with every chunk of a stream and at its end, if the request does not say.",
        ),
        "max_logprobs": Option(
            type=int,
            default=20,
            help="Log-probabilities that a request may have of each token; -1: of the whole "
            "vocabulary. Each takes about 100 bytes of the server's memory. With more than 20 of a token, all prompts "
            "and choices of a request together may have 8,388,608.",
        ),
        "model_aliases": Option(
            type=str,
            default="",
            help="Other names under which requests find the model, separated by commas; answers have its own name.",
        ),
        "otlp_endpoint": Option(
            type=str,
            default=None,
            help="Address of a collector (OTLP, as http://127.0.0.1:4318) that gets a trace of "
            "each request; none: what OpenTelemetry's variables say (OTEL_EXPORTER_OTLP_ENDPOINT).",
        ),
        "page": Option(type=bool, default=True, help="Serve a chat page at /, for people with a browser."),
        "reasoning_parser": Option(
            type=str,
            default="auto",
            help="Which parser reads reasoning: its name, none, or auto: by the chat template.",
        ),
        "request_metrics": Option(
            type=bool, default=False, help="Chats and completions have the times of their request in a field metrics."
        ),
        "root_path": Option(
            type=str, default="", help="Path that a proxy puts before every route, such as /llm; both are answered."
        ),
        "sampling_defaults": Option(
            type=str,
            default="",
            help="Sampling parameters of requests that do not name them, in place of those in "
            "generation_config.json, as in temperature=0,top_p=0.9.",
        ),
        "show_cached_tokens": Option(
            type=bool,
            default=True,
            help="The usage says how many tokens of the prompt were in the prefix cache; false: clients do not learn "
            "from it what others have sent.",
        ),
        "thinking_budget": Option(
            type=int, default=None, help="Tokens that reasoning may have, for requests that do not say."
        ),
        "tokenizer_info": Option(
            type=bool, default=False, help="Answer GET /tokenizer_info: the tokenizer's settings and the chat template."
        ),
        "token_ids": Option(
            type=bool, default=False, help="Log-probabilities name tokens by their ids, for requests that do not say."
        ),
        "lora_folder": Option(
            type=str,
            default=None,
            help="Folder below which clients may load adapters (LoRA) while the server runs; none: they may not.",
        ),
        "kv_events": Option(
            type=str,
            default=None,
            help="ZMQ address, such as tcp://127.0.0.1:5557, on which to publish what the "
            "prefix cache has, in vLLM's form, for routers; none: nothing. Prompts can be read from it.",
        ),
        "kv_events_replay": Option(
            type=str, default=None, help="ZMQ address on which routers ask for events that they missed."
        ),
        "kv_events_topic": Option(type=str, default="", help="Topic of these events."),
        "weights_folder": Option(
            type=str,
            default=None,
            help="Folder below which clients may replace the weights while the server runs, "
            "and let the engine sleep; none: they may not.",
        ),
        "trust_request_chat_template": Option(
            type=bool,
            default=False,
            help="Take chat templates from requests (chat_template). They are programs: only for clients you trust.",
        ),
        "watermark_key_file": Option(
            type=str, default=None, help="Text file with a secret key: sampled answers get a watermark of it."
        ),
    },
    cache_listeners={"kv_events": "evener_server.kv_events:open_kv_events"},
    commands={
        "serve": "evener_server.command:main",
        "run": "evener_server.run_command:main",
        "chat": "evener_server.chat_command:main",
        "client": "evener_server.client_command:main",
        "completion": "evener_server.completion_script:main",
    },
)
