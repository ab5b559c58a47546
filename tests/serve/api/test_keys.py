"""Who may use a server, and who shares what with whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from moesaic.errors import UserError
from moesaic.serve.api.keys import Keys
from moesaic.serve.core.engine import Engine
from tests.serve.api.running import NAME, Running, running

HELLO: Any = {"messages": [{"role": "user", "content": "The number 7 is a number, as you like it"}], "max_tokens": 2}


@pytest.fixture
def guarded(new_engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    (tmp_path / "keys").write_text("first-key\nsecond-key\n")
    monkeypatch.setenv("MOESAIC_TEST_KEY", "third-key")
    with running(new_engine(), keys=Keys.read(tmp_path / "keys", "MOESAIC_TEST_KEY")) as server:
        yield server


def test_known_keys_may_and_others_may_not(guarded: Running) -> None:
    for key in ("first-key", "second-key", "third-key"):
        assert guarded.client(key).chat.completions.create(model=NAME, **HELLO).choices
    for key in ("first-ke", "first-key2", "x", "FIRST-KEY", "first-key\tsecond-key", "ключ"):
        headers = {"authorization": f"Bearer {key}".encode()}
        for path in ("/v1/models", "/metrics", "/live", "/live/stream", "/openapi.json", "/v1/nothing", "/nothing"):
            with guarded.http() as client:
                answer = client.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    with pytest.raises(openai.AuthenticationError):
        guarded.client("no").models.list()
    with guarded.http() as client:
        assert client.get("/v1/models").status_code == 401
        assert client.post("/tokenize", json={"prompt": "x"}).status_code == 401
        assert client.get("/v1/models", headers={"authorization": "Basic first-key"}).status_code == 401
        assert client.get("/v1/models", headers={"authorization": "bearer first-key"}).status_code == 200
        for path in ("/health", "/ready", "/version", "/", "/main.js"):
            assert client.get(path).status_code == 200


def test_one_keys_prompts_are_not_in_anothers_cache(guarded: Running) -> None:
    def cached(key: str) -> int:
        answer = guarded.client(key).chat.completions.create(model=NAME, **HELLO)
        return int(answer.usage.prompt_tokens_details.cached_tokens)  # type: ignore[union-attr]

    assert cached("first-key") == 0
    assert cached("first-key") > 0
    assert cached("second-key") == 0
    assert cached("second-key") > 0


def test_keys_are_kept_nowhere(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    guarded.client("first-key").chat.completions.create(model=NAME, **HELLO)
    owners = {str(root) for root in guarded.engine.page_pool.roots}
    for text in (repr(guarded.service.settings), caplog.text, *owners):
        assert "first-key" not in text


def test_files_and_variables_without_keys_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("empty", "binary", "missing"):
        with pytest.raises(UserError, match=name):
            Keys.read(tmp_path / name, None)
    with pytest.raises(UserError, match="NO_SUCH_VARIABLE"):
        Keys.read(None, "NO_SUCH_VARIABLE")
    assert Keys.read(None, None) == Keys()


def test_a_line_that_is_more_than_a_key_is_refused_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("# of the team\nfirst-key\n", "first-key\nalice secret-key\n"):
        (tmp_path / "keys").write_text(text)
        monkeypatch.setenv("MOESAIC_TEST_KEY", text)
        for file, variable in ((tmp_path / "keys", None), (None, "MOESAIC_TEST_KEY")):
            with pytest.raises(UserError, match="more than one word") as refused:
                Keys.read(file, variable)
            assert "-key" not in str(refused.value)
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbf first-key \r\n\r\nsecond-key")  # as Windows writes it
    assert Keys.read(tmp_path / "keys", None).owner("Bearer first-key")


def test_pages_elsewhere_may_only_if_named(new_engine: Callable[..., Engine], server: Running) -> None:
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    with server.http() as client:
        assert "access-control-allow-origin" not in client.get("/version", headers=ask).headers
    with running(new_engine(), cors_origins=("https://a.example",)) as open_server:
        with open_server.http() as client:
            answer = client.options("/v1/chat/completions", headers=ask)
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
            other = client.get("/version", headers={"origin": "https://b.example"})
            assert "access-control-allow-origin" not in other.headers
