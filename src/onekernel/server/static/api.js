// The server's HTTP interface, as far as this page needs it.

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function request(path, key, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ApiError(body.error?.message ?? `The server answered ${response.status}.`, response.status);
}

// The first entry of the model list.
export async function servedModel(key) {
  const response = await request("v1/models", key);
  return (await response.json()).data[0];
}

// The chunks of a streamed answer. Leaving the loop, or the signal, closes the connection: that cancels the answer.
export async function* streamAnswer(body, key, signal) {
  const response = await request("v1/chat/completions", key, { method: "POST", body: JSON.stringify(body), signal });
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message ?? "The answer failed.");
    yield chunk;
  }
  throw new ApiError("The connection closed before the answer was complete.");
}

// Server-sent events whose data is one line each; anything else, such as keep-alive comments, is passed over.
async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection was lost before the answer was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
