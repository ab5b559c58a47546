"""A training run: everything the loop needs, built from a recipe, or resumed from its last checkpoint."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from moesaic.data.rehearsal import open_tokens
from moesaic.data.stream import Batch, ClosableStream, Stream, TokenStream
from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.model import lineage
from moesaic.model.context import Routing
from moesaic.model.flops import training_flops
from moesaic.model.transformer import LayerRunner, Model
from moesaic.parallel.offload.activations import saved_activations
from moesaic.parallel.pipeline.step import Step
from moesaic.parallel.world import World
from moesaic.phases import PhaseClock
from moesaic.recipe import Recipe
from moesaic.train import init, state
from moesaic.train.adversarial import adversarial
from moesaic.train.averaging import WeightAverage
from moesaic.train.balance import Balance
from moesaic.train.checkpoints import Checkpoints
from moesaic.train.compile import compile_blocks
from moesaic.train.constraints import Constraint, Unconstrained
from moesaic.train.consumed import Consumed, fit_tokens
from moesaic.train.held_out_loss import held_out_measure
from moesaic.train.indexers import IndexerTraining
from moesaic.train.init import InitialModel
from moesaic.train.layer_runners.compose import LayerRunners
from moesaic.train.loss_scale import LossScale
from moesaic.train.objectives import Loss
from moesaic.train.optimizers import OptimizerMethod, StepResult
from moesaic.train.report.mfu import peak_flops
from moesaic.train.report.report import Report, StepRecord
from moesaic.train.report.silent import SilentReport
from moesaic.train.resume import fingerprint, record_dtype, run_dtype, steps_done
from moesaic.train.sharded_checkpoints import ShardedCheckpoints
from moesaic.train.spike_detection import SpikeDetector
from moesaic.train.validate import check_whole, fit_to_data, fit_warmup, rates
from moesaic.units import readable_bytes

if TYPE_CHECKING:
    from moesaic.parallel.ranks import Ranks


class Run:
    """`Run(recipe, out, data)` is a new run or, if `out` holds one, resumes it.

    Other parts than the recipe's can be given: `initial`, the model with its files and its life so far; `stream`, which
    makes the batches for the model; `measure`, the evaluation every `train.evaluate_every` steps; `world`, the other
    ranks, by default none and the GPU if there is one; `phases`, of which each step's seconds are recorded.
    """

    plots = True  # training.png, at the end

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        data: Path | None = None,
        *,
        quiet: bool = False,
        name: str = "train",
        initial: InitialModel | None = None,
        stream: Callable[[Model], Stream] | None = None,
        measure: Callable[[Model], dict[str, float]] | None = None,
        world: World | None = None,
        phases: Sequence[str] = (),
    ) -> None:
        recipe, shortened = fit_warmup(fit_tokens(recipe))
        self.recipe, self.out, self.settings, self.name = recipe, out, recipe.train, name
        self.world = world or World(hardware.device())
        self.device = self.world.device
        torch.set_num_threads(hardware.threads())
        self.step, self.rewinds, self.stopping = 0, 0, False
        self._copied = False  # whether a copy was kept yet
        self._frozen = False  # whether the current batch updates nothing

        done = steps_done(recipe, out, name)
        self.origin = fingerprint(recipe.train.init)
        before = run_dtype(out)
        self.model, self.files, self.life = initial or init.model(recipe, _given(data), self.world, before)
        self.checkpoints = self._checkpoints()
        self.data: Stream = stream(self.model) if stream else self._tokens(_given(data))
        recipe, ends = fit_to_data(recipe, self.data)
        self.recipe, self.settings = recipe, recipe.train
        self.objective = adversarial(recipe, self.world.ranks)
        self.objective.prepare(self.model)
        method = recipe.build("optimizer", OptimizerMethod)
        self.peak = method.lr
        check_whole(recipe, self.world.ranks)
        self.offloaded = self.settings.offload is not None and self.settings.offload.optimizer is not None
        self.exchanges = method.reduces_gradients and self.world.ranks > 1  # the optimizer, in place of gradients
        group = self.world.data_group if self.exchanges else None
        self.optimizer = method.build(self.model.named_parameters(), group, self.settings.offload)
        self.constraint = self._constraint()
        self.saved_activations = saved_activations(self.settings.offload, self.model)
        if self.world.ranks > 1 and not self.exchanges:
            self.optimizer.norm = partial(self.world.norm, self.model)  # type: ignore[method-assign]
        self.scale = LossScale(device=self.device) if self.model.dtype == torch.float16 else None
        self.rates = rates(recipe)
        self.measure = measure or held_out_measure(self.data, recipe, self.world)
        self.balance = Balance(self.model, recipe.balance, self.world.add_up_counts)
        self.indexers = IndexerTraining(self.settings, self.model, self.world.ranks)
        self.spike_detector = self._spike_detector()
        self.average = WeightAverage(self.settings.average, self.settings.steps)
        self.layer_runners = LayerRunners(self.settings, self.model.config)
        self.consumed = Consumed.of(recipe, self.layer_runners.cost, text=stream is None)
        if self.settings.recompute and self.world.pipeline is not None and self.world.pipeline.recompute is not None:
            self.layer_runners.innermost = self.world.pipeline.recompute
        one_size = stream is None and not self.settings.token_drop  # of all batches
        plain = one_size and self.settings.constraint is None
        if self.device.type == "cuda" and plain and self.world.ranks == 1:
            compile_blocks(self.model)
        in_memory = self.world.redundancy.newest() if self.world.redundancy is not None else 0
        report_state = state.recall(self, in_memory) if in_memory > done else self._restore(done) if done else None
        if not done and self.world.is_main:
            record_dtype(out, self.model.dtype)
        flops = peak_flops(self.device, self.model.dtype)
        self.report = (
            Report(
                out,
                self.settings.steps,
                self.step,
                state=report_state,
                peak_flops=flops * self.world.ranks if flops else flops,
                quiet=quiet,
                again=self.world.restarted,
            )
            if self.world.is_main
            else SilentReport()
        )
        kind = str(self.model.dtype).removeprefix("torch.")
        self.report.note(f"dtype {kind}, {init.why(recipe, before)}", kind="dtype", dtype=kind)
        if shortened:
            self.report.note(
                f"{self.settings.steps} steps in all: warmup shortened to {self.settings.warmup_steps} steps"
            )
        if not self.step and isinstance(self.data, TokenStream):
            for warning in self.data.plan.warnings:
                self.report.note(warning, kind="warning")
        if ends:
            self.report.note(f"the data ends after {self.settings.steps:,} steps, and the run with it")
        self.phases = PhaseClock(phases, self.device)
        self._clock = time.perf_counter()

    def _tokens(self, data: Path) -> TokenStream:
        return open_tokens(data, self.recipe, self.out / "memory", self.world.data_rank, self.world.data_ranks)

    def _spike_detector(self) -> SpikeDetector:
        return SpikeDetector(self.settings.spike.sigmas, self.settings.spike.patience)

    def _constraint(self) -> Unconstrained:
        if self.settings.constraint is None:
            return Unconstrained()
        return self.recipe.build("train.constraint", Constraint).build(self.model, self.optimizer, self.settings.steps)

    # -- a step, in the order of the loop

    def next_batch(self) -> Batch:
        with self.world.doing("data", step=self.step + 1):
            batch = next(self.data)
        if isinstance(self.data, TokenStream) or self.world.data_ranks == 1:
            return batch
        return batch.share(self.world.data_rank, self.world.data_ranks)  # every rank has read all of it

    def forward_backward(self, batch: Batch) -> Loss:
        """Gradients of the whole batch, accumulated over micro-batches to save memory; the sum of their losses."""
        self.optimizer.zero_grad()
        self._frozen = batch.frozen
        self.objective.begin_step(self.step, self.settings.steps)
        self.indexers.begin_step(self.step)
        runner = self.layer_runners.runner(self.step)
        parts = batch.parts(self.settings.accumulate, self.device)
        self.optimizer.expect(len(parts), self.rate(self.step))
        whole = self._pipelined(batch, parts, runner) or self._accumulated(batch, parts, runner)
        with self.world.doing("reduce"):
            if not batch.frozen and not self.exchanges:
                self.world.reduce_gradients(self.model)
            found = self.world.add_up({"total": whole.total, **whole.parts})
        return Loss(found.pop("total"), found)

    def _accumulated(self, batch: Batch, parts: list[Batch], runner: LayerRunner) -> Loss:
        whole = Loss(torch.zeros((), device=self.device))
        for number, part in enumerate(parts):
            routing = self.indexers.routing(self.balance.routing())
            forward = self.world.doing("forward", micro_batch=number, lengths=part.lengths)
            with forward, torch.set_grad_enabled(not batch.frozen), self.saved_activations:
                loss = self.objective(self.model, part, routing, runner)
                share = len(part.tokens_T) / batch.all_tokens
                extra, taught = self._balance_losses(routing, share), self.indexers.losses(routing, share)
            total = sum((*extra.values(), *taught.values()), loss.total)
            if not batch.frozen:
                with self.world.doing("backward", micro_batch=number):
                    (total if self.scale is None else self.scale.apply(total)).backward()
                if not self.indexers.freezing:
                    self.balance.count(routing)
            whole.total += loss.total.detach()
            named = {f"loss/{name}": value for name, value in (loss.parts | taught).items()} | loss.notes
            extra = {f"balance/{name}": value / self.world.row_ranks for name, value in extra.items()}
            for name, value in (named | extra).items():
                so_far = whole.parts.get(name, torch.zeros((), device=self.device))
                largest = name.endswith("_max")
                whole.parts[name] = torch.maximum(so_far, value.detach()) if largest else so_far + value.detach()
        return whole

    def _pipelined(self, batch: Batch, parts: list[Batch], runner: LayerRunner) -> Loss | None:
        """The same where layers lie on several ranks."""
        if self.world.pipeline is None:
            return None
        share = len(batch.tokens_T) / batch.all_tokens  # of this rank's data
        with self.world.doing("pipeline"):
            found = self.world.pipeline.forward_backward(
                Step(
                    parts,
                    self.objective,
                    runner=runner,
                    routing=self.balance.routing,
                    extra=lambda routing, part: self._balance_losses(routing, part * share),
                    count=self.balance.count,
                    scale=self.scale.apply if self.scale is not None else lambda loss: loss,
                    frozen=batch.frozen,
                )
            )
        shown = {
            name: value / self.world.row_ranks if name.startswith("balance/") else value
            for name, value in found.parts.items()
        }
        return Loss(found.total, shown)

    def _balance_losses(self, routing: Routing, share: float) -> dict[str, Tensor]:
        return self.balance.losses(self.world.whole_routing(routing), share)

    def rate(self, step: int) -> float:
        """The learning rate of the step after step `step`, as a share of the peak."""
        return float(self.rates[self.consumed.place(step)])

    def optimizer_step(self) -> StepResult:
        value = None if self.scale is None else self.scale.value
        if self._frozen:
            none = torch.zeros((), device=self.device)
            result = StepResult(none, none.bool(), self.optimizer.updates.clone())
        else:
            with self.world.doing("optimizer"):
                result = self.optimizer.step(self.rate(self.step), clip=self.settings.clip, loss_scale=value)
        if self.scale is not None and not self._frozen:
            self.scale.update(result.skipped)
        self.step += 1
        if self.constraint.after_step(self.step, self.peak * self.rate(self.step - 1)):
            self.spike_detector = self._spike_detector()
        self.average.update(self.step, self.model)
        return result

    def log_step(self, batch: Batch, loss: Loss, result: StepResult, loads: dict[int, Tensor]) -> None:
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        lr = self.peak * self.rate(self.step - 1)
        self.stopping, loads = self.world.any(self.stopping), self.world.all_loads(loads)
        parts: dict[str, Tensor | float] = dict(loss.parts)
        parts |= batch.notes | self.phases.take(seconds)
        parts |= self.constraint.notes()
        measure = self.measure if self.measure is not None and self.due_to_evaluate() else None
        if measure is not None:
            with self.world.doing("evaluate"), self.world.evaluating(self.model):
                parts |= measure(self.model)
            self._clock = time.perf_counter()  # evaluation does not count as a step's time
            self.phases.take(0.0)
        tokens, flops = batch.all_tokens, training_flops(self.model.config, batch.all_lengths)
        self.report.step(
            StepRecord(self.step, loss.total, lr, tokens, seconds, result.norm, result.skipped, flops, parts, loads)
        )
        if measure is not None:
            for sample in batch.samples:
                self.report.note(sample, kind="sample")
            batch.samples.clear()  # once: further steps may be taken from the same rollouts
        for warning in batch.warnings:
            self.report.note(warning, kind="warning")
        self.world.after_step(self.model, self.report.note)
        self.checkpoints.poll()

    def rewind(self) -> None:
        """Back to the last good checkpoint, but past the data that came since, which may have caused the spike."""
        spike, position = self.step, self.data.position
        lost = self.spike_detector.lost
        what = f"{lost} consecutive steps were not finite" if lost > self.spike_detector.high else "the loss spiked"
        self.checkpoints.wait()
        self.world.barrier()  # now the last checkpoint is there for every rank
        # A loss is read a step late, and is high from the step after the update that broke the weights.
        broke = spike - self.spike_detector.bad - 1
        steps = [step for step in self.checkpoints.steps() if step < broke]
        if not steps or self.rewinds >= self.settings.spike.max_rewinds:
            when = f"after {self.rewinds} rewinds" if steps else "before the first checkpoint to rewind to"
            problem = f"{what} at step {spike}, {when}"
            raise UserError(self.out, problem, "Lower the learning rate, or look at the data.")
        rewinds, life = self.rewinds + 1, self.life
        self.world.barrier()  # every rank has seen the same checkpoints
        if self.world.redundancy is not None:
            self.world.redundancy.forget()
        if self.world.is_main:
            self.checkpoints.forget(after=steps[-1])
        self.world.barrier()
        report_state = self._restore(steps[-1])
        self.data = self.data.skip(position)
        self.rewinds, self.life = rewinds, [*life, lineage.stage("rewind", spiked_at=spike, back_to=self.step)]
        self.report.rewind(self.step, report_state, f"{what} at step {spike}")

    def due_to_evaluate(self) -> bool:
        return self.step % self.settings.evaluate_every == 0 or self.done()

    def due_to_save(self) -> bool:
        # A checkpoint that may be inside a spike must not replace one that is not.
        return self.finished() or (self.step % self.settings.save_every == 0 and not self.spike_detector.bad)

    def finished(self) -> bool:
        return self.done() or self.stopping

    def done(self) -> bool:
        """Whether all steps are taken, or the data is exhausted: a rewind skips some of it."""
        return self.step >= self.settings.steps or (isinstance(self.data, TokenStream) and self.data.exhausted)

    # -- checkpoints

    def _checkpoints(self) -> Checkpoints:
        kept = self.out, self.settings.keep_last, self.settings.keep_every, self._saved
        if self.world.ranks == 1:
            return Checkpoints(*kept)
        made = ShardedCheckpoints(cast("Ranks", self.world), *kept)
        made.owned(self.model.state_dict())
        return made

    def save(self) -> None:
        with self.world.doing("save", patient=True):
            self.optimizer.bring_together()
            self.checkpoints.save(state.snapshot(self))
            if self.offloaded:  # what is written is the state itself
                self.checkpoints.wait()

    def keep_copy(self) -> None:
        if self.world.redundancy is not None:
            with self.world.doing("copy"):
                size = self.world.redundancy.keep(self.step, state.numbers(self), state.tensors_between_steps(self))
            if not self._copied:
                self.report.note(f"{readable_bytes(size)} of state in memory after each step", kind="copy", bytes=size)
            self._copied = True

    def _saved(self, step: int) -> None:
        self.report.note(f"checkpoint of step {step:,} saved", kind="save")

    def _restore(self, step: int) -> dict[str, Any]:
        """Restore the run as it was after `step`; returns the report's state of that step."""
        numbers, group = self.checkpoints.read(step)
        self.world.load(self.model, self.checkpoints.path(step))
        return state.restore(self, numbers, group)

    # -- Ctrl-C

    def __enter__(self) -> Run:
        self._handler = signal.signal(signal.SIGINT, self._stop)
        self.phases.__enter__()
        return self

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stopping:  # the second Ctrl-C stops at once
            raise KeyboardInterrupt
        self.stopping = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._handler)
        self.phases.__exit__()
        if isinstance(self.data, ClosableStream):
            self.data.close()
        if error is not None:
            self.report.__exit__(kind, error, at)
            return
        try:
            self.checkpoints.wait()
            if self.done() and self.world.is_main:
                self.checkpoints.finish()
        except BaseException as late:  # the last checkpoint could not be written
            self.report.__exit__(type(late), late, late.__traceback__)
            raise
        self.summary = self.report.close("finished" if self.done() else "stopped", plot=self.plots)
        if self.stopping and self.done():  # pressed in the last step: it is meant for what comes after
            signal.raise_signal(signal.SIGINT)


def _given(data: Path | None) -> Path:
    assert data is not None, "a run trains on prepared data or on a stream"
    return data
