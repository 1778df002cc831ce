"""The HTTP front of evener: the OpenAI API over its engine. Importing this package imports neither FastAPI nor torch.

======================  ==========================================================
module                  noun
======================  ==========================================================
``command``             ``evener serve``
``chat_command``        ``evener chat``
``chat_models``         who answers there: a model in the process, or a server
``chat_screen``         how answers look there
``completion_script``   ``evener completion``
``process``             the serving process: socket, signals, draining
``app``                 the FastAPI application and its routes
``status``              models, health, readiness, version
``metrics``             counters and histograms for Prometheus
``activity``            the periodic log line
``middleware``          request ids, access log, last resort for errors
``body``                a request's bytes to a JSON object
``protocol``            request bodies: every field, and what is refused
``messages``            the messages of a chat
``chat`` ``completions``  the two endpoints: how they start, what they answer
``generation``          the samples of one API request, and the set of those that run
``streaming``           a generation as an HTTP response, whole or as server-sent events
``logprobs``            log-probabilities in OpenAI's shapes
``errors``              every error in OpenAI's shape
======================  ==========================================================
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="server",
    summary="The OpenAI API over HTTP: `evener serve`; a conversation in the terminal: `evener chat`.",
    contracts={"descriptor": 1},
    commands={
        "serve": "evener_server.command:main",
        "chat": "evener_server.chat_command:main",
        "completion": "evener_server.completion_script:main",
    },
)
