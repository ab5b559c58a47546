"""Admin calls need an admin key, which opens nothing else; an engine in the server's own process can only drain."""

from __future__ import annotations

from collections.abc import Callable

from moesaic.serve.api.keys import Keys, _hash
from moesaic.serve.core.engine import Engine
from tests.serve.api.running import running

BODY = {"prompt": "yes", "max_tokens": 2}


def keys(word: str) -> Keys:
    return Keys(frozenset([_hash(word)]))


def test_admin_keys_and_api_keys_open_different_doors(new_engine: Callable[..., Engine]) -> None:
    with (
        running(new_engine(), keys=keys("client"), admin_keys=keys("admin")) as server,
        server.http(headers={"authorization": "Bearer client"}) as client,
        server.http(headers={"authorization": "Bearer admin"}) as admin,
    ):
        assert client.post("/v1/completions", json=BODY).status_code == 200
        assert admin.post("/v1/completions", json=BODY).status_code == 401
        for path in ("/admin/workers", "/admin/nothing"):
            assert client.get(path).status_code == 401
        assert client.post("/admin/scale", json={"workers": 2}).status_code == 401
        assert admin.get("/admin/workers").json() == {"workers": [], "change": None, "draining": False}
        for path, body in (("scale", {"workers": 2}), ("weights", {"directory": "/"}), ("workers/0/drain", {})):
            refused = admin.post(f"/admin/{path}", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "no_workers")
            assert "--replicas 1" in refused.json()["error"]["message"]
        assert admin.post("/admin/scale", json={"workers": 0}).status_code == 400
        assert admin.post("/admin/drain").status_code == 200
        assert client.post("/v1/completions", json=BODY).status_code == 503
        assert admin.get("/admin/workers").json()["draining"]
        assert admin.post("/admin/resume").status_code == 200
        assert client.post("/v1/completions", json=BODY).status_code == 200


def test_without_admin_keys_there_is_no_such_call(new_engine: Callable[..., Engine]) -> None:
    with running(new_engine()) as server, server.http() as client:
        assert client.get("/admin/workers").status_code == 404
        assert client.post("/admin/drain").status_code == 404
