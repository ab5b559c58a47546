"""The model a recipe describes, for training from scratch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moesaic.errors import UserError
from moesaic.model.config import (
    DeltaRule,
    Dense,
    Experts,
    GroupedQuery,
    Indexer,
    Infilling,
    Knowledge,
    Latent,
    Layer,
    ModelConfig,
    Reading,
    Rope,
)
from moesaic.model.families import family_for, known, write_config
from moesaic.model.families.traits import Traits
from moesaic.recipe_delta import DeltaSection
from moesaic.recipe_sections import IndexerSection, LatentSection, ModelSection


def architecture(
    section: ModelSection,
    *,
    bos: int | None,
    eos: tuple[int, ...],
    pad: int | None,
    infilling: Infilling | None = None,
) -> ModelConfig:
    if section.family not in known():
        problem = f"{section.family!r} cannot be trained from scratch"
        raise UserError("model.family", problem, f"Known: {', '.join(known())}.")
    traits: Traits = family_for(section.family, "model.family").TRAITS
    if traits.encoder:
        problem = f"{section.family!r} is an encoder, which is not trained here"
        raise UserError("model.family", problem, "Name a family of language models, such as glm4_moe.")
    if section.infilling and section.family != "moesaic":
        problem = f"{section.family} does not see a text both ways"
        raise UserError("model.infilling", problem, "Write family: moesaic, which `transformers` cannot load.")
    if traits.latent and section.latent is None:
        section = section.model_copy(update={"latent": LatentSection()})
    if traits.indexer and section.indexer is None:
        section = section.model_copy(update={"indexer": IndexerSection()})
    if traits.delta and section.delta is None:
        section = section.model_copy(update={"delta": DeltaSection()})
    dense = Layer(Dense(section.dense_hidden))
    router = section.router
    counts = section.experts if isinstance(section.experts, tuple) else None
    mixtures = max(section.layers - section.dense_layers, 0)
    if counts is not None and len(counts) != mixtures:
        raise UserError("model.experts", f"{len(counts)} numbers for {mixtures} layers with experts", "Give one each.")

    def mixture(count: int) -> Layer:
        return Layer(
            Experts(
                count=count,
                per_token=section.experts_per_token,
                hidden=section.expert_hidden,
                score=router.score,
                normalize=router.normalize,
                scale=router.scale,
                correction=router.correction,
                groups=router.groups,
                top_groups=router.top_groups,
                shared_hidden=section.shared_experts * section.expert_hidden,
                bias=traits.bias,
                shared_gate=traits.shared_gate and section.shared_experts > 0,
                scales_input=traits.scales_input,
                residual=section.residual,
            )
        )

    experts = counts or (section.experts,) * mixtures
    layers = (dense,) * min(section.dense_layers, section.layers) + tuple(mixture(int(str(n))) for n in experts)
    base = section.knowledge
    if base is not None:
        if max(base.layers) >= section.layers:
            problem = f"there is no layer {max(base.layers)} among {section.layers}"
            raise UserError("model.knowledge.layers", problem, "Count from 0.")
        reading = Layer(Reading(base.key_size))
        layers = tuple(reading if number in base.layers else layer for number, layer in enumerate(layers))
    attention = _attention(section, traits)
    if (given := section.delta) is not None:
        rule = DeltaRule(given.key_heads, given.heads, given.key_size, given.value_size, given.width)
        layers = tuple(
            replace(layer, delta=rule if number % given.every else None) for number, layer in enumerate(layers, 1)
        )
    mtp = layers[-1:] * section.mtp_layers
    if isinstance(attention, Latent):
        rotary_size = attention.rope_size
        if attention.indexer and section.indexer:
            # Every `share`-th layer selects, and those behind it use its selection.
            share = section.indexer.share
            layers = tuple(replace(layer, index="shared" if n % share else "full") for n, layer in enumerate(layers))
            mtp = tuple(replace(layer, index="full") for layer in mtp)
    else:
        rotary_size = int(section.head_size * traits.rotary_share)
    config = ModelConfig(
        family=section.family,
        vocab=section.vocab,
        hidden=section.hidden,
        attention=attention,
        rope=Rope(rotary_size, section.rope_theta, interleaved=traits.interleaved),
        layers=layers,
        mtp=mtp,
        context=section.context,
        post_norms=traits.post_norms,
        norm_offset=traits.norm_offset,
        activation=traits.activation,
        tied=section.tied,
        knowledge=None if base is None else Knowledge(base.words),
        infilling=infilling,
        norm=section.norm,
        init_std=section.init_std,
        bos=bos,
        eos=eos,
        pad=pad,
    )
    written, _ = write_config(config)
    if written.family != section.family:
        raise UserError(
            "model.family",
            f"{section.family} cannot express these settings (router, shared experts, norms or layers)",
            "Change them, or write family: moesaic, which `transformers` cannot load.",
        )
    return config


def _attention(section: ModelSection, traits: Traits) -> GroupedQuery | Latent:
    latent, indexer = section.latent, section.indexer
    if latent is None:
        if indexer is not None:
            raise UserError("model.indexer", "belongs to latent attention", "Write model.latent too, or remove it.")
        sizes = section.heads, section.kv_heads, section.head_size
        qkv_bias, norm = traits.bias or traits.qkv_bias, traits.norm if section.qk_norm else "heads"
        parts: dict[str, Any] = {"norm": norm, "sinks": traits.sinks, "gated": traits.gated}
        return GroupedQuery(*sizes, qkv_bias, traits.bias, qk_norm=section.qk_norm, **parts)
    chooses = None
    if indexer is not None:
        chooses = Indexer(indexer.heads, indexer.head_size, indexer.topk, traits.indexer_interleaved)
    return Latent(
        section.heads,
        latent.kv_rank,
        latent.plain_size,
        latent.rope_size,
        latent.value_size,
        latent.q_rank,
        indexer=chooses,
    )
