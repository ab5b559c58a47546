// Asks for an API key: resolves to it, or to null. `again`: the last one was not accepted.

const byId = (id) => document.getElementById(id);
const NOTE = "It is kept until you close this tab, and sent to this server only.";

export function askKey(again) {
  const dialog = byId("key-dialog");
  byId("key-note").textContent = again ? `That key was not accepted. ${NOTE}` : NOTE;
  byId("key").value = "";
  byId("key-cancel").onclick = () => dialog.close();
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes" ? byId("key").value.trim() : null), { once: true });
  });
}
