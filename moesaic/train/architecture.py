"""The model a recipe describes, for training from scratch."""

from __future__ import annotations

from moesaic.errors import UserError
from moesaic.model.config import Dense, Experts, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.families import write_config
from moesaic.recipe import ModelSection

# What a family fixes and the recipe does not say: the share of a head that turns, pairs as neighbours, second norms.
FIXED: dict[str, dict[str, float | bool]] = {
    "glm4_moe": {"turning": 0.5},
    "glm4": {"turning": 0.5, "interleaved": True, "post_norms": True},
    "qwen3_moe": {},
    "qwen3": {},
    "mixtral": {},
    "llama": {},
    "moesaic": {},
}


def architecture(section: ModelSection, *, bos: int | None, eos: tuple[int, ...], pad: int | None) -> ModelConfig:
    if section.family not in FIXED:
        raise UserError(
            "model.family", f"{section.family!r} cannot be trained from scratch", f"Known: {', '.join(FIXED)}."
        )
    fixed = FIXED[section.family]
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
    config = ModelConfig(
        family=section.family,
        vocab=section.vocab,
        hidden=section.hidden,
        attention=GroupedQuery(section.heads, section.kv_heads, section.head_size, qk_norm=section.qk_norm),
        rope=Rope(
            int(section.head_size * fixed.get("turning", 1.0)),
            section.rope_theta,
            interleaved=bool(fixed.get("interleaved", False)),
        ),
        layers=layers,
        mtp=layers[-1:] * section.mtp_layers,
        context=section.context,
        post_norms=bool(fixed.get("post_norms", False)),
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
