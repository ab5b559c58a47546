"""`generation_settings`: how a completion was sampled, as llama.cpp reports it."""

from __future__ import annotations

from typing import Any

from moesaic.serve.core.sampling import DEFAULT_ORDER, Sampling

NAMES = {  # llama.cpp's, and ours
    **{"temperature": "temperature", "dynatemp_range": "dynatemp_range", "dynatemp_exponent": "dynatemp_exponent"},
    **{"top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "top_n_sigma": "top_n_sigma", "typical_p": "typical_p"},
    **{"xtc_probability": "xtc_probability", "xtc_threshold": "xtc_threshold"},
    **{"repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty"},
    **{"frequency_penalty": "frequency_penalty", "dry_multiplier": "dry_multiplier", "dry_base": "dry_base"},
    **{"dry_allowed_length": "dry_allowed_length", "dry_penalty_last_n": "dry_penalty_last_n"},
    **{"mirostat": "mirostat", "mirostat_tau": "mirostat_tau", "mirostat_eta": "mirostat_eta"},
    **{"ignore_eos": "ignore_eos"},
}


def generation_settings(
    sampling: Sampling,
    seed: int,
    *,
    n_predict: int = -1,
    stream: bool = False,
    n_probs: int = 0,
    post_sampling_probs: bool = False,
    timings_per_token: bool = False,
) -> dict[str, Any]:
    own = {name: getattr(sampling, ours) for name, ours in NAMES.items()}
    return {
        "seed": seed,
        **own,
        "repeat_last_n": -1 if sampling.repeat_last_n is None else sampling.repeat_last_n,
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
        "stop": list(sampling.stop),
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": 0,  # a context that is full ends a completion; nothing of it is dropped
        "n_discard": 0,
        "stream": stream,
        "logit_bias": [
            {"token": token, "bias": bias if bias > float("-inf") else False}
            for token, bias in sampling.logit_bias.items()
        ],
        "n_probs": n_probs,
        "min_keep": 0,
        "grammar": sampling.grammar.text if sampling.grammar is not None else "",
        "samplers": list(sampling.samplers if sampling.samplers is not None else ("penalties", "dry", *DEFAULT_ORDER)),
        "timings_per_token": timings_per_token,
        "post_sampling_probs": post_sampling_probs,
        "lora": [],
    }
