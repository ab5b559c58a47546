"""What every request and response has: an id, a known host, a line in the log; and what names a model's weights."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moesaic.errors import UserError
from moesaic.serve.api.fingerprint import weights_fingerprint
from moesaic.serve.api.front import hosts_to_check, known_host
from moesaic.serve.api.keys import VARIABLE, Keys, key_variable
from moesaic.serve.cluster.launch import parse_models
from moesaic.serve.core.engine import Engine
from tests.serve.api.running import running
from tests.serve.made import talking_model


@pytest.mark.parametrize(
    ("bound", "keys", "allowed", "checked"),
    [
        ("127.0.0.1", False, (), True),
        ("::1", False, (), True),
        ("0.0.0.0", False, (), False),  # others reach it anyway, by whatever name
        ("127.0.0.1", True, (), False),
        ("0.0.0.0", False, ("a.example",), True),
        ("/run/socket", False, (), False),
    ],
)
def test_when_hosts_are_checked(bound: str, keys: bool, allowed: tuple[str, ...], checked: bool) -> None:
    assert (hosts_to_check(bound, keys, allowed) is not None) == checked


def test_which_hosts_are_known() -> None:
    names = hosts_to_check("127.0.0.1", False, ("Box.Example.",))
    for good in (
        b"localhost",
        b"LOCALHOST:80",
        b"a.localhost",
        b"127.0.0.1:8000",
        b"[::1]:8000",
        b"10.0.0.7",
        b"box.example:1",
    ):
        assert known_host(good, names), good
    for bad in (
        b"evil.example",
        b"localhost.evil.example",
        b"evil.example:127.0.0.1",
        b"127.0.0.1.evil.example",
        b"",
        b"\xff",
        b"[x]",
    ):
        assert not known_host(bad, names), bad
    assert known_host(None, names)  # HTTP/1.0, which no browser speaks
    assert known_host(b"anything", None)


def test_requests_are_logged_by_id_and_name_of_the_key(
    new_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys.read(None, None, given=["sk-secret"])
    with caplog.at_level(logging.INFO, "moesaic.requests"):
        with running(new_engine(), keys=keys, log_requests=True) as server:
            with server.http(headers={"authorization": "Bearer sk-secret", "x-request-id": "abc"}) as client:
                client.get("/v1/models/a%0Ab")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "moesaic.requests"]
    assert re.fullmatch(r"abc key-[0-9a-f]{8} GET '/v1/models/a\\nb' 404 \d+\.\d+ s", line)
    assert "sk-secret" not in caplog.text


def test_an_internal_error_is_logged_with_its_request(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(new_engine()) as server:
        monkeypatch.setattr(server.service, "tokenize", lambda *given, **options: 1 // 0)
        answer = server.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": "find-me"})
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "find-me"
    assert "internal error (request find-me)" in caplog.text


def test_the_fingerprint_of_weights(directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(directory, tmp_path / "copy")
    assert weights_fingerprint(directory) == weights_fingerprint(copy)
    other = talking_model(tmp_path / "other", seed=1)
    assert weights_fingerprint(other) != weights_fingerprint(directory)
    assert weights_fingerprint(tmp_path / "nothing") == ""


def test_keys_of_the_command_line_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert key_variable() is None
    monkeypatch.setenv(VARIABLE, "sk-env rpm=5\nsk-other\n")
    keys = Keys.read(None, key_variable(), given=["sk-given"])
    assert all(keys.owner(f"Bearer {key}") for key in ("sk-env", "sk-other", "sk-given"))
    for wrong in ("", " ", "two words"):
        with pytest.raises(UserError, match="--api-key"):
            Keys.read(None, None, given=[wrong])


def test_further_models_are_named_and_there(tmp_path: Path) -> None:
    assert parse_models([f"a={tmp_path}"], ["b"]) == {"a": tmp_path}
    for wrong in (f"b={tmp_path}", "a", "=x", "a=", f"a={tmp_path}/none"):
        with pytest.raises(UserError, match="--also"):
            parse_models([wrong], ["b"])
    with pytest.raises(UserError, match="another model"):
        parse_models([f"a={tmp_path}", f"a={tmp_path}"], [])
