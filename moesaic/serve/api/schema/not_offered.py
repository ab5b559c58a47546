"""Fields of OpenAI's, vLLM's, SGLang's and llama.cpp's requests that would change the answer and are not offered here.

A request that sets one is refused (400) with its name, on any route whose schema does not have it: a schema that gets
the field takes it off this list by that alone. All other unknown fields are named in a header (`fields.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NotOffered:
    """`instead` is what to do; `neutral` are values that change nothing, beside null, false, 0 and what is empty."""

    instead: str
    neutral: tuple[Any, ...] = ()

    def matters(self, value: Any) -> bool:
        return bool(value) and value not in self.neutral


LEAVE = NotOffered("leave it out")
FORMAT = NotOffered("describe the output's form as response_format or structured_outputs")
SAMPLING = NotOffered("leave it out, or set temperature, top_p, top_k or min_p")
MESSAGES = NotOffered("send the conversation as messages")
MAX_TOKENS = NotOffered("give max_tokens")

# By name, nested ones with a dot.
NOT_OFFERED: dict[str, NotOffered] = {
    # The prompt.
    "continue_final_message": NotOffered("end with a message of the user"),
    "chat_template": NotOffered("the model's own is used"),
    "documents": MESSAGES,
    "echo": NotOffered("ask for a completion instead, or leave it out"),
    "suffix": LEAVE,
    "input_ids": NotOffered("give tokens as the prompt of a completion"),
    "input_embeds": LEAVE,
    "prompt_embeds": LEAVE,
    "truncate_prompt_tokens": NotOffered("shorten the prompt"),
    "mm_processor_kwargs": LEAVE,
    "image_data": LEAVE,
    "session_params": NotOffered("send the whole conversation"),
    # Tools.
    "functions": NotOffered("give them as tools"),
    "function_call": NotOffered("give a tool_choice", neutral=("auto", "none")),
    "web_search_options": NotOffered("give tools"),
    "modalities": NotOffered("only text is generated", neutral=(["text"],)),
    "audio": NotOffered("only text is generated"),
    # The form of the output.
    "grammar": FORMAT,
    "json_schema": FORMAT,
    "regex": FORMAT,
    "ebnf": FORMAT,
    "choice": FORMAT,
    "grammar_lazy": NotOffered("give a structural_tag with triggers"),
    "grammar_triggers": NotOffered("give a structural_tag with triggers"),
    "structural_tag": FORMAT,
    "guided_json": FORMAT,
    "guided_regex": FORMAT,
    "guided_choice": FORMAT,
    "guided_grammar": FORMAT,
    "structured_outputs": FORMAT,
    "response_format.schema": NotOffered("give it as response_format.json_schema.schema"),
    "response_format": FORMAT,
    # Sampling.
    "use_beam_search": NotOffered("ask for a completion or a chat completion"),
    "best_of": NotOffered("give n, and choose", neutral=(1,)),
    "length_penalty": NotOffered("leave it out", neutral=(1, 1.0)),
    "bad_words": NotOffered("give logit_bias"),
    "allowed_token_ids": NotOffered("give logit_bias"),
    "logits_processors": LEAVE,
    "custom_logit_processor": LEAVE,
    "typical_p": NotOffered(SAMPLING.instead, neutral=(1, 1.0)),
    "top_a": SAMPLING,
    "adaptive_target": NotOffered("give mirostat", neutral=(-1, -1.0)),
    "min_keep": LEAVE,
    "min_new_tokens": NotOffered("give min_tokens"),
    "repetition_detection": NotOffered("give dry_multiplier"),
    "tfs": NotOffered(SAMPLING.instead, neutral=(1, 1.0)),
    "top_n_sigma": NotOffered(SAMPLING.instead, neutral=(-1, -1.0)),
    "mirostat": SAMPLING,
    "mirostat_mode": SAMPLING,
    "dry_multiplier": SAMPLING,
    "xtc_probability": SAMPLING,
    "dynatemp_range": SAMPLING,
    "no_repeat_ngram_size": NotOffered("give a repetition_penalty"),
    "repeat_penalty": NotOffered("give a repetition_penalty", neutral=(1, 1.0)),
    "samplers": SAMPLING,
    "lora": NotOffered("name an adapter as the model"),
    "lora_path": NotOffered("name an adapter as the model"),
    "n_predict": NotOffered(MAX_TOKENS.instead, neutral=(-1,)),
    "max_new_tokens": MAX_TOKENS,
    "num_predict": MAX_TOKENS,
    "n_indent": LEAVE,
    "t_max_predict_ms": MAX_TOKENS,
    # What the response holds.
    "include_stop_str_in_output": LEAVE,
    "no_stop_trim": LEAVE,
    "return_tokens_as_token_ids": LEAVE,
    "return_token_ids": LEAVE,
    "return_hidden_states": LEAVE,
    "n_probs": NotOffered("give logprobs"),
    "suppress_tokens": NotOffered("give logit_bias"),
    "thinking_token_budget": LEAVE,
}
