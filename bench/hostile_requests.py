"""Hostile HTTP requests, made from a server's own OpenAPI document and a seed: the same seed, the same bytes.

cases = Cases(document, seed=0)
cases.make()            a `Case`: what to send over a socket, how, and what kind of hostility it is
"""

from __future__ import annotations

import base64
import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

TEXTS = [
    "", "x", "yes or no", "\x00", "\ufeff", "\u202e\u200b", "😀" * 20, "e\u0301" * 30, "a" * 3000,
    "word " * 400, "{{ 7*7 }}",
    "{% for i in range(9**9) %}", "<|endoftext|>", "<|im_end|><tool_call>", "../../etc/passwd",
    "'; DROP TABLE x; --", "%s%n",
    "\u0130\ufb03\u1e9e", "NaN", "-1", "true", "null", "\ud7ff\ue000", "\U0010ffff",
    "data:image/png;base64,AAAA", "(", "(a|a)*b{1000}",
]  # fmt: skip
NUMBERS: list[Any] = [0, -1, 1, 2, 7, 2**31 - 1, 2**31, 2**53, 2**63, -(2**70), 10**30, 0.5, -0.0, 1e308, 5e-324, 1.0]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [None], {"a": {"b": [1]}}, [0] * 300, ["a", 1, None], {"": ""}]
GRAMMARS: list[dict[str, Any]] = [
    {"guided_regex": "(a|a)*" * 40 + "b{500}"},
    {"guided_regex": "(x+x+)+y"},
    {"guided_regex": "[^\\x00-\\x10]{1,2000}" * 8},
    {"guided_regex": "(" * 800 + ")" * 800},
    {"guided_regex": "a{1000}{1000}"},
    {"guided_choice": ["word" * 50 + str(n) for n in range(900)]},
    {"guided_grammar": "start: start"},
    {"guided_grammar": "start: " + " | ".join(f'"w{n}"' for n in range(3000))},
    {"guided_grammar": "start: a\n" + "\n".join(f"a{n}: a{n + 1}" for n in range(500))},
    {"guided_grammar": 'root ::= "a" root | root "b" | [a-z]+ root'},
    {"grammar": 'root ::= ("yes" | "no") root{0,5000}'},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}},
    {"guided_json": {"$ref": "https://example.invalid/schema.json"}},
    {"guided_json": {"allOf": [{"anyOf": [{"type": "string", "maxLength": n}]} for n in range(1, 60)]}},
    {"guided_json": {"type": "object", "properties": {f"k{n}": {"type": "string"} for n in range(900)}}},
    {"guided_json": {"type": "string", "pattern": "(a+)+$"}},
    {"guided_json": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}},
    {"guided_json": {"type": "integer", "minimum": 10**400}},
    {"guided_json": {"enum": [None] * 2000}},
    {"structured_outputs": {"structural_tag": '{"type":"structural_tag","format":{"type":"any_text"}}'}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
]  # fmt: skip
PATHS = [
    "//v1/models", "/v1//models", "/v1/models/", "/./v1/models", "/../v1/models", "/..%2f..%2fetc/passwd",
    "/%2e%2e/%2e%2e/x",
    "/v1/models/%00", "/v1/models/%ff%fe", "/v1/models/" + "a" * 5000, "/v1/models/../../health", "/V1/MODELS",
    "/index.html%00.js",
    "/main.js/../../keys.py", "/%25", "/v1/chat/completions/", "/v1/chat/completions?x=" + "y" * 3000,
    "/?;&=&", "/\\..\\..", "/*",
    "/.env", "/.git/config", "/v1/responses/../models", "/v1/responses/%2e%2e", "/api/..", "/docs", "/redoc",
    "/admin/workers", "/sleep",
]  # fmt: skip
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW", "get"]
MODEL = "hostile"  # as `bench/hostile.py` serves it
HOST = b"Host: localhost\r\n"


@dataclass
class Case:
    """`parts` are sent one after the other, with `pause` seconds between; `answers` is how many responses must come
    (0: there may be none). `leave`: the client closes after its first bytes; `half`: it says it sends no more."""

    kind: str
    path: str
    parts: list[bytes]
    pause: float = 0.0
    answers: int = 1
    leave: bool = False
    half: bool = False
    method: str = "POST"
    paths: tuple[str, ...] = ()  # of several requests on one connection, in their order


class Cases:
    def __init__(self, document: dict[str, Any], seed: int = 0) -> None:
        self.document = document
        self.chance = random.Random(seed)
        operations = [
            (method.upper(), path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
            if not path.startswith(("/admin", "/sleep", "/wake_up"))
        ]
        self.posts = [one for one in operations if one[0] == "POST"]
        self.others = [one for one in operations if one[0] != "POST"]
        self.kinds: list[tuple[int, Callable[[], Case]]] = [
            (24, self.by_schema), (16, self.one_wrong), (8, self.broken_json), (5, self.nested), (6, self.encodings),
            (6, self.paths), (7, self.headers), (4, self.pipelined), (5, self.grammar), (3, self.slow), (4, self.cut),
            (5, self.leaves), (4, self.half_closed), (6, self.reads), (3, self.big),
        ]  # fmt: skip

    def make(self) -> Case:
        weights = [weight for weight, _ in self.kinds]
        return self.chance.choices([kind for _, kind in self.kinds], weights)[0]()

    # Kinds

    def by_schema(self) -> Case:
        path, body = self._good()
        for _ in range(self.chance.randrange(3)):
            body = self._spoiled(body)
        return self._post("by schema", path, body)

    def one_wrong(self) -> Case:
        path, body = self._good()
        if isinstance(body, dict) and body:
            body[self.chance.choice(sorted(body))] = self._odd()
        return self._post("wrong value", path, body)

    def broken_json(self) -> Case:
        path, body = self._good()
        data = bytearray(dumped(body))
        for _ in range(self.chance.randrange(1, 4)):
            place = self.chance.randrange(len(data) + 1)
            match self.chance.randrange(4):
                case 0:
                    del data[place:]
                case 1:
                    data[place:place] = self.chance.choice(
                        [b"\xff", b"\x00", b",", b"}", b'"', b"\\", b"NaN", b"1e999"]
                    )
                case 2:
                    del data[place : place + 5]
                case 3:
                    data[place:place] = self.chance.choice([b"[" * 3000, b'{"a":' * 2000, b"9" * 4000, b'"\\ud800"'])
        return Case("broken JSON", path, [request("POST", path, bytes(data))])

    def nested(self) -> Case:
        path, body = self._good()
        depth = self.chance.choice([50, 150, 500, 5000, 50_000])
        deep: Any = self.chance.choice(["[", '{"a":'])
        inner = deep * depth + "1" + ("]" if deep == "[" else "}") * depth
        field = self.chance.choice([*sorted(body), "x"]) if isinstance(body, dict) else "x"
        data = f"{{{json.dumps(field)}: {inner}, {dumped(body).decode()[1:]}"
        return Case("deep nesting", path, [request("POST", path, data.encode())])

    def encodings(self) -> Case:
        path, body = self._good()
        text = dumped(body).decode()
        coded = self.chance.choice(["utf-8-sig", "utf-16", "utf-32", "latin-1", "cp037", "utf-7"])
        data = text.encode(coded, "replace")
        kind = self.chance.choice(
            [
                "application/json", "application/json; charset=utf-16", "text/plain", "application/xml",
                "multipart/form-data",
                "application/x-www-form-urlencoded", "APPLICATION/JSON", "application/vnd.api+json", "", "*/*",
                "application/json;;;",
            ]
        )  # fmt: skip
        more = b""
        if self.chance.random() < 0.3:
            data, more = gzip.compress(data), b"Content-Encoding: gzip\r\n"
        elif self.chance.random() < 0.2:
            data = base64.b64encode(data)
        return Case("encodings", path, [request("POST", path, data, more, kind)])

    def paths(self) -> Case:
        path, method = self.chance.choice(PATHS), self.chance.choice(METHODS)
        if self.chance.random() < 0.2:
            path = f"http://localhost{path}"
        body = dumped({"prompt": "x"}) if method in ("POST", "PUT", "PATCH") else b""
        # What is no HTTP at all may be closed without an answer.
        return Case("paths", path, [request(method, path, body)], answers=int(method != "CONNECT"), method=method)

    def headers(self) -> Case:
        path, body = self._good()
        data = dumped(body)
        size = b"Content-Length: %d\r\n" % len(data)
        kind = b"Content-Type: application/json\r\n"
        heads = [
            kind + size,  # no host
            HOST + HOST + kind + size,
            b"Host: evil.example\r\n" + kind + size,
            b"Host: \xff\xfe\r\n" + kind + size,
            HOST + kind + size + size,
            HOST + kind + size + b"Content-Length: 7\r\n",
            HOST + kind + size + b"Transfer-Encoding: chunked\r\n",
            HOST + kind + b"Content-Length: -1\r\n",
            HOST + kind + b"Content-Length: 99999999999999999999\r\n",
            HOST + kind + b"Content-Length: 1e3\r\n",
            HOST + kind + b"Transfer-Encoding: gzip, chunked\r\n",
            HOST + kind + size + b"X-Long: " + b"a" * 100_000 + b"\r\n",
            HOST + kind + size + b"".join(b"X-%d: a\r\n" % n for n in range(900)),
            HOST + kind + size + b"X-Request-Id: \xc3\xa9 evil\r\n",
            HOST + kind + size + b"X-Request-Id: " + b"i" * 500 + b"\r\n",
            HOST + kind + size + b"Authorization: Bearer \xff\xff\r\n",
            HOST + kind + size + b"Bad Header: x\r\n",
            HOST + kind + size + b"X: a\r\n folded\r\n",
            HOST + kind + size + b"X: a\x00b\r\n",
            HOST + kind + size + b"Expect: 100-continue\r\n",
            HOST + kind + size + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\n",
            HOST + kind + size + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n",
            HOST + kind + size + b"Range: bytes=0-1,5-,-1\r\nIf-None-Match: *\r\n",
            HOST + kind + size + b"Origin: https://evil.example\r\nX-Forwarded-For: 1.2.3.4\r\nForwarded: for=x\r\n",
        ]  # fmt: skip
        head = self.chance.choice(heads)
        version = self.chance.choice([b"HTTP/1.1"] * 8 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTQ/1.1"])
        whole = b"POST " + path.encode() + b" " + version + b"\r\n" + head + b"Connection: close\r\n\r\n" + data
        return Case("headers", path, [whole], answers=0)

    def pipelined(self) -> Case:
        count = self.chance.randrange(2, 6)
        made = [self._post("pipelined", *self._good(short=True)) for _ in range(count)]
        health = Case("pipelined", "/health", [request("GET", "/health", b"")])
        made = [health if self.chance.random() < 0.4 else one for one in made]
        whole = b"".join(one.parts[0] for one in made)
        return Case("pipelined", made[0].path, [whole], answers=0, paths=tuple(one.path for one in made))

    def grammar(self) -> Case:
        extra = self.chance.choice(GRAMMARS)
        chat = {"messages": [{"role": "user", "content": "yes"}], "max_tokens": 3, **extra}
        if self.chance.random() < 0.5:
            return self._post("grammars", "/v1/chat/completions", chat)
        return self._post("grammars", "/v1/completions", {"prompt": "yes", "max_tokens": 3, **extra})

    def slow(self) -> Case:
        path, body = self._good()
        data = request("POST", path, dumped(body))
        cuts = sorted(self.chance.randrange(1, len(data)) for _ in range(self.chance.randrange(2, 8)))
        parts = [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        return Case("slow body", path, parts, pause=0.03)

    def cut(self) -> Case:
        path, body = self._good()
        data = request("POST", path, dumped(body))
        return Case("cut off", path, [data[: self.chance.randrange(1, len(data))]], answers=0, leave=True)

    def leaves(self) -> Case:
        path, body = self._good()
        if isinstance(body, dict):
            body |= {"stream": True}
        return Case("leaves", path, self._post("leaves", path, body).parts, answers=0, leave=True)

    def half_closed(self) -> Case:
        path, body = self._good()
        data = request("POST", path, dumped(body))
        if self.chance.random() < 0.5:
            return Case("half closed", path, [data[: len(data) // 2]], answers=0, half=True)
        return Case("half closed", path, [data], answers=0, half=True)

    def reads(self) -> Case:
        method, path, operation = self.chance.choice(self.others)
        for name in (part["name"] for part in operation.get("parameters", ()) if part["in"] == "path"):
            path = path.replace(
                f"{{{name}}}", self.chance.choice(["x", "tiny", "resp_x", "%00", "a%2fb", "😀", "9" * 300])
            )
        query = self.chance.choice(
            ["", "?", "?limit=-1", "?limit=x&after=%00", "?" + "a=b&" * 300, "?starting_after=1e9"]
        )
        if path.startswith("/live/stream"):
            query = ""
        return Case("reads", path, [request(method, quoted(path) + query, b"")], method=method)

    def big(self) -> Case:
        path, body = self._good()
        size = self.chance.choice([100_000, 1_000_000, 9_000_000])
        if isinstance(body, dict):
            text = self.chance.choice(["a", "word ", "😀", "0 "])
            body[self.chance.choice([*sorted(body), "x"])] = text * (size // len(json.dumps(text)))
        return self._post("big", path, body)

    # Parts of them

    def _good(self, short: bool = False) -> tuple[str, Any]:
        """A path, and a body its schema allows; not much shall be generated."""
        _, path, operation = self.chance.choice(self.posts)
        content = operation.get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema", {})
        body = self._sample(schema, 0) if schema else {}
        if isinstance(body, dict):
            for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"):
                if name in body or name == "max_tokens":
                    body[name] = self.chance.randrange(1, 4 if short else 9)
            for name in ("n", "best_of"):
                if name in body:
                    body[name] = 1
            if "options" in body and isinstance(body["options"], dict):
                body["options"]["num_predict"] = 3
            if path.startswith("/api/"):
                body["model"] = MODEL  # which Ollama's clients must name
            elif self.chance.random() < 0.7:
                body.pop("model", None)
            if "{" in path:
                path = path.replace("{", "").replace("}", "")
        return path, body

    def _sample(self, schema: dict[str, Any], depth: int) -> Any:
        while "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            schema = self.document["components"]["schemas"][name]
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.chance.choice(schema["enum"])
        for key in ("anyOf", "oneOf"):
            if key in schema and "properties" not in schema:
                return self._sample(self.chance.choice(schema[key]), depth)
        match schema.get("type"):
            case "object":
                return self._object(schema, depth)
            case "array":
                least, most = schema.get("minItems", 0), min(schema.get("maxItems", 3), 3)
                count = self.chance.randint(least, max(least, most)) if depth < 6 else least
                return [self._sample(schema.get("items", {}), depth + 1) for _ in range(count)]
            case "string":
                return self.chance.choice([*TEXTS[:6], "user", "yes"]) or "a" * schema.get("minLength", 0)
            case "integer":
                low, high = schema.get("minimum", 0), schema.get("maximum", 5)
                return self.chance.randint(int(low), max(int(low), min(int(high), 300)))
            case "number":
                return round(self.chance.uniform(schema.get("minimum", 0.1), min(schema.get("maximum", 1.0), 2.0)), 3)
            case "boolean":
                return self.chance.random() < 0.3
            case "null":
                return None
        return self._odd()

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        known, required = schema.get("properties", {}), set(schema.get("required", ()))
        found = {}
        for name, inner in known.items():
            if name in required or self.chance.random() < (0.12 if depth < 4 else 0.0):
                found[name] = self._sample(inner, depth + 1)
        if not known and isinstance(schema.get("additionalProperties"), dict):
            found["5"] = self._sample(schema["additionalProperties"], depth + 1)
        if "role" in found and self.chance.random() < 0.9:
            found |= {"role": "user", "content": self.chance.choice(["yes", "a number", *TEXTS])}
        return found

    def _odd(self) -> Any:
        return self.chance.choice([self.chance.choice(TEXTS), self.chance.choice(NUMBERS), self.chance.choice(OTHERS)])

    def _spoiled(self, body: Any) -> Any:
        """With something replaced, somewhere inside."""
        if isinstance(body, dict) and body and self.chance.random() < 0.85:
            key = self.chance.choice(sorted(body))
            return body | {key: self._spoiled(body[key])}
        if isinstance(body, list) and body and self.chance.random() < 0.85:
            place = self.chance.randrange(len(body))
            return [*body[:place], self._spoiled(body[place]), *body[place + 1 :]]
        return self._odd()

    def _post(self, kind: str, path: str, body: Any) -> Case:
        return Case(kind, path, [request("POST", path, dumped(body))])


def dumped(body: Any) -> bytes:
    return json.dumps(body).encode()


def quoted(path: str) -> str:
    return quote(path, safe="/%?&=.~-_")


def request(method: str, path: str, body: bytes, more: bytes = b"", kind: str = "application/json") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\n".encode() + HOST + more
    if body or method == "POST":
        head += f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n".encode()
    return head + b"\r\n" + body
