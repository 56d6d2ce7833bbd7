"""Train the small GPT-2 that ships with hf-grow, on the help topics that every Python carries.

    python scripts/train_small_model.py

Writes `hf_grow/assets/small_gpt2/`: a stock `transformers` checkpoint, its tokenizer and a model card that
holds what this script measured. The text depends on the Python version, so the card names it.
"""

import argparse
import copy
import math
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
MAX_FOLDER_BYTES = 4_000_000
BIGRAM_DISCOUNT = 0.75
SAMPLE_PROMPT = 'The "for" statement'
DEFAULT_OUT = Path(__file__).resolve().parents[1] / "hf_grow" / "assets" / "small_gpt2"


@dataclass
class Corpus:
    """Whole topics, split by name; the same paragraph is never on both sides."""

    train: list[str]
    held_out: list[str]
    held_out_names: list[str]

    @property
    def held_out_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.held_out)


@dataclass
class Measurements:
    """What the model card reports; losses in nats per held-out token."""

    n_parameters: int
    n_train_tokens: int
    n_held_out_tokens: int
    train_loss: float
    losses: dict[str, float]
    best_step: int
    seconds: float
    sample: str


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write (replaced)")
    parser.add_argument("--steps", type=int, default=2500, help="optimizer steps")
    parser.add_argument("--warmup", type=int, default=100, help="steps of linear warm-up")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak of the schedule")
    # Far above the usual 0.1, because the run passes over little text many times.
    parser.add_argument("--weight-decay", type=float, default=1.5, help="on matrices only")
    parser.add_argument("--dropout", type=float, default=0.1, help="after embeddings and in each block")
    parser.add_argument("--evaluate-every", type=int, default=50, help="steps between held-out losses")
    parser.add_argument("--vocab-size", type=int, default=1024, help="size of the byte-level BPE")
    parser.add_argument("--hidden-size", type=int, default=128, help="width of the residual stream")
    parser.add_argument("--layers", type=int, default=4, help="number of blocks")
    parser.add_argument("--heads", type=int, default=8, help="attention heads per block")
    parser.add_argument("--positions", type=int, default=256, help="context length in tokens")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of torch")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches, dropout and sample")
    return parser


def paragraph_key(paragraph: str) -> str:
    return " ".join(paragraph.split())


def split_topics() -> Corpus:
    """Hold out every tenth topic; drop training paragraphs that were held out or already seen."""
    names = sorted(topics)
    held_out_names = names[::10]
    held_out = [topics[name] for name in held_out_names]
    # Topics quote each other at length, so a split by name alone would leak most of some held-out topics.
    seen = {paragraph_key(paragraph) for text in held_out for paragraph in text.split("\n\n")}
    train = []
    for name in names:
        if name in held_out_names:
            continue
        fresh = []
        for paragraph in topics[name].split("\n\n"):
            if paragraph_key(paragraph) not in seen:
                seen.add(paragraph_key(paragraph))
                fresh.append(paragraph)
        if fresh:
            train.append("\n\n".join(fresh))
    return Corpus(train, held_out, held_out_names)


def train_tokenizer(texts: list[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE in the manner of GPT-2; every byte is in the vocabulary, so nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def encode_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All texts in one 1-D tensor of ids, each preceded and the last followed by the end-of-text token."""
    end = tokenizer.eos_token_id
    ids = [end]
    for text in texts:
        # The backend tokenizer does not warn about texts longer than the context.
        ids += [*tokenizer.backend_tokenizer.encode(text).ids, end]
    return torch.tensor(ids)


def build_model(options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=options.positions,
        n_embd=options.hidden_size,
        n_layer=options.layers,
        n_head=options.heads,
        resid_pdrop=options.dropout,
        embd_pdrop=options.dropout,
        attn_pdrop=0.0,  # keeps the fused attention kernel: a step takes a third of the time
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return GPT2LMHeadModel(config)


def build_optimizer(model: GPT2LMHeadModel, options: argparse.Namespace) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.98))


def random_batches(tokens: torch.Tensor, batch_size: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless (batch_size, length) windows at random places of the stream."""
    generator = torch.Generator().manual_seed(seed)
    windows = tokens.unfold(0, length, 1)
    while True:
        yield windows[torch.randint(len(windows), (batch_size,), generator=generator)]


@torch.no_grad()
def mean_token_loss(model: GPT2LMHeadModel, tokens: torch.Tensor) -> float:
    """Nats per token; each token but the first is predicted once, in windows as long as the context."""
    was_training = model.training
    model.eval()
    length = model.config.n_positions
    total = 0.0
    for start in range(0, len(tokens) - 1, length):
        window = tokens[start : start + length + 1]
        logits = model(window[None, :-1]).logits[0]
        total += F.cross_entropy(logits, window[1:], reduction="sum").item()
    model.train(was_training)
    return total / (len(tokens) - 1)


def unigram_probabilities(tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Token frequencies with add-one smoothing, shape (vocab,)."""
    counts = torch.bincount(tokens, minlength=vocab_size).double() + 1
    return counts / counts.sum()


def bigram_probabilities(tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """P(next | previous) by absolute discounting onto the unigram model, shape (vocab, vocab)."""
    pairs = tokens[:-1] * vocab_size + tokens[1:]
    counts = torch.bincount(pairs, minlength=vocab_size**2).view(vocab_size, vocab_size).double()
    seen = (counts - BIGRAM_DISCOUNT).clamp(min=0)
    total = counts.sum(1, keepdim=True)
    # A previous token that never occurred has no counts: all its mass goes to the unigram model.
    spare = torch.where(total > 0, total - seen.sum(1, keepdim=True), 1.0)
    return (seen + spare * unigram_probabilities(tokens, vocab_size)) / total.clamp(min=1)


def baseline_losses(train: torch.Tensor, held_out: torch.Tensor, vocab_size: int) -> dict[str, float]:
    """Nats per held-out token of the models that a trained network has to beat."""
    unigram = unigram_probabilities(train, vocab_size)[held_out[1:]]
    bigram = bigram_probabilities(train, vocab_size)[held_out[:-1], held_out[1:]]
    return {
        "uniform chance": math.log(vocab_size),
        "unigram, add-one": -unigram.log().mean().item(),
        "bigram, absolute discounting": -bigram.log().mean().item(),
    }


def train_model(
    model: GPT2LMHeadModel, train: torch.Tensor, held_out: torch.Tensor, options: argparse.Namespace
) -> int:
    """Train in place and leave the weights with the lowest held-out loss in the model; return their step."""
    optimizer = build_optimizer(model, options)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, options.warmup, options.steps)
    batches = random_batches(train, options.batch_size, options.positions, options.seed)
    best_loss, best_step, best_weights = math.inf, 0, {}
    model.train()
    with tqdm(total=options.steps, desc="training", mininterval=1) as progress:
        for step in range(1, options.steps + 1):
            batch = next(batches)
            loss = model(batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.update()
            if step % options.evaluate_every and step != options.steps:
                continue
            held_out_loss = mean_token_loss(model, held_out)
            progress.set_postfix(train=f"{loss.item():.3f}", held_out=f"{held_out_loss:.3f}")
            if held_out_loss < best_loss:
                best_loss, best_step = held_out_loss, step
                best_weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)
    return best_step


def generate_sample(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, seed: int) -> str:
    torch.manual_seed(seed)
    model.eval()
    inputs = tokenizer(SAMPLE_PROMPT, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=160, do_sample=True, temperature=0.7, top_k=40)
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def command_line(options: argparse.Namespace) -> str:
    """The command that repeats this run; the output folder is left out, it does not change the result."""
    parser = build_parser()
    changed = [
        f" --{name.replace('_', '-')} {value}"
        for name, value in vars(options).items()
        if name != "out" and value != parser.get_default(name)
    ]
    return "python scripts/train_small_model.py" + "".join(changed)


def loss_table(measured: Measurements, held_out_bytes: int) -> str:
    rows = ["| model | nats per token | bits per byte |", "|---|---:|---:|"]
    for name, loss in measured.losses.items():
        bits_per_byte = loss * measured.n_held_out_tokens / math.log(2) / held_out_bytes
        rows.append(f"| {name} | {loss:.3f} | {bits_per_byte:.3f} |")
    return "\n".join(rows)


def model_card(options: argparse.Namespace, corpus: Corpus, measured: Measurements) -> str:
    head_size = options.hidden_size // options.heads
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2, hf-grow, test-model]
---

# small_gpt2

A stock `transformers` GPT-2 with {measured.n_parameters:,} parameters, trained on the help topics that
Python carries (`pydoc_data.topics`). It ships with hf-grow for its demo and for tests that need trained
weights. It imitates the look of the Python reference and knows nothing: do not use it for answers.

- {options.layers} layers, {options.hidden_size} wide, {options.heads} heads of size {head_size}, \
{options.positions} positions, tied embeddings, float32.
- Byte-level BPE of {options.vocab_size} tokens, trained on the training text only; `{END_OF_TEXT}` begins,
  ends and pads.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("hf_grow/assets/small_gpt2")
tokenizer = AutoTokenizer.from_pretrained("hf_grow/assets/small_gpt2")
```

## Text

The topics of Python {platform.python_version()}. Every tenth topic in sorted order is held out:
{", ".join(corpus.held_out_names)}.
Topics quote each other, so paragraphs that occur in a held-out topic, or a second time, were removed from
the training text. That leaves {measured.n_train_tokens:,} training and \
{measured.n_held_out_tokens:,} held-out tokens ({corpus.held_out_bytes:,} bytes).

The text is the Python documentation, © Python Software Foundation, under the
[PSF License Agreement](https://docs.python.org/3/license.html). The weights are under Apache-2.0.

## Held-out loss

All rows are measured on the same held-out tokens; the n-gram models are counted on the training tokens.

{loss_table(measured, corpus.held_out_bytes)}

The loss on the training tokens is {measured.train_loss:.3f} nats per token. The weights are those of the
step with the lowest held-out loss ({measured.best_step} of {options.steps}), and the settings were
chosen on the held-out text too, so that figure is somewhat optimistic.

## Sample

Prompt `{SAMPLE_PROMPT}`, temperature 0.7, top-k 40, seed {options.seed}:

```text
{measured.sample}
```

## Made by

```bash
{command_line(options)}
```

Python {platform.python_version()}, torch {torch.__version__.split("+")[0]}, transformers \
{transformers.__version__}, {options.threads} CPU threads, {measured.seconds / 60:.1f} minutes.
"""


def save_folder(out: Path, model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, card: str) -> int:
    """Write beside `out`, check the size, then rename; a failure leaves the old folder as it was."""
    partial = out.with_name(f".{out.name}.partial")
    previous = out.with_name(f".{out.name}.previous")
    for leftover in (partial, previous):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / "README.md").write_text(card, encoding="utf-8")
    for file in partial.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner only; a package is read by all
    size = sum(file.stat().st_size for file in partial.iterdir())
    if size > MAX_FOLDER_BYTES:
        shutil.rmtree(partial)
        raise SystemExit(f"The folder has {size:,} bytes, over {MAX_FOLDER_BYTES:,}: shrink the model.")
    if out.exists():
        out.rename(previous)
    partial.rename(out)
    shutil.rmtree(previous, ignore_errors=True)
    return size


def main() -> None:
    options = build_parser().parse_args()
    started = time.monotonic()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    corpus = split_topics()
    tokenizer = train_tokenizer(corpus.train, options.vocab_size, options.positions)
    train = encode_stream(tokenizer, corpus.train)
    held_out = encode_stream(tokenizer, corpus.held_out)
    model = build_model(options, tokenizer)
    best_step = train_model(model, train, held_out, options)

    losses = baseline_losses(train, held_out, len(tokenizer))
    losses["this model"] = mean_token_loss(model, held_out)
    measured = Measurements(
        n_parameters=model.num_parameters(),
        n_train_tokens=len(train) - 1,
        n_held_out_tokens=len(held_out) - 1,
        train_loss=mean_token_loss(model, train),
        losses=losses,
        best_step=best_step,
        seconds=time.monotonic() - started,
        sample=generate_sample(model, tokenizer, options.seed),
    )
    size = save_folder(options.out, model, tokenizer, model_card(options, corpus, measured))
    print(loss_table(measured, corpus.held_out_bytes))
    print(f"best step {best_step}, {measured.seconds:.0f} s, {size:,} bytes in {options.out}")


if __name__ == "__main__":
    main()
