"""What a model reads to score a document for a query."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from evener.contracts.media import MediaPrompt
from evener.errors import RequestError
from evener_server.service import Service

#: What Qwen3-Reranker was trained with, as its model card has it; its folder's template is that of chats.
_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


async def pair_text(service: Service, query: str, document: str, instruction: str | None) -> str | tuple[str, str]:
    """The text of a pair, by the folder's template if that has the roles ``query`` and ``document``, as
    sentence-transformers saves it, or by Qwen3-Reranker's; for a model whose tokenizer joins them, both texts.

    Raises:
        RequestError: the model has neither, or an instruction that its template does not read.
        TemplateError: the template refused the texts.
    """
    chat = service.llm.chat
    template = "" if chat is None else chat.templates.get("default", "")
    if all(re.search(f"""["']{role}["']""", template) for role in ("query", "document")):
        assert chat is not None, "it has the template"
        if instruction is not None and "instruction" not in template:
            raise RequestError("the model's template reads no instruction: leave it out", "instruction")
        messages: list[dict[str, Any]] = [
            {"role": "query", "content": query},
            {"role": "document", "content": document},
        ]
        variables = None if instruction is None else {"instruction": instruction}
        text = await asyncio.to_thread(chat.prompt, messages, template_kwargs=variables)
        assert not isinstance(text, MediaPrompt), "texts have no images"
        return text
    if service.info.pooling is not None and service.info.pooling.pairs:
        if instruction is not None:
            raise RequestError("the model reads the two texts and no instruction: leave it out", "instruction")
        return query, document
    if service.info.architecture == "Qwen3ForCausalLM":
        return _QWEN3.format(instruction=instruction or _QWEN3_INSTRUCTION, query=query, document=document)
    raise RequestError(
        "the model's folder has no chat template with the roles query and document: add it to its chat_template.jinja",
        "model",
    )
