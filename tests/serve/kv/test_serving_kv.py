"""A server with a policy of the cache, asked by OpenAI's own client; and what the command refuses."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from moesaic.cli import main
from moesaic.model.directory import load
from moesaic.serve.bench.server_process import serving
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.kv_policies.snapkv import SnapKV
from tests.serve.made import TEXTS, talking_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("talking") / "model")


def test_a_server_prunes_as_its_engine_does(model: Path) -> None:
    text = "".join(TEXTS[:12])
    made = load(model)
    policy = SnapKV(share=0.25, least=16)
    expected = Engine(made, kv_policy=policy).generate([text], max_tokens=24, temperature=0.0, ignore_eos=True)[0].text
    assert expected != Engine(made).generate([text], max_tokens=24, temperature=0.0, ignore_eos=True)[0].text
    with serving(model, ["--kv-policy", "snapkv", "--kv", "share=0.25", "--kv", "least=16"]) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        told = client.completions.create(
            model="model", prompt=text, max_tokens=24, temperature=0.0, extra_body={"ignore_eos": True}
        )
        assert told.choices[0].text == expected
        told = client.completions.create(  # the same again: nothing is shared, so nothing may have changed
            model="model", prompt=text, max_tokens=24, temperature=0.0, extra_body={"ignore_eos": True}
        )
        assert told.choices[0].text == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kv-policy", "snapvk"], "did you mean snapkv"),
        (["--kv-policy", "snapkv", "--kv", "share=7.0"], "share must be above 0"),
        (["--kv-policy", "snapkv", "--kv", "bits=2"], "bits"),
        (["--kv-policy", "quantized", "--kv", "bits=3"], "bits must be 8, 4 or 2"),
        (["--kv-policy", "h2o", "--drafter", "suffix"], "it scores the attention of generated tokens"),
        (["--kv", "share=0.5"], "share"),
    ],
)
def test_what_is_refused(model: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(model), "--port", "0", *words]) == 2
    assert said in capsys.readouterr().err
