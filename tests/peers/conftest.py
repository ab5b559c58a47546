"""What people who switch from llama.cpp, vLLM or SGLang rely on: the behaviour that those projects' own server suites
check, written anew. One tiny model and one server for each file."""

from tests.serve.api.conftest import client, directory, new_engine, server

__all__ = ["client", "directory", "new_engine", "server"]
