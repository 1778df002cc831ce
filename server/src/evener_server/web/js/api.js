// The server's API.
import { readEvents } from "./events.js";

/** An error as it is shown: `status` is 0 if no answer came; `message` is the server's own text, or "". */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The OpenAI API of the server that this page came from. */
export class Api {
  /** @param {() => string} key the API key; "": the server asks for none */
  constructor(key) {
    this.key = key;
  }

  /** The models: `[{id, max_model_len, input_modalities}]`. */
  async models() {
    return (await (await this.#send("v1/models")).json()).data;
  }

  /** What runs and how busy it is: the JSON of /status. */
  async status() {
    const response = await this.#send("status", { headers: { accept: "application/json" } });
    try {
      return await response.json();
    } catch {
      throw new ApiError(0, ""); // the answer broke off
    }
  }

  /**
   * One answer, as chunks.
   * @param {object} body of /v1/chat/completions, without `stream`
   * @param {AbortSignal} signal ends the request
   * @throws {ApiError}
   */
  async *chat(body, signal) {
    const whole = { ...body, stream: true, stream_options: { include_usage: true } };
    const response = await this.#send("v1/chat/completions", {
      method: "POST", signal, body: JSON.stringify(whole), headers: { "content-type": "application/json" },
    });
    try {
      for await (const chunk of readEvents(response.body)) {
        if (chunk.error) throw new ApiError(response.status, String(chunk.error.message));
        yield chunk;
      }
    } catch (error) {
      if (error instanceof ApiError || signal.aborted) throw error;
      throw new ApiError(0, "");
    }
  }

  async #send(path, options = {}) {
    const headers = { ...options.headers };
    if (this.key()) headers.authorization = `Bearer ${this.key()}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw new ApiError(0, "");
    }
    if (!response.ok) throw new ApiError(response.status, await errorText(response));
    return response;
  }
}

async function errorText(response) {
  const text = await response.text();
  try {
    return String(JSON.parse(text).error.message);
  } catch {
    // Something between us and the server has answered, such as a proxy.
    return text.slice(0, 500);
  }
}
