"""A training run: everything the loop needs, made from a recipe, or taken up where an earlier process left it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from moesaic.data.stream import Batch, Closing, Keeper, Stream, TokenStream
from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.model import directory, lineage
from moesaic.model.transformer import Model
from moesaic.recipe import Recipe
from moesaic.train import init
from moesaic.train.averaging import WeightAverage
from moesaic.train.balance import Balance
from moesaic.train.checkpoints import Checkpoints, Snapshot
from moesaic.train.compile import compile_blocks
from moesaic.train.held_out_loss import HeldOutLoss
from moesaic.train.init import Begun
from moesaic.train.layer_runners.compose import LayerRunners
from moesaic.train.loss_scale import LossScale
from moesaic.train.objectives import Loss, Objective
from moesaic.train.optimizers import OptimizerMethod, StepResult
from moesaic.train.report.mfu import peak_flops, step_flops
from moesaic.train.report.report import Report, StepRecord
from moesaic.train.resume import fingerprint, record_dtype, run_dtype, steps_done
from moesaic.train.validate import rates, with_room, within
from moesaic.train.watch import Watch


class Run:
    """`Run(recipe, out, data)` is a fresh run or, if `out` holds one, its continuation.

    What is not as the recipe says can be given: `begun`, the model with its files and its life so far; `stream`, what
    it learns from, made for the model; `measure`, what is measured of it every `train.evaluate_every` steps.
    """

    draws = True  # its curves, at the end

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        data: Path | None = None,
        *,
        quiet: bool = False,
        command: str = "",
        name: str = "train",
        begun: Begun | None = None,
        stream: Callable[[Model], Stream] | None = None,
        measure: Callable[[Model], dict[str, float]] | None = None,
    ) -> None:
        recipe, shortened = with_room(recipe)
        self.recipe, self.out, self.settings, self.name = recipe, out, recipe.train, name
        self.device = hardware.device()
        torch.set_num_threads(hardware.threads())
        self.step = 0
        self.rewinds = 0
        self.stopping = False
        self._frozen = False  # whether the present batch is only looked at

        done = steps_done(recipe, out, name)
        self._origin = fingerprint(recipe.train.init)
        self.checkpoints = Checkpoints(out, self.settings.keep_last, self.settings.keep_every, self._saved)
        before = run_dtype(out)
        self.model, self.files, self.life = begun or init.model(recipe, _given(data), self.device, before)
        self.data: Stream = stream(self.model) if stream else TokenStream.open(_given(data), recipe)
        recipe, ends = within(recipe, self.data)
        self.recipe, self.settings = recipe, recipe.train
        self.objective = recipe.build("train.objective", Objective)
        self.objective.prepare(self.model)
        method = recipe.build("optimizer", OptimizerMethod)
        self.peak = method.lr
        self.optimizer = method.build(self.model.named_parameters())
        self.scale = LossScale(device=self.device) if self.model.dtype == torch.float16 else None
        self.rates = rates(recipe)
        self.measure = measure or self._held_out()
        self.balance = Balance(self.model, recipe.balance)
        self.watch = Watch(self.settings.spike.sigmas, self.settings.spike.patience)
        self.average = WeightAverage(self.settings.average, self.settings.steps)
        self.layer_runners = LayerRunners(self.settings, self.model.config)
        if self.device.type == "cuda" and stream is None and not self.settings.token_drop:  # batches of one size
            compile_blocks(self.model)
        report_state = self._restore(done) if done else None
        if not done:
            record_dtype(out, self.model.dtype)
        self.report = Report(
            out,
            self.settings.steps,
            self.step,
            state=report_state,
            peak_flops=peak_flops(self.device, self.model.dtype),
            quiet=quiet,
            command=command,
        )
        kind = str(self.model.dtype).removeprefix("torch.")
        self.report.note(f"dtype {kind}, {init.why(recipe, before)}", kind="dtype", dtype=kind)
        if shortened:
            self.report.note(f"a run of {self.settings.steps} steps: warm-up shortened to {self.settings.warmup_steps}")
        if not self.step and isinstance(self.data, TokenStream):
            for warning in self.data.plan.warnings:
                self.report.note(warning, kind="warning")
        if ends:
            self.report.note(f"the data ends after {self.settings.steps:,} steps, and so does the run")
        self._clock = time.perf_counter()

    # -- a step, in the order of the loop

    def next_batch(self) -> Batch:
        return next(self.data)

    def learn(self, batch: Batch) -> Loss:
        """Gradients of the whole batch, taken in parts to save memory; the sum of their losses."""
        self.optimizer.zero_grad()
        self._frozen = batch.frozen
        runner = self.layer_runners.runner(self.step)
        whole = Loss(torch.zeros((), device=self.device))
        for part in batch.parts(self.settings.accumulate, self.device):
            routing = self.balance.routing()
            with torch.set_grad_enabled(not batch.frozen):
                loss = self.objective(self.model, part, routing, runner)
                extra = self.balance.losses(routing, len(part.tokens_T) / len(batch.tokens_T))
            total = sum(extra.values(), loss.total)
            if not batch.frozen:
                (total if self.scale is None else self.scale.apply(total)).backward()
                self.balance.count(routing)
            whole.total += loss.total.detach()
            named = {f"loss/{name}": value for name, value in loss.parts.items()} | loss.notes
            for name, value in (named | {f"balance/{name}": value for name, value in extra.items()}).items():
                so_far = whole.parts.get(name, torch.zeros((), device=self.device))
                largest = name.endswith("_max")
                whole.parts[name] = torch.maximum(so_far, value.detach()) if largest else so_far + value.detach()
        return whole

    def rate(self, step: int) -> float:
        """The learning rate of the step after `step` of them, as a share of the peak."""
        return float(self.rates[self.layer_runners.progress(step)])

    def update(self) -> StepResult:
        value = None if self.scale is None else self.scale.value
        if self._frozen:
            none = torch.zeros((), device=self.device)
            result = StepResult(none, none.bool(), self.optimizer.updates.clone())
        else:
            result = self.optimizer.step(self.rate(self.step), clip=self.settings.clip, loss_scale=value)
        if self.scale is not None and not self._frozen:
            self.scale.update(result.skipped)
        self.step += 1
        self.average.update(self.step, self.model)
        return result

    def tell(self, batch: Batch, loss: Loss, result: StepResult, loads: dict[int, Tensor]) -> None:
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        lr = self.peak * self.rate(self.step - 1)
        tokens = len(batch.tokens_T)
        parts: dict[str, Tensor | float] = dict(loss.parts)
        parts |= batch.notes
        measure = self.measure if self.measure is not None and self.due_to_evaluate() else None
        if measure is not None:
            parts |= measure(self.model)
            self._clock = time.perf_counter()  # a step's time is that of learning
        flops = step_flops(self.model.config, batch.lengths)
        self.report.step(
            StepRecord(self.step, loss.total, lr, tokens, seconds, result.norm, result.skipped, flops, parts, loads)
        )
        for told in batch.told if measure is not None else ():
            self.report.note(told, kind="sample")
        for warning in batch.warnings:
            self.report.note(warning, kind="warning")
        self.checkpoints.look()

    def rewind(self) -> None:
        """Back to the last good checkpoint, but past the data that came since: what broke the loss is seen no more."""
        spike, position = self.step, self.data.position
        lost = self.watch.lost
        what = f"{lost} steps in a row were not finite" if lost > self.watch.high else "the loss spiked"
        self.checkpoints.wait()
        # A loss is seen a step late, and is high from the step after the update that broke the weights.
        broke = spike - self.watch.bad - 1
        steps = [step for step in self.checkpoints.steps() if step < broke]
        if not steps or self.rewinds >= self.settings.spike.most:
            when = f"after {self.rewinds} rewinds" if steps else "before a checkpoint to go back to"
            problem = f"{what} at step {spike}, {when}"
            raise UserError(self.out, problem, "Lower the learning rate, or look at the data.")
        rewinds, life = self.rewinds + 1, self.life
        self.checkpoints.forget(after=steps[-1])
        state = self._restore(steps[-1])
        self.data = self.data.skip(position)
        self.rewinds, self.life = rewinds, [*life, lineage.stage("rewind", spiked_at=spike, back_to=self.step)]
        self.report.rewind(self.step, state, f"{what} at step {spike}")

    def due_to_evaluate(self) -> bool:
        return self.step % self.settings.evaluate_every == 0 or self.done()

    def due_to_save(self) -> bool:
        # A state that may be inside a spike is not kept in place of one that is not.
        return self.finished() or (self.step % self.settings.save_every == 0 and not self.watch.bad)

    def finished(self) -> bool:
        return self.done() or self.stopping

    def done(self) -> bool:
        """Whether all steps are taken, or there is nothing left to take one from: a rewind leaves data out."""
        return self.step >= self.settings.steps or (isinstance(self.data, TokenStream) and self.data.ended)

    def _held_out(self) -> Callable[[Model], dict[str, float]] | None:
        if not self.settings.evaluate_every or not isinstance(self.data, TokenStream):
            return None
        longest, tokens = self.recipe.data.sequence_length, self.settings.evaluate_tokens
        held_out = HeldOutLoss(self.data.data, tokens=tokens, longest=longest, device=self.device)
        return lambda model: {"loss/held_out": float(held_out(model))}

    # -- keeping it

    def save(self) -> None:
        weights = copied(self.model.state_dict())
        tensors = {"optimizer": copied(self.optimizer.state_dict())}
        if self.average.taken:
            tensors["average"] = copied(self.average.state())
            if self.done():  # the averaged weights are the result
                tensors["last"] = weights
                weights = weights | copied(self.average.tensors)
        if self.scale is not None:
            tensors["loss_scale"] = copied(self.scale.state_dict())
        if isinstance(self.data, Keeper):
            tensors |= {name: copied(group) for name, group in self.data.kept().items()}
        report = self.report.state()
        numbers = {
            "step": self.step,
            "rewinds": self.rewinds,
            "position": self.data.position,
            "watch": self.watch.state(),
            "report": report,
            "recipe": self.recipe.dump(),
            "init": self._origin,
            "life": self.life,
        }
        learned = {"steps": self.step, "tokens": report["tokens"]}
        if (loss := self.report.loss) is not None:
            learned["loss"] = round(loss, 4)
        told = self.recipe.dump()
        if self.settings.init:
            del told["model"]  # these sizes are of a model from scratch; what was trained is train.init
        stage = lineage.stage(self.name, **learned, recipe=told)
        life = [*self.life, stage]
        config, dtype = self.model.config, self.model.dtype
        self.checkpoints.save(Snapshot(self.step, config, weights, dtype, self.files, life, tensors, numbers))

    def _saved(self, step: int) -> None:
        self.report.note(f"saved step {step:,}", kind="save")

    def _restore(self, step: int) -> dict[str, Any]:
        """Become what the run was after `step`; returns the report's state of then."""
        numbers, group = self.checkpoints.read(step)
        place = self.checkpoints.path(step)
        self.data = self.data.from_position(numbers["position"])
        if isinstance(self.data, Keeper):
            self.data.restore(group)
        saved = directory.load(place, dtype=self.model.dtype, device=self.device).state_dict()
        self.model.load_state_dict(saved | group("last"))
        self.optimizer.load_state_dict(group("optimizer"))
        self.average.restore(group("average"))
        if self.scale is not None:
            self.scale.load_state_dict(group("loss_scale"))
        self.step, self.rewinds, self.life = numbers["step"], numbers["rewinds"], numbers["life"]
        self.watch.restore(numbers["watch"])
        report: dict[str, Any] = numbers["report"]
        return report

    # -- being stopped

    def __enter__(self) -> Run:
        self._handler = signal.signal(signal.SIGINT, self._stop)
        return self

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stopping:  # a second time: at once
            raise KeyboardInterrupt
        self.stopping = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._handler)
        if isinstance(self.data, Closing):
            self.data.close()
        if error is not None:
            self.report.__exit__(kind, error, trace)
            return
        try:
            self.checkpoints.wait()
            if self.done():
                self.checkpoints.finish()
        except BaseException as late:  # the last checkpoint could not be written
            self.report.__exit__(type(late), late, late.__traceback__)
            raise
        self.summary = self.report.close("finished" if self.done() else "stopped", plot=self.draws)


def _given(data: Path | None) -> Path:
    assert data is not None, "a run learns from prepared data or from a stream"
    return data


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
