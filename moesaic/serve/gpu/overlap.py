"""Overlap scheduling on a GPU: step N+1 is launched before the host knows the tokens of step N, so the GPU never waits.

`OverlapLoop` launches the next step, then processes the results of the one before it, as SGLang's overlap scheduler
does. A request whose next token is sampled on the device can be given its next step at once: only that token is
unknown, and it is already where the next step reads it. Such requests are the decode batch (`decode_batch.py`), which
needs no scheduling; the scheduler serves the others, and keeps off the decode batch because its requests are in a
forward. What the host learns one step late is that a request has finished; the rows it still had in the step after that
are discarded. All steps run in one stream, in the order in which they were launched, so pages and slots can change
hands without waiting.

Requests whose sampling params the device does not implement (a grammar, penalties, top-p, mirostat) are sampled on the
host from their logits, and take part in every second step. Draft tokens are proposed from tokens the host knows, so
while a drafter has any, steps are synchronous (`forward.py`); while it rests, they overlap.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moesaic.kernels.cuda.expected_shapes import expected_shapes
from moesaic.kernels.cuda.fused_forward import FusedForward, StepWeights, outside
from moesaic.kernels.cuda.graphed_step import GraphedSteps, LaunchedStep
from moesaic.kernels.cuda.step_inputs import ChunkRows, StepInputs
from moesaic.kernels.wrapped import WrappedKernels
from moesaic.model.block import Block
from moesaic.model.layout import Span
from moesaic.model.rope import position_angles
from moesaic.model.transformer import Model
from moesaic.serve.core.forward_pass import Chunk, Forward, ForwardPass, Runner
from moesaic.serve.core.request import Output, Request, TokenLogprob
from moesaic.serve.core.sampler import Sampler
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.gpu.decode_batch import DecodeBatch, Slot, Slots
from moesaic.serve.gpu.forward import GraphedForward, rows_of, token_logprob

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine

logger = logging.getLogger("moesaic.serve")


@dataclass
class ChunkInFlight:
    """A chunk of a request outside the decode batch, in a step that was launched."""

    slot: Slot
    span: Span
    last: bool  # whether all known tokens of the request are then computed
    row: int | None  # of the sampled tokens, if one is sampled
    logits: int | None = None  # its row of the logits kept for sampling on the host


@dataclass
class InFlightStep:
    launched: LaunchedStep
    batch: list[Slot]  # the decode batch: one row each, the first rows of the step
    chunks: list[ChunkInFlight]
    version: int
    logits_XV: Tensor | None
    routes_LTK: Tensor | None


def step_weights(model: Model) -> StepWeights:
    layers = tuple(block.weights() for block in model.layers if isinstance(block, Block))
    return StepWeights(model.embed, layers, model.norm.weights(), model.output)


class OverlapLoop(Runner):
    verifies_trees = False
    takes_windows = False

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        model, counts = engine.model, engine.experts.counts
        rope = position_angles(model.config, engine.max_length, model.device)
        layer_counts = [counts[start:] for start in engine.experts.starts.values()]
        forward = FusedForward(
            step_weights(model), engine.cache.layers, rope, layer_counts, expand_prompts=model.mode != "invariant"
        )
        self.steps = GraphedSteps(forward, engine.cache.page_size, engine.scheduler.max_requests, counts)
        engine.page_pool.prompts_only = forward.tiling.prompt_rows > 0
        self.slots = Slots(engine.scheduler.max_requests)
        self.batch = DecodeBatch(engine.page_pool)
        self.in_flight: deque[InFlightStep] = deque()
        self.version = engine.version
        self.addresses = self._addresses()
        self.last_decoded: float | None = None  # when the results of a step of the decode batch alone were processed
        # A step makes thousands of small objects, and collections that walk the whole program would stop the device.
        # What an earlier engine froze is looked at once more: if that is gone, its memory is.
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    @staticmethod
    def outside(engine: Engine) -> str | None:
        """Why steps are no CUDA graphs; None if they are. Policies that stop a forward between two layers, and pruned
        caches, are for plain blocks; so is whatever stands in for the kernels, or comes between layers."""
        model, policy = engine.model, engine.scheduler.policy
        blocks = [block for block in model.layers if isinstance(block, Block)]
        reasons = {
            "the reference kernels": model.mode == "reference",
            "dynamic NTK scaling of RoPE": model.config.rope.kind == "dynamic",
            "layers that keep a state of each sequence": model.config.has_states,
            "layers of a form that the kernels of a step do not know": not all(block.fusible for block in blocks),
            "offloaded layers or experts": any(block._forward_pre_hooks for block in model.layers),
            "kernels that stand in for plain ones": isinstance(model.ops, WrappedKernels),
            "a KV cache policy": engine.page_pool.store is not None,
            f"the scheduling policy {type(policy).__name__}": not isinstance(policy, Chunked),
        }
        return next((name for name, holds in reasons.items() if holds), None) or outside(step_weights(model))

    def warm_up(self) -> None:
        """Compile and capture all steps that are to be expected: else the first of a kind makes everybody wait."""
        scheduler = self.engine.scheduler
        assert isinstance(scheduler.policy, Chunked)
        expected = expected_shapes(
            scheduler.max_requests, scheduler.policy.tokens, self.engine.max_length, self.steps.tiling
        )
        with contextlib.suppress(torch.cuda.OutOfMemoryError):  # then they compile as they come
            self.steps.compile(expected)
        for number, shape in enumerate(expected):
            try:
                self.steps.prepare(shape)
            except torch.cuda.OutOfMemoryError:
                logger.warning("no memory for %d of %d CUDA graphs", len(expected) - number, len(expected))
                return

    # The loop

    def queued_outputs(self) -> list[Output] | None:
        """Launch step N+1, then process the results of step N. None, where the next step is to be synchronous."""
        engine, start = self.engine, self.engine.clock()
        scheduler = engine.scheduler
        needs_blocks = scheduler.stopped or not all(map(self._adapts, scheduler.requests.values()))
        if engine.paused:
            return self._process_all()
        outputs = self._follow_weights()
        if needs_blocks or self._drafting():
            return outputs + self._drain() or None
        self.batch.drop_finished()
        chunks = self._beside_the_batch(start) if self.batch.grow() else None
        if chunks is None:  # not enough pages for all: the scheduler must preempt some
            outputs += self._drain()
            work = scheduler.schedule(start)
            assert isinstance(work, list)
            chunks = work
        launches = bool(chunks or self.batch.slots)
        if launches:
            self.in_flight.append(self._launch(chunks))
        outputs += self._process_all(but=1 if launches else 0)
        if launches or outputs:
            engine.counts.busy_seconds += engine.clock() - start
        return outputs

    def _drafting(self) -> bool:
        """Draft tokens need the host to know all tokens."""
        drafter = self.engine.drafter
        return drafter is not None and not drafter.rests(len(self.engine.scheduler.requests))

    def _beside_the_batch(self, now: float) -> list[Chunk] | None:
        """Chunks of requests outside the decode batch; None, where that is empty too and there are no pages."""
        scheduler, batch = self.engine.scheduler, self.batch.slots
        if len(scheduler.requests) == len(batch):
            return []
        policy = scheduler.policy
        assert isinstance(policy, Chunked)
        ready = scheduler.ready()
        left = policy.tokens - len(batch)
        beside_others = any(not request.scores_prompt for request in scheduler.requests.values())
        plan = Chunked(left).plan(ready, beside_others) if left > 0 else []
        chunks = scheduler.find_pages(plan)
        return None if plan and not chunks and not batch else chunks

    def _process_all(self, but: int = 0) -> list[Output]:
        """Results of the steps in flight but for the last."""
        outputs: list[Output] = []
        while len(self.in_flight) > but:
            self._process_results(self.in_flight.popleft(), outputs)
        return outputs

    def _drain(self) -> list[Output]:
        """Process all results, and give the requests of the decode batch to the scheduler."""
        outputs = self._process_all()
        for slot in self.batch.slots:
            slot.request.end_forward()
        self.batch.clear()
        self.last_decoded = None
        return outputs

    # Synchronous steps, with draft tokens to verify

    def run(self, work: list[Chunk] | ForwardPass) -> Forward | None:
        return self.forward(work) if isinstance(work, list) and work and self.takes(work) else super().run(work)

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a synchronous forward can be a CUDA graph: draft tokens in a line, adapters of what graphs adapt."""
        lines = all(chunk.draft is None or chunk.draft.is_line for chunk in chunks)
        return lines and all(self._adapts(chunk.request) for chunk in chunks)

    def forward(self, chunks: list[Chunk]) -> GraphedForward:
        engine, start = self.engine, self.engine.clock()
        rows = []
        for chunk in chunks:
            slot = self._slot(chunk.request)
            if pages := slot.new_pages():
                self.steps.give_pages(pages)
            rows.append(rows_of(chunk, slot, sampled=chunk.rows - chunk.tokens + 1 if chunk.last else 0))
        inputs = self._inputs(rows, [chunk.request for chunk in chunks])
        captured = inputs.shape in self.steps.graphs
        made = GraphedForward(chunks, engine, self.steps.launch(inputs))
        made.usual, made.seconds = captured, engine.clock() - start
        engine.counts.busy_seconds += made.seconds
        return made

    # Launching a step

    def _slot(self, request: Request) -> Slot:
        slot = self.slots.of(request)
        in_use = {one.adapter for one in self.engine.scheduler.requests.values() if one.adapter is not None}
        self.steps.give_adapter(slot.index, request.adapter, in_use | set(self.engine.adapters.values()))
        return slot

    def _inputs(self, rows: list[ChunkRows], requests: Sequence[Request]) -> StepInputs:
        """Steps without an adapter are graphs of their own: nobody pays for another's."""
        adapted = any(request.adapter is not None for request in requests)
        most = self.engine.scheduler.max_requests
        return StepInputs.of(self.batch.rows(), rows, most, self.steps.tiling, adapted)

    def _adapts(self, request: Request) -> bool:
        return request.adapter is None or self.steps.adapters.takes(request.adapter)

    def _launch(self, chunks: Sequence[Chunk]) -> InFlightStep:
        batch = self.batch.slots
        rows: list[ChunkRows] = []
        parts: list[ChunkInFlight] = []
        row = sampled = len(batch)
        for chunk in chunks:
            request, start = chunk.request, chunk.request.computed
            slot = self._slot(request)
            slot.changed = True
            new = rows_of(chunk, slot, sampled=chunk.last and not request.embed)
            rows.append(new)
            span = Span(len(parts), row, row + chunk.tokens, start)
            parts.append(ChunkInFlight(slot, span, chunk.last, sampled if new.sampled else None))
            row += chunk.tokens
            sampled += new.sampled
        changed = [part.slot for part in parts] + [slot for slot in batch if slot.changed]
        if pages := {place: page for slot in changed for place, page in slot.new_pages().items()}:
            self.steps.give_pages(pages)
        inputs = self._inputs(rows, [slot.request for slot in batch] + [chunk.request for chunk in chunks])
        launched = self.steps.launch(inputs)
        kept = self._keep(launched, parts, chunks, batch)
        step = InFlightStep(launched, list(batch), parts, self.engine.version, *kept)
        self.batch.advance()
        for chunk, part in zip(chunks, parts, strict=True):
            self._advance(chunk, part)
        return step

    def _keep(
        self, launched: LaunchedStep, parts: list[ChunkInFlight], chunks: Sequence[Chunk], batch: list[Slot]
    ) -> tuple[Tensor | None, Tensor | None]:
        """What the host needs of a step besides tokens must be copied before the next one overwrites it."""
        if any(chunk.request.embed or chunk.request.sampling.prompt_logprobs is not None for chunk in chunks):
            self.engine.record_prompt(chunks, [part.span for part in parts], launched.hidden_TD)
        by_host = [part for part in parts if part.row is not None and not part.slot.on_device]
        for number, part in enumerate(by_host):
            part.logits = number
        rows = [part.row for part in by_host]
        logits_XV = launched.logits_RV[torch.tensor(rows, device=launched.logits_RV.device)] if rows else None
        slots = [*batch, *(part.slot for part in parts)]
        recorded = any(slot.request.sampling.record_routes for slot in slots)
        return logits_XV, launched.routes_LTK.clone() if recorded else None

    def _advance(self, chunk: Chunk, part: ChunkInFlight) -> None:
        """The request is where it will be when the step has run; only the token it samples is not known yet."""
        request, counts = chunk.request, self.engine.counts
        counts.prompt_tokens += max(0, min(chunk.tokens, len(request.prompt) - request.computed))
        request.computed += chunk.tokens
        if part.last:  # until its token is there, or as long as it is in the decode batch
            request.begin_forward()
        if part.row is not None and part.slot.on_device and request.computed + 1 < request.limit:
            self.batch.join(part.slot, request.computed)
        if chunk.tokens > 1:
            self.engine.page_pool.publish(request)
            part.slot.changed = True  # a page that another request has filled too is replaced by that one

    # Processing its results

    def _process_results(self, step: InFlightStep, outputs: list[Output]) -> None:
        engine, page_size = self.engine, self.engine.page_pool.size
        sampled_R = list(zip(*step.launched.wait(), strict=True))
        engine.counts.steps += 1
        if engine.drafter is not None:
            now = engine.clock()
            if self.last_decoded is not None and not step.chunks:
                engine.drafter.rested(len(step.batch), now - self.last_decoded)
            self.last_decoded = None if step.chunks else now
        for row, (slot, found) in enumerate(zip(step.batch, sampled_R)):
            request = slot.request
            if self._is_wanted(slot, step):
                if step.routes_LTK is not None:
                    self._record_routes(request, step.routes_LTK[:, row : row + 1])
                request.computed += 1
                outputs.append(self._accept(slot, token_logprob(request, *found), step.version))
                if request.computed % page_size == 0 and request.pages:
                    engine.page_pool.publish(request)
                    slot.changed = True
        sampler = Sampler(step.logits_XV) if step.logits_XV is not None else None
        for part in step.chunks:
            request = part.slot.request
            if not self._is_wanted(part.slot, step):
                continue
            if step.routes_LTK is not None:
                self._record_routes(request, step.routes_LTK[:, part.span.start : part.span.stop])
            if part.last:
                chosen = None
                if part.logits is not None and sampler is not None:
                    chosen = sampler.sample(part.logits, request, engine.stop_tokens)
                elif part.row is not None:
                    chosen = token_logprob(request, *sampled_R[part.row])
                outputs.append(self._accept(part.slot, chosen, step.version))

    def _is_wanted(self, slot: Slot, step: InFlightStep) -> bool:
        """Whether a request still needs what a step computed for it."""
        request = slot.request
        if request.finish_reason is not None:
            request.end_forward()
            self.engine.retire(request)
            return False
        if not slot.taken:  # it was preempted meanwhile
            return False
        if step.version < self.engine.oldest:
            request.end_forward()
            self.engine.restart(request)
            return False
        return True

    def _accept(self, slot: Slot, chosen: TokenLogprob | None, version: int) -> Output:
        request = slot.request
        if chosen is None:  # an embedding, which needs its prompt only
            request.finish_reason = "stop"
            output = Output(request, [], "", [])
        else:
            output = Output(request, [chosen.token], request.append(chosen.token, self.engine.stop_tokens), [chosen])
        self.engine.record_output(output, version)
        if request.finish_reason is not None:
            request.end_forward()
            self.engine.retire(request)
        elif not slot.in_batch:
            request.end_forward()
        return output

    def _record_routes(self, request: Request, routes_LTK: Tensor) -> None:
        if request.sampling.record_routes:
            for layer, routes_TK in zip(self.engine.experts.starts, routes_LTK, strict=True):
                request.routes.setdefault(layer, []).append(routes_TK.long())

    # Weights

    def _follow_weights(self) -> list[Output]:
        """Weights that were changed in place are read by the next step; moved ones need new graphs. Requests of the
        decode batch are restarted, if they are to be, like all others."""
        engine, outputs = self.engine, []
        if self.version != engine.version:
            if self.version < engine.oldest:
                batch = list(self.batch.slots)
                outputs = self._drain()
                for slot in batch:
                    if slot.taken and slot.request.finish_reason is None:
                        engine.restart(slot.request)
            self.version = engine.version
            before, self.addresses = self.addresses, self._addresses()
            if before != self.addresses:
                self.steps.move_weights(step_weights(engine.model))
        return outputs

    def _addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self.engine.model.parameters())
