"""POST /v1/responses: OpenAI's Responses API, translated into chat completions.

==================  =====================================================================
module              content
==================  =====================================================================
``body``            the fields of a request
``conversation``    items of a conversation as messages of a chat
``previous``        messages that a request repeats from earlier ones
``references``      items of earlier answers that a request names instead of sending them
``output``          a generated message as items, and its events
``shown_messages``  what the model was sent and said
``store``           answers that a later request can go on from
``job``             one request
``background``      requests that were answered before their generation
``event_log``       the events of a stream that may be read again
==================  =====================================================================
"""
