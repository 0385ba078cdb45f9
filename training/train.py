"""Trains the packaged model.

    python -m training.train vocabulary.gguf model.pt [--steps N] [--seed 0] [--device cuda]

Every step sees new examples, made while training (`training.text`). The same seed is the same text in the same order;
on a GPU the weights still differ a little from run to run, since sums are not taken in a fixed order there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from training.encode import Batch, Steps
from training.model import Model, balance_loss
from training.shape import SHAPE, Shape


@dataclass(frozen=True)
class Recipe:
    steps: int = 3700
    examples: int = 384  # of a step
    max_tokens: int = 49152  # of a batch: memory, not mathematics
    peak_rate: float = 1.5e-3
    warmup: int = 200  # steps
    weight_decay: float = 0.05
    clip: float = 1.0
    balance: float = 0.01  # what the load-balancing loss counts
    seed: int = 0

    def rate(self, step: int) -> float:
        """Up in a line, then down in a cosine to nothing."""
        if step < self.warmup:
            return self.peak_rate * (step + 1) / self.warmup
        return (
            self.peak_rate
            * 0.5
            * (1 + math.cos(math.pi * (step - self.warmup) / max(1, self.steps - self.warmup)))
        )


def train(model: Model, vocabulary: Path, recipe: Recipe, workers: int) -> None:
    """Where the model is, and in place. Prints the losses as it goes."""
    # cuDNN's attention plans anew for every shape, and hardly two batches have the same.
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = model.embedding.weight.device.type
    optimizer = _optimizer(model, recipe, device)
    context = model.shape.context
    steps = Steps(vocabulary, recipe.steps, recipe.examples, recipe.max_tokens, context, recipe.seed)
    loader = DataLoader(
        steps,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=device == "cuda",
    )
    start, tokens = time.monotonic(), 0
    for step, batches in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        sums = _step(model, optimizer, batches, recipe, device)
        tokens += sum(batch.ids.numel() for batch in batches)
        if step % 100 == 0 or step == recipe.steps - 1:
            _report(step, sums, tokens, time.monotonic() - start)


def _optimizer(model: Model, recipe: Recipe, device: str) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=device == "cuda")


def _step(
    model: Model, optimizer: torch.optim.Optimizer, batches: list[Batch], recipe: Recipe, device: str
) -> Tensor:
    """One update from all batches; gives what `_report` reads, still on the device: nothing here waits for it."""
    total = sum(float(batch.weights.sum()) for batch in batches)
    sums = torch.zeros(5, device=device)
    for batch in batches:
        ids, weights = (part.to(device, non_blocking=True) for part in batch)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits, probabilities = model(ids)
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        counted = weights[:, :-1].flatten()
        balance = balance_loss(probabilities, model.shape.top_k, weights > 0)
        share = float(batch.weights.sum()) / total
        ((losses * counted).sum() / total + recipe.balance * share * balance).backward()
        with torch.no_grad():
            sums += _tally(losses, counted, balance * share)
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return sums


def _tally(losses: Tensor, counted: Tensor, balance: Tensor) -> Tensor:
    is_answer, is_prompt = counted == 1, (counted > 0) & (counted < 1)
    parts = (losses * is_answer).sum(), is_answer.sum(), (losses * is_prompt).sum(), is_prompt.sum(), balance
    return torch.stack([part.float() for part in parts])


def _report(step: int, sums: Tensor, tokens: int, seconds: float) -> None:
    answers, num_answers, prompts, num_prompts, balance = sums.tolist()
    print(
        f"step {step}: answers {answers / num_answers:.4f}, prompts {prompts / num_prompts:.3f}, "
        f"balance {balance:.3f}, {seconds:.1f} s, {tokens / seconds / 1e3:.0f} k tokens/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the packaged model on text that it makes itself.")
    parser.add_argument("vocabulary", type=Path, help="of training.tokenizer")
    parser.add_argument("output", type=Path, help="the weights, for training.export and training.evaluate")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--examples", type=int, default=Recipe.examples, help="of a step")
    parser.add_argument("--rate", type=float, default=Recipe.peak_rate, help="peak learning rate")
    parser.add_argument(
        "--from", dest="start", type=Path, help="weights to go on from (default: random ones)"
    )
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=2, help="processes that make the text")
    arguments = parser.parse_args()
    recipe = Recipe(
        steps=arguments.steps,
        examples=arguments.examples,
        peak_rate=arguments.rate,
        warmup=min(Recipe.warmup, arguments.steps // 10),
        seed=arguments.seed,
    )
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(recipe.seed)
    model = Model(SHAPE) if arguments.start is None else load(arguments.start)
    train(model.to(arguments.device), arguments.vocabulary, recipe, arguments.workers)
    save(model, arguments.output)
    print(json.dumps(dataclasses.asdict(recipe)))


def save(model: Model, path: Path) -> None:
    torch.save({"shape": dataclasses.asdict(model.shape), "weights": model.state_dict()}, path)


def load(path: Path, device: str = "cpu") -> Model:
    """What `save` wrote."""
    saved = torch.load(path, map_location=device, weights_only=True)
    model = Model(Shape(**saved["shape"])).to(device)
    model.load_state_dict(saved["weights"])
    return model


if __name__ == "__main__":
    main()
