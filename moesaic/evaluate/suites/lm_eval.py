"""Tasks of the package lm-eval, by name or from a task file, on our model and engine.

    moesaic evaluate out/smollm2 --suite lm_eval tasks=hellaswag,arc_easy limit=100
    moesaic evaluate out/smollm2 --suite lm_eval --data my_task.yaml chat=true fewshot=2

A task by name fetches its data set as lm-eval does; a task file may name local data.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.errors import UserError
from moesaic.evaluate.suites import Suite, SuiteContext
from moesaic.model.transformer import Model


@dataclass(frozen=True)
class LMEval(Suite):
    tasks: str = ""  # names, with commas between them; or none, and a file of one by --data
    limit: int = 0  # examples of each; 0: all
    fewshot: int = -1  # -1: as the task says
    chat: bool = False  # in the model's chat template

    takes_data = True
    from_package = True  # whether tasks are looked for among the package's own, of which there are thousands

    def __post_init__(self) -> None:
        if self.limit < 0 or self.fewshot < -1:
            raise ValueError("limit must be at least 0 (all examples), and fewshot at least -1 (as the task says)")

    def check(self, data: Path | None) -> None:
        self.named(data)

    def named(self, data: Path | None) -> list[str]:
        tasks = [name for name in self.tasks.split(",") if name] + ([named_in(data)] if data is not None else [])
        if not tasks:
            raise UserError("tasks", "is missing", "Name tasks of lm-eval, or a task file with --data.")
        return tasks

    def task_files(self, data: Path | None) -> Path | None:
        """The folder of tasks that are not lm-eval's own."""
        return data.parent if data else None

    def run(self, model: Model | None, context: SuiteContext) -> dict[str, Any]:
        assert model is not None
        try:
            import lm_eval
        except ModuleNotFoundError:
            raise UserError("lm_eval", "is not installed", "pip install lm-eval") from None
        from moesaic.evaluate.lm_eval_model import LMEvalModel, Tasks

        names: list[Any] = self.named(context.data)
        folder = self.task_files(context.data)
        manager = Tasks(include_path=str(folder) if folder else None, include_defaults=self.from_package)
        if unknown := [name for name in names if name not in manager.all_tasks]:
            raise UserError("tasks", f"lm-eval has no {', '.join(unknown)}", "lm-eval ls tasks lists them.")
        content = lm_eval.simple_evaluate(
            model=LMEvalModel(model, context.progress),
            tasks=names,
            limit=self.limit or None,
            num_fewshot=None if self.fewshot < 0 else self.fewshot,
            apply_chat_template=self.chat,
            task_manager=manager,
            bootstrap_iters=1000,
            log_samples=False,
        )
        assert content is not None
        return {
            f"{task}: {metric.replace(',none', '')}": value
            for task, numbers in content["results"].items()
            for metric, value in numbers.items()
            if isinstance(value, int | float) and "," in metric
        }


def named_in(file: Path) -> str:
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(file, f"is not a task file ({type(error).__name__})") from None
    if not isinstance(content, dict) or not isinstance(content.get("task"), str):
        raise UserError(file, "names no task", 'A task file has a line "task: NAME".')
    return str(content["task"])
