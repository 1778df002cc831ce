// Server-sent events: from the bytes of a response to the JSON values in it.

/** A line longer than this is no event of ours. */
const MAX_LINE = 1 << 24;

/**
 * The JSON values of a stream, up to `[DONE]`.
 * @param {ReadableStream<Uint8Array>} stream the body of a response
 * @yields {object} the value of each event
 * @throws {Error} the stream ended before `[DONE]`, or has a line that is too long or no JSON
 */
export async function* readEvents(stream) {
  for await (const line of readLines(stream)) {
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    yield JSON.parse(data);
  }
  throw new Error("the stream ended early");
}

async function* readLines(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += decoder.decode(value, { stream: !done });
      const lines = rest.split(/\r?\n/);
      rest = lines.pop();
      yield* lines;
      if (done) return;
      if (rest.length > MAX_LINE) throw new Error("a line of the stream is too long");
    }
  } finally {
    // Also when the caller stops reading: the server then ends the request.
    await reader.cancel().catch(() => undefined);
  }
}
