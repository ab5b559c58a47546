// What the page keeps in this browser: three stores of IndexedDB, in promises.
//
//   conversations  { id, title, created, updated, ... }
//   messages       { id, conversation, parent, role, content, ... }, one record each
//   tokens         { id, conversation, list }: the probabilities of a message's tokens, which take far more space
//
// Where IndexedDB is forbidden, a database in memory stands in, and is gone with the page.

export const STORES = ["conversations", "messages", "tokens"];
const VERSION = 1;

export async function openDatabase(name = "moesaic") {
  try {
    return new Database(await open(name));
  } catch {
    return new MemoryDatabase();
  }
}

function open(name) {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(name, VERSION);
    request.onupgradeneeded = () => {
      for (const store of STORES) {
        const made = request.result.createObjectStore(store, { keyPath: "id" });
        if (store !== "conversations") made.createIndex("conversation", "conversation");
      }
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("blocked"));
  });
}

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

class Database {
  constructor(db) {
    this.db = db;
    this.lasting = true;
    db.onversionchange = () => db.close(); // a newer page wants another form of it
  }

  // Runs `work` within one transaction: nothing that another tab writes comes in between. It gets get, put, remove and of
  // (all records of a conversation), and must await nothing else.
  async change(work) {
    const transaction = this.db.transaction(STORES, "readwrite");
    const ended = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onerror = transaction.onabort = () => reject(transaction.error ?? new Error("not stored"));
    });
    ended.catch(() => {});
    const at = (store) => transaction.objectStore(store);
    const result = await work({
      get: (store, id) => done(at(store).get(id)),
      put: (store, record) => done(at(store).put(record)),
      remove: (store, id) => done(at(store).delete(id)),
      of: (store, conversation) => done(at(store).index("conversation").getAll(conversation)),
    });
    await ended;
    return result;
  }

  get(store, id) {
    return done(this.db.transaction(store).objectStore(store).get(id));
  }

  all(store) {
    return done(this.db.transaction(store).objectStore(store).getAll());
  }

  of(store, conversation) {
    return done(this.db.transaction(store).objectStore(store).index("conversation").getAll(conversation));
  }
}

class MemoryDatabase {
  constructor() {
    this.lasting = false;
    this.stores = Object.fromEntries(STORES.map((store) => [store, new Map()]));
  }

  async change(work) {
    return work({
      get: (store, id) => this.get(store, id),
      put: async (store, record) => this.stores[store].set(record.id, structuredClone(record)),
      remove: async (store, id) => this.stores[store].delete(id),
      of: (store, conversation) => this.of(store, conversation),
    });
  }

  async get(store, id) {
    return structuredClone(this.stores[store].get(id));
  }

  async all(store) {
    return structuredClone([...this.stores[store].values()]);
  }

  async of(store, conversation) {
    return (await this.all(store)).filter((record) => record.conversation === conversation);
  }
}
