// Conversations as a file: written by this page, and read back from anywhere.
import { MAX_MESSAGES, MAX_SIZE, ROLES, newConversation, newId, path, sizeOf, titleOf } from "./conversation.js";

const FORMAT = "evener-conversations";
/** Bytes of a file that is read. */
export const MAX_FILE = 256 << 20;
/** Images are shown as they are, so nothing but images in the page's own formats is taken. */
const IMAGE = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*$/;

export function toFile(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

/**
 * The conversations in a file. Only known fields of the right types are taken, under new ids.
 * @throws {Error} the text is no such file
 */
export function fromFile(text) {
  const value = JSON.parse(text);
  if (value?.format !== FORMAT || !Array.isArray(value.conversations)) throw new Error("another format");
  return value.conversations.map(readConversation);
}

function readConversation(value) {
  const read = newConversation();
  if (!Array.isArray(value?.messages) || value.messages.length > MAX_MESSAGES) throw new Error("messages are missing");
  const ids = new Map();
  for (const given of value.messages) {
    const message = readMessage(given);
    // A message comes after the one that it follows, so there is no circle.
    if (given.parent !== null && !ids.has(given.parent)) throw new Error("a message follows none");
    message.parent = given.parent === null ? null : ids.get(given.parent);
    ids.set(given.id, message.id);
    read.messages.push(message);
  }
  read.head = ids.get(value.head) ?? read.messages.at(-1)?.id ?? null;
  read.title = titleOf(text(value.title)) || titleOf(path(read)[0]?.content ?? "");
  read.created = number(value.created) ?? read.created;
  read.updated = number(value.updated) ?? read.updated;
  if (sizeOf(read) > MAX_SIZE) throw new Error("a conversation is too large");
  return read;
}

function readMessage(given) {
  if (!ROLES.includes(given?.role) || typeof given.id !== "string") throw new Error("a message has no role");
  const message = { id: newId(), parent: null, role: given.role, content: text(given.content) };
  message.created = number(given.created) ?? Date.now();
  for (const name of ["reasoning", "error", "finish", "model", "call", "name"]) {
    if (typeof given[name] === "string") message[name] = given[name];
  }
  for (const name of ["tokens", "seconds"]) if (number(given[name]) !== null) message[name] = given[name];
  if (given.stopped === true) message.stopped = true;
  if (Array.isArray(given.images)) message.images = given.images.filter((url) => IMAGE.test(url));
  if (Array.isArray(given.calls)) {
    message.calls = given.calls.map((call) => ({
      id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments),
    }));
  }
  return message;
}

const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : null);
