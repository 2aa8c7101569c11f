"""text: a GPT that learns to write Python, character by character.

The data is the source of Python's own standard library, so there is nothing to download; losses are
comparable between runs under the same Python version. The model is GPT-2's [Radford et al. 2019] without
biases in its linear layers.
"""

from __future__ import annotations

import re
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import weft
from weft.jobs._common import Samples, Size, cross_entropy, evaluate, parse, parser, pick, positive, warmup_cosine

VOCABULARY = 128
UNKNOWN = "\0"
"""Stands for every character outside ASCII; source code does not contain it."""
CORPUS_BYTES = 4_000_000
HELD_OUT = 0.05
EVAL_BATCH, EVAL_BATCHES = 8, 20


@dataclass(frozen=True, kw_only=True)
class GptSize(Size):
    """The shape of a GPT."""

    layers: int
    width: int
    heads: int
    context: int


SIZES = {
    "tiny": GptSize(layers=2, width=64, heads=4, context=32, batch=16, lr=3e-3),
    "2m": GptSize(layers=4, width=200, heads=5, context=128, batch=8, lr=1e-3),
    "10m": GptSize(layers=6, width=384, heads=6, context=256, batch=8, lr=6e-4),
    "350m": GptSize(layers=24, width=1024, heads=16, context=1024, batch=8, lr=3e-4),
}
"""`350m` is GPT-2 medium's shape, which has 303 M parameters with a vocabulary of 128."""


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a norm and beside a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        hidden: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x))))
        return x + hidden


class Gpt(nn.Module):
    """Tokens (batch, context) to logits (batch, context, VOCABULARY)."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                # What is added to the residual stream 2 * layers times is made smaller, as in GPT-2.
                scale = (2 * size.layers) ** -0.5 if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))
        return logits


class Windows(Samples):
    """Consecutive windows of `context` tokens, each with the same window moved on by one as its target."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        window = self.tokens[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def corpus() -> Tensor:
    """The standard library's top-level modules in alphabetical order, as character codes (uint8)."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in sorted(folder.glob("*.py")))
    if not text:
        raise FileNotFoundError(f"no *.py in {folder}: use a Python that has its library's source")
    ascii_text = re.sub(r"[^\x00-\x7f]", UNKNOWN, text[:CORPUS_BYTES])
    return torch.frombuffer(bytearray(ascii_text, "ascii"), dtype=torch.uint8)


def build(size: str) -> Gpt:
    """A new model, initialised from torch's global random numbers."""
    return Gpt(pick(SIZES, size))


def data(size: str, seed: int) -> tuple[Windows, Windows]:
    """Training and held-out windows: the corpus and its last 5 %. The seed changes nothing."""
    context, tokens = pick(SIZES, size).context, corpus()
    cut = int(len(tokens) * (1 - HELD_OUT))
    return Windows(tokens[:cut], context), Windows(tokens[cut:], context)


def main() -> None:
    options = parser(__doc__, SIZES, default="10m")
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of autocast")
    options.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw", help="sgd has a momentum of 0.9")
    options.add_argument("--beta2", type=float, default=0.95, help="of AdamW (0.95)")
    options.add_argument("--clip", type=float, help="norm to which gradients are clipped (not at all)")
    about = "log the held-out loss every K steps and after the last (not at all)"
    options.add_argument("--eval-every", type=positive, metavar="K", help=about)
    args = parse(options, SIZES)
    run = weft.init(steps=200)
    train, held_out = data(args.size, run.seed)
    model = build(args.size)
    optimizer: torch.optim.Optimizer
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, args.beta2), weight_decay=0.1)
    scheduler = warmup_cosine(optimizer, run.steps)
    model, optimizer, scheduler = run.distribute(model, optimizer, scheduler)
    half = torch.autocast(run.device.type, dtype=torch.bfloat16, enabled=args.dtype == "bfloat16")
    loader = DataLoader(train, batch_size=args.batch, shuffle=True, drop_last=True)
    for x, y in run.shard(loader, epochs=None):
        before = run.step
        with half:
            loss = cross_entropy(model(x), y)
        loss.backward()
        if args.clip:
            run.clip(args.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.log(loss=loss)
        if args.eval_every and run.step > before and (run.step % args.eval_every == 0 or run.step == run.steps):
            log_held_out_loss(run, model, held_out)
    mean, _ = evaluate(model, held_out, run.device, batch=EVAL_BATCH, batches=EVAL_BATCHES)
    run.report(held_out_loss=mean)


def log_held_out_loss(run: weft.Run, model: nn.Module, held_out: Windows) -> None:
    """Log the held-out loss of the merged model, and the time that this took, which is none of training.

    Every worker evaluates all of it: they exchange nothing and do not wait for each other here, so that the evaluation
    changes nothing in the run.
    """
    with run.merged():
        began = time.perf_counter()
        mean, _ = evaluate(model, held_out, run.device, batch=EVAL_BATCH, batches=EVAL_BATCHES)
        run.log(held_out_loss=mean, eval_s=time.perf_counter() - began)


if __name__ == "__main__":
    main()
