"""Who may use a server, and who shares what with whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from moesaic.errors import UserError
from moesaic.serve.api.errors import ApiError
from moesaic.serve.api.keys import Keys
from moesaic.serve.api.rate_limits import KeyLimits, KeyUse
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


def test_a_line_that_is_no_key_is_refused_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, problem in (
        ("#of the team\nfirst-key\n", "line 1"),
        ("first-key\nalice b secret-key\n", "line 2"),
        ("alice secret-key rpm=many\n", "rpm must be"),
        ("alice secret-key rpm=0\n", "rpm must be"),
        ("rpm=5 secret-key\n", "line 1"),
        ("a/b secret-key\n", "name in line 1"),
        ("alice secret-key\nalice other-key\n", "two keys are called alice"),
    ):
        (tmp_path / "keys").write_text(text)
        monkeypatch.setenv("MOESAIC_TEST_KEY", text)
        for file, variable in ((tmp_path / "keys", None), (None, "MOESAIC_TEST_KEY")):
            with pytest.raises(UserError, match=problem) as refused:
                Keys.read(file, variable)
            assert "-key " not in f"{refused.value} ".replace("--api-key-env", "")
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbf first-key \r\n\r\nsecond-key")  # as Windows writes it
    assert Keys.read(tmp_path / "keys", None).owner("Bearer first-key")


def test_names_limits_and_comments(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# of the team\nplain\nalice sk-1 rpm=60 tpm=1000 concurrent=4\nsk-2 rpm=5\n")
    keys = Keys.read(tmp_path / "keys", None, given=["sk-3"])
    uses = {use.name: use.limits for use in keys.users().values()}
    assert len(uses) == 4
    assert uses["alice"] == KeyLimits(rpm=60, tpm=1000, concurrent=4)
    assert KeyLimits(rpm=5) in uses.values()
    assert all(keys.owner(f"Bearer {key}") for key in ("plain", "sk-1", "sk-2", "sk-3"))
    assert keys.owner("Bearer alice") is None
    assert "sk-" not in repr(keys)


def test_a_key_may_come_as_anthropics_clients_send_it(guarded: Running) -> None:
    with guarded.http() as client:
        assert client.get("/v1/models", headers={"x-api-key": "first-key"}).status_code == 200
        assert client.get("/v1/models", headers={"x-api-key": "first"}).status_code == 401


@pytest.fixture
def limited(new_engine: Callable[..., Engine], tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "keys").write_text("few sk-few rpm=2\nbrief sk-brief tpm=30\none sk-one concurrent=1\nfree sk-free\n")
    with running(new_engine(), keys=Keys.read(tmp_path / "keys", None)) as server:
        yield server


def ask(server: Running, key: str, **more: Any) -> httpx.Response:
    return server.post("/v1/chat/completions", HELLO | more, headers={"authorization": f"Bearer {key}"})


def test_requests_a_minute(limited: Running) -> None:
    first = ask(limited, "sk-few")
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert ask(limited, "sk-few").status_code == 200
    refused = ask(limited, "sk-few")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "requests_per_minute"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    with limited.http() as client:  # costs nothing
        assert client.get("/v1/models", headers={"authorization": "Bearer sk-few"}).status_code == 200
    assert ask(limited, "sk-free").status_code == 200
    with pytest.raises(openai.RateLimitError):
        limited.client("sk-few").completions.create(model=NAME, prompt="x")


def test_tokens_a_minute(limited: Running) -> None:
    statuses = [ask(limited, "sk-brief").status_code for _ in range(4)]
    assert statuses[0] == 200
    assert statuses[-1] == 429
    last = ask(limited, "sk-brief")
    assert last.json()["error"]["code"] == "tokens_per_minute"
    assert last.headers["x-ratelimit-remaining-tokens"] == "0"


def test_requests_at_the_same_time(limited: Running) -> None:
    limited.hold.until(limited.engine.counts.generated_tokens + 1)
    client = limited.client("sk-one")
    stream = client.chat.completions.create(model=NAME, stream=True, **HELLO)
    next(iter(stream))
    refused = ask(limited, "sk-one")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "concurrent_requests")
    limited.hold.release()
    list(stream)
    limited.until(lambda: ask(limited, "sk-one").status_code == 200)


def test_usage_of_each_key_is_in_the_metrics_by_its_name(limited: Running) -> None:
    tokens = ask(limited, "sk-free").json()["usage"]
    for _ in range(3):
        ask(limited, "sk-few")
    with limited.http() as client:
        text = client.get("/metrics", headers={"authorization": "Bearer sk-free"}).text
    assert f'moesaic:key_prompt_tokens_total{{key="free"}} {float(tokens["prompt_tokens"])}' in text
    assert f'moesaic:key_generation_tokens_total{{key="free"}} {float(tokens["completion_tokens"])}' in text
    assert 'moesaic:key_requests_total{key="few",status="429"} 1.0' in text
    assert 'moesaic:key_requests_total{key="few",status="200"} 2.0' in text
    assert "sk-" not in text


def test_a_bucket_fills_evenly() -> None:
    now = 0.0
    use = KeyUse("a", KeyLimits(rpm=2, tpm=60), lambda: now)
    use.begin()
    use.begin()
    with pytest.raises(ApiError):
        use.begin()
    now = 30.0
    use.begin()
    use.use(prompt=50, generated=20)
    now = 60.0
    use.begin()
    use.use(generated=60)
    now = 89.0
    with pytest.raises(ApiError, match="60 tokens a minute") as refused:
        use.begin()
    assert refused.value.headers["retry-after"] == "12"
    assert use.headers()["x-ratelimit-reset-tokens"] == "71.000s"
    assert (use.prompt_tokens, use.generated_tokens, use.running) == (50, 80, 4)


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
