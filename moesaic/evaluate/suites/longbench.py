"""LongBench (Bai et al.): document QA, summaries, few-shot, code and Chinese, by lm-eval's tasks on local files.

    moesaic evaluate out/smollm2 --suite longbench --data LongBench/data tasks=hotpotqa,gov_report,trec,lcc,dureader
    moesaic evaluate out/smollm2 --suite longbench --data LongBench/data tasks=all limit=50

`--data` is the folder of LongBench's own files, one NAME.jsonl for each task (data.zip of THUDM/LongBench on the
Hugging Face Hub); nothing is fetched. Prompts and scores are those of lm-eval's `longbench_NAME`: F1 for QA, ROUGE-L
for summaries, accuracy for few-shot classification, edit similarity for code. A prompt that is longer than the model's
context loses its beginning.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moesaic.errors import UserError
from moesaic.evaluate.suites.lm_eval import LMEval

KINDS = {
    "single-document QA": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "multi-document QA": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "summaries": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "few-shot": ("trec", "triviaqa", "samsum", "lsht"),
    "synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    "code": ("lcc", "repobench-p"),
}
NAMES = [name for names in KINDS.values() for name in names]
FIELDS = ("context", "answers")
SCORERS = ("jieba", "fuzzywuzzy", "rouge")


@dataclass(frozen=True)
class LongBench(LMEval):
    tasks: str = "hotpotqa,gov_report,trec,lcc,dureader"  # or all

    from_package = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [name for name in self._names() if name.removesuffix("_e") not in NAMES]:
            raise ValueError(f"tasks: LongBench has no {', '.join(unknown)}, but {', '.join(NAMES)}")

    def _names(self) -> list[str]:
        return NAMES if self.tasks == "all" else [name for name in self.tasks.split(",") if name]

    def check(self, data: Path | None) -> None:
        self.named(data)
        if missing := [name for name in SCORERS if importlib.util.find_spec(name) is None]:
            raise UserError("longbench", f"its scores need {', '.join(missing)}", "pip install 'lm-eval[longbench]'")

    def named(self, data: Path | None) -> list[str]:
        remedy = "Unpack data.zip of THUDM/LongBench, and name its folder with --data."
        if data is None or not data.is_dir():
            raise UserError("--data", "is to be the folder of LongBench's files", remedy)
        for name in self._names():
            rows(data / f"{name}.jsonl", remedy)
        return [f"local_{name}" for name in self._names()]

    def task_files(self, data: Path | None) -> Path | None:
        """lm-eval's tasks as they are, but for where their data is."""
        import lm_eval.tasks

        assert data is not None
        tasks, folder = Path(lm_eval.tasks.__file__).parent / "longbench", Path(tempfile.mkdtemp(dir=_scratch().name))
        for name in self._names():
            local = folder / f"{name}.jsonl"
            lines = rows(data / local.name, "")[: self.limit or None]
            local.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
            files = {"data_files": {"test": str(local)}, "cache_dir": str(folder)}
            place: dict[str, Any] = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": files, "tag": []}
            task = {"include": str(tasks / f"{name}.yaml"), "task": f"local_{name}", **place}
            (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
        return folder


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """Goes away with the process."""
    return tempfile.TemporaryDirectory(prefix="moesaic-longbench-")


def rows(file: Path, remedy: str) -> list[dict[str, Any]]:
    """A file's lines, with the question under the name that lm-eval's tasks have for it."""
    try:
        texts = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(file, f"cannot be read ({type(error).__name__})", remedy) from None
    found = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or not isinstance(line.get("context"), str):
            raise UserError(
                f"{file}:{number}", "is not a line of LongBench", 'It has "input", "context" and "answers".'
            )
        if not isinstance(line.get("answers"), list) or not line["answers"]:
            raise UserError(f"{file}:{number}", "has no list of answers")
        question = line.get("question", line.get("input", ""))
        kept = {"context": line["context"], "answers": [str(answer) for answer in line["answers"]]}
        found.append({**kept, "question": str(question), "all_classes": line.get("all_classes") or []})
    if not found:
        raise UserError(file, "is empty", remedy)
    return found
