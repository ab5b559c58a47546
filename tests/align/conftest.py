"""What most tests of alignment begin from: one very small model for each file of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import moesaic
from moesaic.model.transformer import Model
from tests.serve.made import talking_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def model(base: Path) -> Model:
    return moesaic.load(base)
