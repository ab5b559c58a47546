"""The model a recipe describes, for training from scratch."""

from __future__ import annotations

from dataclasses import replace

from moesaic.errors import UserError
from moesaic.model.config import Dense, Experts, GroupedQuery, Indexer, Latent, Layer, ModelConfig, Rope
from moesaic.model.families import family_for, known, write_config
from moesaic.model.families.traits import Traits
from moesaic.recipe_sections import IndexerSection, LatentSection, ModelSection


def architecture(section: ModelSection, *, bos: int | None, eos: tuple[int, ...], pad: int | None) -> ModelConfig:
    if section.family not in known():
        problem = f"{section.family!r} cannot be trained from scratch"
        raise UserError("model.family", problem, f"Known: {', '.join(known())}.")
    traits: Traits = family_for(section.family, "model.family").TRAITS
    if traits.latent and section.latent is None:
        section = section.model_copy(update={"latent": LatentSection()})
    if traits.indexer and section.indexer is None:
        section = section.model_copy(update={"indexer": IndexerSection()})
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
            )
        )

    experts = counts or (section.experts,) * mixtures
    layers = (dense,) * min(section.dense_layers, section.layers) + tuple(mixture(int(str(n))) for n in experts)
    attention = _attention(section)
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
        tied=section.tied,
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


def _attention(section: ModelSection) -> GroupedQuery | Latent:
    latent, indexer = section.latent, section.indexer
    if latent is None:
        if indexer is not None:
            raise UserError("model.indexer", "belongs to latent attention", "Write model.latent too, or remove it.")
        return GroupedQuery(section.heads, section.kv_heads, section.head_size, qk_norm=section.qk_norm)
    if indexer is not None and indexer.topk < section.context:
        # The choice of tokens has no gradient, so a fresh indexer would choose at random for ever.
        problem = f"{indexer.topk} tokens of a context of {section.context}: nothing trains a fresh indexer to choose"
        raise UserError("model.indexer.topk", problem, "Raise it to model.context.")
    return Latent(
        section.heads,
        latent.kv_rank,
        latent.plain_size,
        latent.rope_size,
        latent.value_size,
        latent.q_rank,
        indexer=None if indexer is None else Indexer(indexer.heads, indexer.head_size, indexer.topk),
    )
