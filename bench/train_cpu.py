"""Training steps on a CPU against a plain PyTorch loop over `transformers`' same model, float32, in the same run.

python -m bench.train_cpu          about two minutes; writes bench/results/train_cpu.json

The model: 12M parameters, hidden 256, 6 layers, 8 experts top-2 of 256, vocabulary 4096, 8 sequences of 256 tokens a
step. Both sides: forward, cross-entropy, backward, gradient clipping, AdamW. Ours is the trainer's own step, expert
balance and records of the load included; the peer's AdamW is torch's, fused as ours is.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import transformers

import moesaic
from bench.forward import MODELS
from bench.measure import machine, record, side_by_side
from moesaic.data.packing import Batch
from moesaic.kernels import hardware
from moesaic.recipe_sections import BalanceSection
from moesaic.train.balance import Balance
from moesaic.train.objectives.next_token import NextToken
from moesaic.train.optimizers.adamw import AdamW

SEQUENCES, LENGTH = 8, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="measuring time for each side")
    arguments = parser.parse_args()
    torch.set_num_threads(hardware.threads())
    transformers.utils.logging.disable_progress_bar()
    settings = dict(MODELS["qwen3_moe 12M"], max_position_embeddings=2048)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as path:
        theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
        theirs.save_pretrained(path)
        ours = moesaic.load(path)
    tokens = torch.randint(3, config.vocab_size, (SEQUENCES, LENGTH))
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    count = SEQUENCES * (LENGTH - 1)
    batch = Batch(tokens.flatten(), targets.flatten(), [LENGTH] * SEQUENCES, [0] * SEQUENCES, count)

    peer_optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-4, fused=True)
    losses: dict[str, list[float]] = {"peer": [], "ours": []}

    def peer() -> None:
        peer_optimizer.zero_grad()
        loss = theirs(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        peer_optimizer.step()
        losses["peer"].append(loss.item())

    objective = NextToken()
    optimizer = AdamW(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01).build(ours.named_parameters())
    balance = Balance(ours, BalanceSection())

    def own() -> None:
        optimizer.zero_grad()
        routing = balance.routing()
        loss = objective(ours, batch, routing)
        loss.total.backward()
        balance.count(routing)
        optimizer.step(1.0, clip=1.0)
        balance.update()
        losses["ours"].append(loss.total.item())

    times = side_by_side({"peer": peer, "ours": own}, arguments.seconds)
    apart = max(abs(a - b) for a, b in zip(losses["peer"][:5], losses["ours"][:5]))
    rate = {name: SEQUENCES * LENGTH / seconds for name, seconds in times.items()}
    ratio = rate["ours"] / rate["peer"]
    here = machine()
    print(f"12M-parameter MoE, float32, {here['cpu']} ({here['cores']} cores), torch {here['torch']}, {here['date']}")
    print(f"transformers loop {rate['peer']:.0f} tokens/s, ours {rate['ours']:.0f} tokens/s: {ratio:.2f}x")
    print(f"losses of the first five steps differ by at most {apart:.1e}")
    row = {
        "peer_tokens_per_second": rate["peer"],
        "tokens_per_second": rate["ours"],
        "ratio": ratio,
        "loss_apart": apart,
    }
    print(record("train_cpu", [row], transformers=transformers.__version__))


if __name__ == "__main__":
    main()
