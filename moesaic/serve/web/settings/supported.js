// Which fields of a chat request this server takes, by the schema it publishes; null if it publishes none.

export async function supportedFields(api) {
  try {
    const { components } = await api.json("/openapi.json");
    const fields = components?.schemas?.ChatCompletionRequest?.properties;
    return fields ? new Set(Object.keys(fields)) : null;
  } catch {
    return null;
  }
}
