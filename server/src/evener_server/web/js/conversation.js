// A conversation: a tree of messages. Regenerating or editing adds a branch; nothing is lost.
//
// {id, title, created, updated, head, messages: [message]}; `head` is the last message that is shown, and the messages
// are in the order in which they were made. A message is
// {id, parent, role, content, created}, and
//   of a user: images (data: URLs);
//   of the assistant: reasoning, calls [{id, name, arguments}], error, stopped, finish, model, tokens, seconds;
//   of a tool: call (the id of the call that it answers), name.

export const ROLES = ["user", "assistant", "tool"];
export const MAX_MESSAGES = 2000;
/** Characters of one conversation, images included. */
export const MAX_SIZE = 24 << 20;
const MAX_TITLE = 80;

/** A new id. crypto.randomUUID is only there on https and localhost. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation() {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, head: null, messages: [] };
}

/** Adds a message after `parent` (null: the first) and shows it. Returns it. */
export function append(conversation, parent, fields) {
  const message = { id: newId(), parent, content: "", created: Date.now(), ...fields };
  conversation.messages.push(message);
  conversation.head = message.id;
  conversation.updated = message.created;
  if (!conversation.title && message.role === "user") conversation.title = titleOf(message.content);
  return message;
}

export function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1)}…` : line;
}

export function find(conversation, id) {
  return conversation.messages.find((message) => message.id === id);
}

/** The messages from the first to `id` (default: those that are shown). */
export function path(conversation, id = conversation.head) {
  const byId = new Map(conversation.messages.map((message) => [message.id, message]));
  const found = [];
  for (let message = byId.get(id); message; message = byId.get(message.parent)) found.push(message);
  return found.reverse();
}

/** The messages that stand in the same place as `message`, itself included. */
export function siblings(conversation, message) {
  return conversation.messages.filter((each) => each.parent === message.parent);
}

/** Shows the branch of the message `id`, to its newest end. */
export function show(conversation, id) {
  const newest = new Map(conversation.messages.map((message) => [message.parent, message.id]));
  let head = id;
  while (newest.has(head)) head = newest.get(head);
  conversation.head = head;
}

/** Whether an answer has anything that can be sent back. */
export function isEmpty(message) {
  return message.role === "assistant" && !message.content && !message.calls?.length;
}

/** The messages for the API, to which `messages` have come. A question without an answer is left out: otherwise what
 * failed once would fail again. */
export function toRequest(messages, system = "") {
  const sent = messages.filter((message, i) => !isEmpty(message) && !(messages[i + 1] && isEmpty(messages[i + 1])));
  return [...(system.trim() ? [{ role: "system", content: system }] : []), ...sent.map(requestMessage)];
}

function requestMessage({ role, content, images, calls, call }) {
  if (role === "tool") return { role, tool_call_id: call, content };
  if (role === "user" && images?.length) {
    const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role, content: [...parts, { type: "text", text: content }] };
  }
  if (!calls?.length) return { role, content };
  const tool_calls = calls.map((each) => ({
    id: each.id, type: "function", function: { name: each.name, arguments: each.arguments },
  }));
  return { role, content: content || null, tool_calls };
}

/** Characters of all texts and images. */
export function sizeOf(conversation) {
  return JSON.stringify(conversation).length;
}
