"""One step of generation as one CUDA graph: tokens in, a forward of few kernels, the sampled tokens out.

    steps = GraphedSteps(forward, page_size=16, max_sequences=512, counts=...)
    steps.give_pages({(slot, 3): page})
    launched = steps.launch(inputs)         nothing waits
    tokens, logprobs, drawn = launched.wait()

A step is any mixture of prefill and decode: rows of (token, slot of its sequence, position), after some of which a
token is sampled. A row's token may be left open: it is then the last one sampled for its slot, on the device, so that
a step can be launched before the host knows what came out of the one before it.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.kernels.cuda.device_adapters import DeviceAdapters, LoadedAdapter
from moesaic.kernels.cuda.fused_forward import FusedForward, StepWeights, adaptable_sites
from moesaic.kernels.cuda.step_inputs import StepInputs, StepShape, views
from moesaic.kernels.triton.attention.paged import SPLIT
from moesaic.kernels.triton.attention.paged_rows import Rows
from moesaic.kernels.triton.attention.prompt_rows import Prompts
from moesaic.kernels.triton.compile_ahead import compile_launches
from moesaic.kernels.triton.sample import sample

DTYPES: dict[type, torch.dtype] = {np.int32: torch.int32, np.float32: torch.float32, np.float64: torch.float64}
BUFFERS = 4  # so many steps may be in flight before their host buffers are used again; the engine launches two


@contextmanager
def no_collection() -> Iterator[None]:
    """Graphs that nobody needs any more must not be collected while another is captured: that breaks the capture."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@dataclass(frozen=True)
class LaunchedStep:
    """A step that was launched. Its sampled tokens are on their way to the host, and there after `wait`; hidden states,
    logits and routes are the graph's own, and hold until a step of the same shape is launched."""

    hidden_TD: Tensor
    logits_RV: Tensor
    routes_LTK: Tensor
    results_3R: np.ndarray
    copied: torch.cuda.Event | None

    def wait(self) -> tuple[list[int], list[float], list[float]]:
        """Tokens, and their log-probabilities under the model and as they were drawn."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens_R, plain_R, drawn_R = self.results_3R
        return tokens_R.tolist(), plain_R.view(np.float32).tolist(), drawn_R.view(np.float32).tolist()


@dataclass
class CapturedStep:
    """One shape of step: its graph, and the buffers it reads and writes."""

    inputs: Tensor
    outputs: tuple[Tensor, Tensor, Tensor, Tensor]  # hidden states, logits, routes, results
    graph: torch.cuda.CUDAGraph | None
    to_device: list[Tensor]
    to_host: list[Tensor]
    buffer: int = 0


class GraphedSteps:
    """Steps over one paged cache, for up to `max_sequences` slots; a graph is captured when a shape first comes up.

    `counts` is how often each expert was chosen, of which each mixture layer has its part in `forward.counts`.
    """

    def __init__(self, forward: FusedForward, page_size: int, max_sequences: int, counts: Tensor) -> None:
        self.forward, self.counts, self.tiling = forward, counts, forward.tiling
        device = counts.device
        pages = -(-forward.max_length // page_size)
        self.sampled_S = torch.zeros(max_sequences, dtype=torch.int32, device=device)
        self.page_table_SP = torch.zeros(max_sequences, pages, dtype=torch.int32, device=device)
        self.adapters = DeviceAdapters(max_sequences, adaptable_sites(forward.weights), device)
        forward.adapters = self.adapters.matrices
        self.sample = forward.one_of_each()  # runs before each capture, in which nothing may be compiled or loaded
        self.graphs: dict[StepShape, CapturedStep] = {}
        self.pool: Any = None
        self.real = device.type == "cuda"  # elsewhere, in tests, steps run as they come
        self.stream = torch.cuda.Stream() if self.real else None  # of captures: one, or they would share no memory

    def give_pages(self, pages: dict[tuple[int, int], int]) -> None:
        """Entries (slot, number of the page in its sequence) of the page table that are new or changed."""
        width = self.page_table_SP.shape[1]
        both = torch.tensor([[slot * width + number for slot, number in pages], list(pages.values())])
        at, page = (both.pin_memory() if self.real else both).to(self.page_table_SP.device, non_blocking=True)
        self.page_table_SP.view(-1).index_copy_(0, at, page.to(torch.int32))

    def give_adapter(self, slot: int, adapter: LoadedAdapter | None, in_use: Collection[LoadedAdapter]) -> None:
        """A sequence's LoRA adapter. Graphs hold the addresses of the tables too."""
        moves = self.adapters.moves
        self.adapters.assign(slot, adapter, in_use)
        if self.adapters.moves != moves:
            if self.real:
                torch.cuda.synchronize()  # a graph is not taken away while it runs
            self.graphs = {shape: captured for shape, captured in self.graphs.items() if not shape.adapted}
            self.sample = self.forward.one_of_each()

    def move_weights(self, weights: StepWeights) -> None:
        """Graphs hold the addresses of weights; after those have moved, none is right."""
        self.forward.weights = weights
        self.sample = self.forward.one_of_each()
        self.graphs.clear()
        self.pool = None  # it went with them

    def launch(self, inputs: StepInputs) -> LaunchedStep:
        """The pages the step writes to must have been given."""
        captured = self.prepare(inputs.shape)
        buffer = captured.buffer = (captured.buffer + 1) % BUFFERS
        captured.to_device[buffer].numpy()[:] = inputs.words
        captured.inputs.copy_(captured.to_device[buffer], non_blocking=True)
        if captured.graph is not None:
            captured.graph.replay()
            hidden_TD, logits_RV, routes_LTK, results_3R = captured.outputs
        else:
            hidden_TD, logits_RV, routes_LTK, results_3R = self.step(inputs.shape, captured.inputs, self.forward)
        captured.to_host[buffer].copy_(results_3R, non_blocking=True)
        copied = None
        if self.real:
            copied = torch.cuda.Event()
            copied.record()
        return LaunchedStep(hidden_TD, logits_RV, routes_LTK, captured.to_host[buffer].numpy(), copied)

    def compile(self, shapes: Sequence[StepShape]) -> None:
        """All kernels of all these steps, at once: captured one by one, they are compiled one by one."""

        def launch_all() -> None:
            for shape in shapes:
                words, _ = StepInputs.padding(shape)
                self.step(shape, torch.from_numpy(words).to(self.counts.device), self.sample)

        if self.real:
            compile_launches(launch_all, self.counts.device)

    def prepare(self, shape: StepShape) -> CapturedStep:
        captured = self.graphs.get(shape)
        if captured is None:
            captured = self.graphs[shape] = self.capture(shape)
        return captured

    def capture(self, shape: StepShape) -> CapturedStep:
        words, _ = StepInputs.padding(shape)  # a step of nothing else compiles everything and changes nothing
        inputs = torch.from_numpy(words).to(self.counts.device)
        counts_before = self.counts.clone()
        outputs = self.step(shape, inputs, self.sample)
        self.counts.copy_(counts_before)
        graph = None
        if self.real:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Not `torch.cuda.graph`, which gives back all free memory before: the next shape would ask for it again.
            with no_collection(), torch.cuda.stream(self.stream):
                graph.capture_begin(*([] if self.pool is None else [self.pool]))
                try:
                    outputs = self.step(shape, inputs, self.forward)
                finally:
                    graph.capture_end()
            self.pool = self.pool or graph.pool()
        host = partial(torch.empty, dtype=torch.int32, pin_memory=self.real)
        to_device = [host(len(words)) for _ in range(BUFFERS)]
        return CapturedStep(inputs, outputs, graph, to_device, [host(3, shape.sampled) for _ in range(BUFFERS)])

    def step(self, shape: StepShape, words: Tensor, forward: FusedForward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        given = {name: part.view(DTYPES[dtype]) for name, part, dtype in views(shape, words)}
        tiles_X2 = given["tiles"].view(-1, 2)
        prompts = None
        if shape.rounds:
            prompts = Prompts(
                given["prompt_tiles"].view(-1, 4),
                given["expanded_slots"],
                given["expanded_positions"],
                shape.rounds,
            )
        adapters_T = None
        if shape.adapted:
            own_T = self.adapters.adapters_S.index_select(0, given["slots"])
            adapters_T = own_T.masked_fill(given["positions"] < 0, 0)
        index_X2 = given["index_tiles"].view(-1, 2) if shape.index_tiles else None
        if shape.decode_only and shape.splits * SPLIT > forward.tiling.topk > 0:
            index_X2 = tiles_X2
        rows = Rows(
            positions_T=given["positions"],
            sequences_T=given["slots"],
            page_table_SP=self.page_table_SP,
            max_length=shape.splits * SPLIT,
            decode_X2=tiles_X2 if shape.decode_only else None,
            prefill_X2=None if shape.decode_only or not shape.tiles else tiles_X2,
            prefill_tokens=self.tiling.rows,
            adapters_T=adapters_T,
            prompts=prompts,
            kinds_T=given["kinds"] if len(given["kinds"]) else None,
            choosing=shape.choosing,
            index_X2=index_X2,
        )
        routes_LTK = forward.new_routes(shape.tokens)
        x_TD = forward.embed(given["tokens"], given["slots"], self.sampled_S)
        hidden_TD = forward(x_TD, rows, routes_LTK)
        last_RD = hidden_TD if shape.decode_only else hidden_TD.index_select(0, given["rows"])
        logits_RV = forward.logits(last_RD)
        results_3R = sample(logits_RV, given["temperatures"], given["draws"], given["sampled_slots"], self.sampled_S)
        return hidden_TD, logits_RV, routes_LTK, results_3R
