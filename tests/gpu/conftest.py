"""What the tests on a GPU share."""

import pytest
import torch


@pytest.fixture(scope="module")
def exact_float32():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    from tests.gpu.models import saved  # needs transformers, which is slow to import where no test runs

    return saved(tmp_path_factory)
