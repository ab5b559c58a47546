"""Pages have the same name in every process, and another for everything their bits depend on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import moesaic
from moesaic.serve.core.adapters import Adapter
from moesaic.serve.core.engine import Engine
from moesaic.serve.pages.identity import identity_of_directory, identity_of_model, namespace
from moesaic.serve.pages.names import NAME_BYTES, PageNames, page_name
from tests.random_models import save_random, small_config
from tests.serve.tiny import tiny_model

TOKENS = list(range(40))


def test_names_are_the_same_in_another_process() -> None:
    script = (
        "from moesaic.serve.pages.names import PageNames;"
        "names = PageNames('w'); print([n.hex() for n in names.of_prompt(('s', None, 0), list(range(40)), 16)])"
    )
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    here = [name.hex() for name in PageNames("w").of_prompt(("s", None, 0), TOKENS, 16)]
    assert there.strip() == str(here) and len(here) == 2 and len(here[0]) == 2 * NAME_BYTES


def test_whatever_bits_depend_on_is_in_the_name() -> None:
    names = PageNames("w")
    plain = names.root(("", None, 0))
    stored = Adapter("a", {}, "digest")
    others = [
        names.root(("salt", None, 0)),
        names.root(("", stored, 0)),
        names.root(("", Adapter("a", {}, "other digest"), 0)),
        names.root(("", Adapter("a", {}), 0)),
        names.root(("", None, 1)),
        PageNames("v").root(("", None, 0)),
    ]
    assert len({plain, *others}) == 1 + len(others)
    assert names.root(("", Adapter("b", {}, "digest"), 0)) == others[1]  # the same adapter
    again = PageNames("w")
    assert again.root(("", None, 0)) == plain and again.root(("", stored, 0)) == others[1]
    # Weights that changed here, and adapters without files, are not known elsewhere.
    assert again.root(("", None, 1)) != others[3] and again.root(("", Adapter("a", {}), 0)) != others[3]
    assert page_name(plain, [1, 2]) != page_name(plain, [1]) != page_name(plain, [2])
    assert page_name(page_name(plain, [1]), [2]) != page_name(plain, [1, 2])


def test_the_identity_of_weights_sees_one_bit(tmp_path: Path) -> None:
    config = small_config("qwen3_moe", 101, 32, 32, 1, (4, 2), head_dim=8, moe_intermediate_size=16, num_experts=8)
    for folder, seed in (("one", 0), ("same", 0), ("other", 1)):
        save_random(config, tmp_path / folder, seed=seed)
    one, same, other = (identity_of_directory(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same != other
    file = next((tmp_path / "same").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    assert identity_of_directory(tmp_path / "same") != one

    model = moesaic.load(tmp_path / "one")
    before = identity_of_model(model)
    assert before == identity_of_model(moesaic.load(tmp_path / "one")) != identity_of_model(tiny_model())
    cache = Engine(model, cache_bytes=1 << 20).cache
    assert namespace(before, model, cache) != namespace(before, model, model.new_cache(4, 8))
