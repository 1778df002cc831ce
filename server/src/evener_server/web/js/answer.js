// An answer that grows as chunks come.

/** Adds one chunk of /v1/chat/completions to an assistant's message. */
export function addChunk(message, chunk) {
  if (chunk.model) message.model = chunk.model;
  if (chunk.usage) message.tokens = chunk.usage.completion_tokens;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { content, reasoning_content, reasoning, tool_calls } = choice.delta ?? {};
  if (content) message.content += content;
  const thought = reasoning_content ?? reasoning;
  if (thought) message.reasoning = (message.reasoning ?? "") + thought;
  for (const part of tool_calls ?? []) addCall(message, part);
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

/** Calls of one answer. */
const MAX_CALLS = 128;

function addCall(message, part) {
  if (!((part.index ?? 0) < MAX_CALLS)) return;
  message.calls ??= [];
  const call = (message.calls[part.index ?? 0] ??= { id: "", name: "", arguments: "" });
  if (part.id) call.id = part.id;
  if (part.function?.name) call.name += part.function.name;
  if (part.function?.arguments) call.arguments += part.function.arguments;
}
