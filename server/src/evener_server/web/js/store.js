// Conversations in this browser (IndexedDB). Summaries are kept apart, so that the list does not read all images.

/** More conversations than this: the oldest are removed. */
export const MAX_CONVERSATIONS = 200;
const WHOLE = "conversations", BRIEF = "summaries";

/** Opens the store; where a browser gives none (some private windows), what is kept lasts as long as the page. */
export async function openStore() {
  try {
    return new BrowserStore(await openDatabase());
  } catch (error) {
    console.warn("conversations are not kept in this browser:", error);
    return new MemoryStore();
  }
}

const summary = ({ id, title, updated }) => ({ id, title, updated });
const newestFirst = (one, other) => other.updated - one.updated;

class BrowserStore {
  #database;
  lasting = true;

  constructor(database) {
    this.#database = database;
  }

  /** Summaries `{id, title, updated}`, newest first. */
  async list() {
    return (await result(this.#stores("readonly", BRIEF)[0].getAll())).sort(newestFirst);
  }

  async get(id) {
    return result(this.#stores("readonly", WHOLE)[0].get(id));
  }

  async all() {
    return (await result(this.#stores("readonly", WHOLE)[0].getAll())).sort(newestFirst);
  }

  /** Keeps `conversation`, and removes the oldest if there are too many. */
  async put(conversation) {
    const [whole, brief] = this.#stores("readwrite", WHOLE, BRIEF);
    whole.put(conversation);
    brief.put(summary(conversation));
    const kept = (await result(brief.getAll())).sort(newestFirst);
    for (const { id } of kept.slice(MAX_CONVERSATIONS)) {
      whole.delete(id);
      brief.delete(id);
    }
    await done(whole.transaction);
  }

  async remove(id) {
    const stores = this.#stores("readwrite", WHOLE, BRIEF);
    for (const store of stores) store.delete(id);
    await done(stores[0].transaction);
  }

  async clear() {
    const stores = this.#stores("readwrite", WHOLE, BRIEF);
    for (const store of stores) store.clear();
    await done(stores[0].transaction);
  }

  #stores(mode, ...names) {
    const transaction = this.#database.transaction(names, mode);
    return names.map((name) => transaction.objectStore(name));
  }
}

class MemoryStore {
  #kept = new Map();
  lasting = false;

  async list() {
    return [...this.#kept.values()].map(summary).sort(newestFirst);
  }

  async get(id) {
    return this.#kept.get(id);
  }

  async all() {
    return [...this.#kept.values()].sort(newestFirst);
  }

  async put(conversation) {
    this.#kept.set(conversation.id, conversation);
  }

  async remove(id) {
    this.#kept.delete(id);
  }

  async clear() {
    this.#kept.clear();
  }
}

async function openDatabase() {
  const request = indexedDB.open("evener", 1);
  request.onupgradeneeded = () => {
    for (const name of [WHOLE, BRIEF]) request.result.createObjectStore(name, { keyPath: "id" });
  };
  return result(request);
}

function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function done(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}
