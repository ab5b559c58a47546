"""One engine for every generated token: the API, the chat, evaluation and rollouts all ask it."""
