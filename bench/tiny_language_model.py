"""A language model of 0.4 million parameters that is trained here on several kinds of text, for benches of compression.

    python -m bench.tiny_language_model --texts wikitext2_valid.txt gsm8k_train.jsonl --out out/tiny

Small enough that every method can be measured in seconds, and trained, so that perplexity means something. The first
eighth of every text is held out; `builtin` and `code` (see `moesaic/compress/calibration.py`) are texts too.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from moesaic.compress.calibration import unlike_text
from moesaic.data.plain_text import builtin_text

SIZES = {
    "vocab_size": 1024, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}  # fmt: skip


def texts_of(files: list[Path]) -> dict[str, str]:
    """By kind, at most half a megabyte of each."""
    found = {file.stem.partition("_")[0]: file.read_text(encoding="utf-8") for file in files}
    found |= {"builtin": builtin_text(), "code": unlike_text()}
    return {kind: text[:500_000] for kind, text in found.items()}


def held_out(text: str) -> str:
    return text[: len(text) // 8]


def learned(text: str) -> str:
    return text[len(text) // 8 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=250)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    texts = texts_of(arguments.texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([learned(text)[:100_000] for text in texts.values()], trainer)
    streams = [torch.tensor(tokenizer.encode(learned(text)).ids) for text in texts.values()]
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    began = time.process_time()
    for step in range(arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - step / arguments.steps)
        rows = []
        for number in range(8):
            stream = streams[number % len(streams)]
            start = int(torch.randint(0, len(stream) - 129, ()))
            rows.append(stream[start : start + 129])
        batch = torch.stack(rows)
        logits = model(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: {loss.item():.3f}, {time.process_time() - began:.0f} CPU seconds", flush=True)
    model.save_pretrained(arguments.out)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    print(f"loss {loss.item():.3f}, {time.process_time() - began:.0f} CPU seconds")


if __name__ == "__main__":
    main()
