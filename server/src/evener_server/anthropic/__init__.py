"""POST /v1/messages and its count of tokens: Anthropic's Messages API, translated into chat completions.

===========  =======================================================
module       content
===========  =======================================================
``body``     the fields of a request
``blocks``   blocks of content as messages of a chat
``output``   a generated message as blocks of content, and its events
``job``      one request, the count of its tokens, errors
===========  =======================================================
"""
