"""Ollama's API, as a translation: its requests become chats and completions, and outputs are written in its form."""
