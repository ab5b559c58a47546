"""The same on a GPU: 100 M parameters, and questions of nine kinds instead of sums alone.

GpuLife(Path("out/quickstart-gpu"), Console()).run()
"""

from __future__ import annotations

from typing import ClassVar

import torch

from moesaic.errors import UserError
from moesaic.quickstart.tiny import LAST, SUM, THEN, TinyLife

# Here a short message of nothing but numbers is a sum.
BARE = """{%- set bare = asked.content is string and asked.content | length < 40 %}
{%- if bare and not asked.content | list | reject('in', '0123456789+-= ') | list %}
"""


class GpuLife(TinyLife):
    family = "questions"
    questions = 1000
    max_tokens = 96
    pretrains, aligns = "gpu.yaml", "quickstart-gpu.yaml"
    pilot = 0.15
    template = LAST + BARE + SUM + "{%- endif %}\n" + THEN
    calibration: ClassVar = {"samples": 64, "length": 512}


def check_gpu() -> None:
    if not torch.cuda.is_available():
        raise UserError("--gpu", "there is no GPU that torch can use", "See moesaic doctor, or leave it out.")
