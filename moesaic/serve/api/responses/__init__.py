"""OpenAI's Responses API: a translation to a chat (`translate.py`), its outputs as items (`items.py`), and the state
that a client may come back to (`store.py`), also of a response that is generated behind its back (`background.py`)."""
