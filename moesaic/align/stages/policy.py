"""Reinforcement learning on verifiable rewards: GRPO, and DAPO by its options.

align:
  stages:
    - name: policy
      steps: 100
      data: [{path: "builtin:chain_sum"}]
      rewards: [{name: task}]
      prompts: 16
      group: 8
      objective: {clip_high: 0.28}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from moesaic.align.accuracy import Accuracy
from moesaic.align.advantages import ADVANTAGES
from moesaic.align.critics.critic import Critic, CriticOptions
from moesaic.align.critics.stream import CriticStream
from moesaic.align.examples import Mixture, first_examples, open_conversations, open_prompts
from moesaic.align.rewards import weighted_rewards
from moesaic.align.rollouts.async_ranks import FollowingStream, LeadingStream
from moesaic.align.rollouts.async_stream import AsyncOptions, AsyncRolloutStream
from moesaic.align.rollouts.multi_turn import generate_multi_turn, multi_turn_rollouts, open_environment
from moesaic.align.rollouts.replay_sft import ReplaySftOptions, ReplaySftStream
from moesaic.align.rollouts.rollout import Sample, generate
from moesaic.align.rollouts.stream import RolloutSettings, RolloutStream
from moesaic.align.rollouts.weight_sync import CopiedWeights, SharedWeights
from moesaic.align.rollouts.worker import Setup
from moesaic.align.rollouts.worker_pool import WorkerPool
from moesaic.align.selection import Explore, Selection
from moesaic.align.sft import ConversationStream
from moesaic.align.stages import Data, Measure, Stage, sources, there
from moesaic.data.stream import Stream
from moesaic.errors import UserError
from moesaic.methods import Method, build, named
from moesaic.model.transformer import Model
from moesaic.model.value_head import require_head
from moesaic.parallel.layout import ParallelLayout
from moesaic.parallel.world import World
from moesaic.serve.core.drafters import Drafter
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.train.objectives.policy import Policy as PolicyObjective
from moesaic.worlds.environments import Environment
from moesaic.worlds.example import Example
from moesaic.worlds.stage_outputs import is_stage_output
from moesaic.worlds.text_actions import WorldExamples

# Where the time of a step goes, in this order: the time split of DeepSpeed-Chat's hybrid engine.
PHASES = ("sync", "generate", "reward", "logprobs", "critic", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Policy(Stage):
    exact: ClassVar[bool] = True
    on_ranks: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = PHASES
    records: ClassVar[tuple[str, ...]] = (
        *("reward", "reward/*", "reward_std", "reward_problems", "answer_tokens", "cut_off", "groups", "rounds"),
        *("accepted_per_step", "tokens_per_pass", "mismatch_*", "routers_differ", "entropy", "clipped"),
        *("value", "return", "value_loss", "value_explained", "teaching", "rate/*", "influence_*", "explored"),
        *("dropped", "masked_tokens", "failed", "trainer_waited", "workers_waited", "ran_ahead", "worker_deaths"),
        *("requeued", "staleness_*"),
    )

    data: Data = ()
    rewards: tuple[dict[str, Any], ...] = ({"name": "task"},)
    prompts: int = 16  # of a step
    group: int = 8  # completions of each
    updates: int = 1  # optimizer steps taken from one set of rollouts
    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: any token
    advantage: str = "group_relative"
    normalise: Literal["sum", "each"] = "sum"  # rewards by their group: their sum, or each before they are summed
    level: Literal["token", "sequence"] = "token"
    dynamic: int = 1  # DAPO's dynamic sampling: rounds, at most, until enough groups are informative
    objective: dict[str, Any] = field(default_factory=dict)  # options of the policy objective
    selection: dict[str, Any] | str = "uniform"  # which prompts are sampled
    environment: dict[str, Any] | str | None = None  # several turns, with tools; else a prompt and its completion
    asynchronous: AsyncOptions | None = None  # rollouts by workers on Ray, beside the trainer
    critic: CriticOptions | None = None  # PPO: advantages of tokens, by a value model
    replay_sft: ReplaySftOptions | None = None  # SFT in the same steps, against forgetting
    drafter: str | None = None
    record_routes: bool = True

    def __post_init__(self) -> None:
        if self.data or self.environment is None:  # an environment may have tasks of its own
            sources(self.data)
        named((*self.rewards, self.selection))
        if not self.rewards:
            raise ValueError("rewards names no reward, so that no completion is better than another")
        if not self.temperature > 0:
            raise ValueError("temperature is above 0: completions that are all the same have no gradient")
        if "temperature" in self.objective:
            raise ValueError("temperature is the stage's own option, of sampling and of the loss")
        if self.objective.get("replay") and not self.record_routes:
            raise ValueError("replay wants record_routes, whose routes it follows")
        if self.advantage not in ADVANTAGES:
            raise ValueError(f"advantage is one of {', '.join(ADVANTAGES)}")
        if self.normalise == "each" and self.critic is not None and not self.critic.baseline:
            raise ValueError("normalise: each is within the group, which a critic looks at only with baseline: true")
        least = 1 if self.critic is not None and not self.critic.baseline and self.dynamic == 1 else 2
        if min(self.prompts, self.updates, self.dynamic, self.max_tokens) < 1 or self.group < least:
            raise ValueError(f"prompts, updates, dynamic and max_tokens are at least 1, and group at least {least}")
        if self.lora is not None and self.asynchronous is not None:
            raise ValueError("lora does not go with asynchronous: workers are sent whole weights, and know no adapter")
        if self.asynchronous is not None and self.asynchronous.run_ahead:
            if self.drafter is None:
                raise ValueError("run_ahead wants a drafter, whose trees it fills")
        if self.environment is not None and (self.temperature != 1.0 or self.top_p < 1.0 or self.top_k):
            raise ValueError("an environment wants temperature 1 without top_p and top_k")
        if self.replay_sft is not None and self.objective.get("replay"):
            raise ValueError("replay_sft does not go with replay: nobody routed those conversations before")

    def check(self) -> None:
        check_rewards(self.rewards, self.data, self._examples(there(self.data)))
        Sampling(self.max_tokens, self.temperature, top_k=self.top_k, top_p=self.top_p)
        self._drafter()
        if (world := self.world()) is not None:
            world.check()
        self._selection().check(world is not None and world.own_tasks)
        if self.replay_sft is not None:
            open_conversations(there(self.replay_sft.data), self.seed)
        if self.critic is not None and self.critic.model and not is_stage_output(self.critic.model):
            require_head(Path(self.critic.model))

    def check_ranks(self, layout: ParallelLayout, accumulate: int, context: int, key: str) -> None:
        alone = {
            "critic": (self.critic is not None, "a critic is trained by one process"),
            "selection": (
                not self._selection().on_ranks,
                "it takes gradients of the whole model, which no rank has",
            ),
            "drafter": (
                self.drafter not in (None, "suffix") and self.asynchronous is None,
                "it runs layers, which ranks run together",
            ),
        }
        for option, (wanted, problem) in alone.items():
            if wanted:
                raise UserError(f"{key}.{option}", problem, "Leave it out, or run without torchrun.")
        least, needed = self.smallest_minibatch(), layout.dp * accumulate
        if least < needed:
            groups = range(self.group, max(self.group, self.updates * needed) + self.updates + 1)
            enough = next(n for n in groups if replace(self, group=n).smallest_minibatch() >= needed)
            problem = f"an update may have {least} completions, fewer than {layout.dp} data ranks x {accumulate} parts"
            raise UserError(f"{key}.group", problem, f"Nearest that works: {key}.group={enough}.")

    def smallest_minibatch(self) -> int:
        """How many completions an update has at least: the last of several may have fewer, and dynamic sampling may
        find a single group."""
        least = self.prompts * self.group
        for groups in range(1 if self.dynamic > 1 else self.prompts, self.prompts + 1):
            samples = groups * self.group
            size = -(-samples // self.updates)
            least = min(least, (samples - 1) % size + 1)
        return least

    def objective_method(self) -> Method:
        return Method("policy", {"temperature": self.temperature} | self.objective)

    def open(self, model: Model, out: Path, world: World | None = None) -> Stream:
        found = self.rollouts(model, world or World(model.device))
        if self.critic is not None:
            found = CriticStream(found, Critic(model, self.critic))
        if self.replay_sft is not None:
            assert model.tokenizer is not None
            replay, max_length = self.replay_sft, min(self.replay_sft.max_length, model.config.context)
            examples = open_conversations(replay.data, self.seed)
            conversations = ConversationStream(model.tokenizer, examples, replay.batch_tokens, max_length)
            found = ReplaySftStream(found, conversations, replay.weight)
        return found

    def rollouts(self, model: Model, ranks: World) -> Stream:
        if self.objective.get("replay") and not model.config.has_experts:
            raise UserError("align.stages: objective", "replay follows routes, and there are no experts", "Drop it.")
        examples = self._examples(self.data)
        settings = RolloutSettings(
            self.prompts,
            self.group,
            self.updates,
            self.advantage,
            self.level,
            self.dynamic,
            self.sampling(model),
            self.seed,
            began=self.updates > 1 and self.objective.get("correction", "none") != "none",
            replay=bool(self.objective.get("replay")),
            right=self.objective.get("right", PolicyObjective.right) if self.objective.get("imitate") else None,
            each={n: w for n, w, _ in weighted_rewards(self.rewards)} if self.normalise == "each" else None,
        )
        selector = self._selection().begin(examples, model, self.seed, self._explore(model))
        kept_near = self.objective.get("kl") or (self.critic is not None and self.critic.kl)
        reference = None if not kept_near else ranks.copy(model) if model.lora is None else model.beside(None)
        given: dict[str, Any] = {
            "model": model,
            "examples": examples,
            "settings": settings,
            "selector": selector,
            "reference": reference,
            "world": ranks,
        }
        if self.asynchronous is not None:
            if not ranks.is_main:
                return FollowingStream(weights=CopiedWeights(None, ranks), **given)
            kind = AsyncRolloutStream if ranks.ranks == 1 else LeadingStream
            workers = self.worker_pool(model)
            return kind(options=self.asynchronous, workers=workers, weights=CopiedWeights(workers, ranks), **given)
        max_requests = -(-self.prompts // ranks.data_ranks) * self.group
        engine = Engine(model, drafter=self._drafter(), max_requests=max_requests, seed=self.seed)
        world = self.world()
        start = multi_turn_rollouts(world, self.group, self.sampling(model)) if world is not None else None
        given |= {"rewards": weighted_rewards(self.rewards), "start_group": start}
        return RolloutStream(engine=engine, weights=SharedWeights(engine), **given)

    def _examples(self, data: Data) -> Mixture:
        world = self.world()
        if world is None or not world.own_tasks:
            if not self.data:
                remedy = "Name some, or an environment with tasks of its own."
                raise UserError("align.stages: data", "data names no source", remedy)
            return open_prompts(data, self.seed)
        if self.data:
            problem = "the environment has tasks of its own, and data names others"
            raise UserError("align.stages: environment", problem, "Leave data out.")
        return Mixture([WorldExamples(world, self.seed)], [1.0])

    def _explore(self, model: Model) -> Explore:
        """Completions that nothing is learned from, by an engine of their own that is gone afterwards."""

        def explore(examples: Sequence[Example], seeds: Sequence[int]) -> list[list[Sample]]:
            engine, sampling = (
                Engine(model, max_requests=self.prompts * self.group, seed=self.seed),
                self.sampling(model),
            )
            rewards, world = weighted_rewards(self.rewards), self.world()
            if world is None:
                return generate(engine, examples, self.group, sampling, rewards, seeds).groups
            start = multi_turn_rollouts(world, self.group, sampling)
            return generate_multi_turn(engine, examples, start, rewards, seeds).groups

        return explore

    def _selection(self) -> Selection:
        (method,) = named((self.selection,))
        return build(method, Selection, "align.stages: selection")

    def _drafter(self) -> Drafter | None:
        return build(Method(self.drafter), Drafter, "align.stages: drafter") if self.drafter else None

    def world(self) -> Environment | None:
        if self.environment is None:
            return None
        (method,) = named((self.environment,))
        return open_environment(method)

    def worker_pool(self, model: Model) -> WorkerPool:
        options = self.asynchronous
        assert options is not None and model.tokenizer is not None
        weighted_rewards(self.rewards)  # what is wrong with them is reported here, not by a worker
        self.world()
        setup = Setup(
            config=model.config,
            files=dict(model.tokenizer.files),
            dtype=model.dtype,
            device=model.device.type,
            mode=model.mode,
            threads=options.worker_threads(),
            drafter=self.drafter,
            max_requests=self.prompts * self.group,
            group=self.group,
            sampling=self.sampling(model),
            rewards=self.rewards,
            environment=named((self.environment,))[0] if self.environment is not None else None,
            on_update=options.on_update,
            seed=self.seed,
        )
        return WorkerPool(setup, options.workers, options.patience, options.retries, options.address)

    def sampling(self, model: Model) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            # Ratios are of the distribution that was drawn from; without these it is the model's own.
            "record_draws": self.temperature != 1.0 or self.top_p < 1.0 or self.top_k > 0,
            "record_routes": self.record_routes and model.config.has_experts,
        }

    def measure(self, model: Model) -> Measure | None:
        return Accuracy.of(self.data, self.evaluate, self.max_tokens, self.world(), weighted_rewards(self.rewards))

    def measures(self) -> tuple[str, ...]:
        known = there(self.rewards)
        names = Accuracy.names(self.data, self.evaluate, self.world(), weighted_rewards(known))
        # Of a reward that an earlier stage makes nobody knows yet what it is called.
        return (*names, "held_out/*") if names and len(known) < len(self.rewards) else names


def check_rewards(named: tuple[dict[str, Any], ...], data: Data, opened: Mixture) -> None:
    """Refuse a reward by which no answer could be judged, before any stage is run. `opened`: what there is of data."""
    rewards = weighted_rewards(there(named))
    if len(there(data)) < len(data):
        return  # nobody knows yet
    asked = first_examples(opened)
    for name, _, reward in rewards:
        lacking = [reward.lacks(example) for example in asked]
        if asked and all(lacking):
            problem = f"{name} can judge nothing: no prompt of data has {lacking[0]}"
            raise UserError("align.stages: rewards", problem, "Name another reward, or data that has it.")
