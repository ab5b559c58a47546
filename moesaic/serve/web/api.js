// Requests to the server: the API key it may require, its error messages, and streams of events.

export class ApiError extends Error {
  constructor(message, status, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Api {
  // askKey(again) resolves to a key, or to null if the user cancels.
  constructor(askKey) {
    this.askKey = askKey;
    this.asking = null;
    this.key = null;
    try {
      this.key = sessionStorage.getItem("moesaic.key");
    } catch {
      // It is not remembered, then.
    }
  }

  async request(path, options = {}) {
    for (;;) {
      const sent = this.key;
      const headers = { ...options.headers, ...(sent ? { Authorization: `Bearer ${sent}` } : {}) };
      const response = await fetch(path, { ...options, headers });
      if (response.ok) return response;
      if (response.status !== 401) throw await explained(response);
      // Several requests may be refused at once; one dialog is enough, and a newer key may be there already.
      if (this.key === sent && !(await (this.asking ??= this.ask(sent !== null)))) throw await explained(response);
    }
  }

  async ask(again) {
    try {
      const key = await this.askKey(again);
      if (!key) return false;
      this.key = key;
      try {
        sessionStorage.setItem("moesaic.key", key);
      } catch {
        // Asked again next time.
      }
      return true;
    } finally {
      this.asking = null;
    }
  }

  async json(path, options) {
    return (await this.request(path, options)).json();
  }

  // The data of each event of a stream, as it comes. Aborting the signal ends it with an AbortError.
  async *events(path, options) {
    const response = await this.request(path, options);
    yield* readEvents(response.body);
  }

  read(response) {
    return readEvents(response.body);
  }

  post(path, body, signal) {
    return this.json(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
  }
}

export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      pending += value;
      const lines = pending.split(/\r\n|\n|\r(?!$)/);
      pending = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue; // every event of ours has its data on one line
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function explained(response) {
  let message = "";
  let code = null;
  try {
    const body = await response.json();
    code = body.error?.code ?? null;
    message = body.error?.message ?? body.detail ?? "";
  } catch {
    // Not JSON: the status must do.
  }
  return new ApiError(String(message || `The server responded with ${response.status} ${response.statusText}.`), response.status, code);
}
