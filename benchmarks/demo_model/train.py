"""Train the demo model from scratch and write it, in Hugging Face layout, into the package.

    python -m benchmarks.demo_model.train

Owns the model's shape, the packing of conversations into batches, and the training loop. Invariant: batch n is a
function of the seed and n alone, and a checkpoint holds all the rest, so an interrupted run that is started again
ends as if it had never stopped. It refuses a checkpoint that another plan has left behind.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from benchmarks.demo_model import generate
from benchmarks.demo_model import tokenizer as bpe

REPOSITORY = Path(__file__).parents[2]
MAX_LENGTH = 4096
NUM_TOKENIZER_CHATS = 20_000


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the result depends on, beside the code."""

    seed: int = 7
    num_steps: int = 2500
    num_warmup_steps: int = 80
    peak_learning_rate: float = 3e-3
    weight_decay: float = 0.1
    tokens_per_step: int = 2048
    row_lengths: tuple[int, ...] = (256,) * 7 + (1024,)
    longest_row_every: int = 40


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Conversations laid end to end in rows of equal length; the last one of a row may be cut."""

    token_ids: torch.Tensor  # (num_rows, row_length) int64
    is_learned: torch.Tensor  # (num_rows, row_length) bool: ids that the model itself must produce
    documents: torch.Tensor  # (num_rows, row_length) int64: which conversation of its row a token belongs to

    def attention_mask(self) -> torch.Tensor:
        """Return who may look at whom: earlier tokens of the same conversation. (num_rows, 1, length, length)."""
        same_document = self.documents[:, :, None] == self.documents[:, None, :]
        return torch.tril(same_document)[:, None]


def make_model(seed: int) -> Qwen3ForCausalLM:
    """Return the demo model with random weights in float32: 1.9 million parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=bpe.VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=bpe.SPECIAL_TOKENS.index(bpe.END_OF_MESSAGE),
        pad_token_id=bpe.SPECIAL_TOKENS.index(bpe.END_OF_TEXT),
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig.from_dict(
        {"eos_token_id": [config.eos_token_id, config.pad_token_id], "pad_token_id": config.pad_token_id}
    )
    return model


def make_tokenizer(seed: int) -> Tokenizer:
    """Return the tokenizer, learned from conversations that no batch contains."""
    random = Random(f"tokenizer {seed}")
    chats = (generate.conversation(random, 1) for _ in range(NUM_TOKENIZER_CHATS))
    return bpe.train_tokenizer(message["content"] for chat in chats for message in chat)


def _document(random: Random, tokenizer: Tokenizer, row_length: int) -> tuple[list[int], list[bool]]:
    """Return the ids of one conversation or, now and then, of a plain text that ends with `<|endoftext|>`.

    A row of average turns holds about `row_length` / 25 of them, and one of unrelated words `row_length` / 2.5.
    """
    if random.random() < 0.04:
        token_ids = tokenizer.encode(generate.plain_text(random) + bpe.END_OF_TEXT).ids
        return token_ids, [False] + [True] * (len(token_ids) - 1)
    num_turns = 1 if random.random() < 0.4 else random.randint(2, min(40, row_length // 40))
    conversation = generate.conversation(random, num_turns, max_num_system_words=row_length // 4)
    return bpe.encode_conversation(tokenizer, conversation)


def make_batch(plan: Plan, step: int, tokenizer: Tokenizer) -> PackedBatch:
    """Return the batch of `step` (>= 0): mostly many short rows, sometimes few long ones or one of full length."""
    random = Random(f"batch {plan.seed} {step}")
    row_length = plan.row_lengths[step % len(plan.row_lengths)]
    if step % plan.longest_row_every == plan.longest_row_every - 2:
        row_length = MAX_LENGTH
    rows: list[tuple[list[int], list[bool], list[int]]] = []
    for _ in range(max(1, plan.tokens_per_step // row_length)):
        token_ids: list[int] = []
        is_learned: list[bool] = []
        documents: list[int] = []
        while len(token_ids) < row_length:
            ids, learned = _document(random, tokenizer, row_length)
            documents += [documents[-1] + 1 if documents else 0] * len(ids)
            token_ids += ids
            is_learned += learned
        rows.append((token_ids[:row_length], is_learned[:row_length], documents[:row_length]))
    ids_rows, learned_rows, document_rows = zip(*rows, strict=True)
    return PackedBatch(torch.tensor(ids_rows), torch.tensor(learned_rows), torch.tensor(document_rows))


def loss_of(model: Qwen3ForCausalLM, batch: PackedBatch) -> torch.Tensor:
    """Return the mean cross-entropy, in nats, over the learned tokens; the head runs on no other position."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(
            input_ids=batch.token_ids, attention_mask=batch.attention_mask(), use_cache=False
        ).last_hidden_state  # (num_rows, length, hidden)
        is_next_learned = batch.is_learned[:, 1:]
        logits = model.lm_head(hidden[:, :-1][is_next_learned])  # (num_learned, vocab)
    return functional.cross_entropy(logits.float(), batch.token_ids[:, 1:][is_next_learned])


def learning_rate(plan: Plan, step: int) -> float:
    """Return the rate of `step`: a linear rise, then a cosine down to a twentieth of the peak."""
    if step < plan.num_warmup_steps:
        return plan.peak_learning_rate * (step + 1) / plan.num_warmup_steps
    progress = (step - plan.num_warmup_steps) / (plan.num_steps - plan.num_warmup_steps)
    return plan.peak_learning_rate * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)


@torch.inference_mode()
def answers_of(
    model: Qwen3ForCausalLM, tokenizer: Any, questions: Sequence[generate.Question], max_tokens: int = 80
) -> list[str]:
    """Return what `model` answers greedily to all `questions` at once; `tokenizer` is transformers' own."""
    tokenizer.padding_side = "left"
    prompts = tokenizer.apply_chat_template(
        [list(question.messages) for question in questions],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    prompts.pop("token_type_ids", None)
    generated: Any = model.generate  # type: ignore[misc] # its annotation asks for more than a model
    output = generated(**prompts, max_new_tokens=max_tokens, do_sample=False)  # (num_questions, length)
    answers: list[str] = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def shares_right(model: Qwen3ForCausalLM, tokenizer: Any, number: int) -> dict[str, float]:
    """Return, for every examined skill, which share of `number` held-out chats the model answers right."""
    shares: dict[str, float] = {}
    for skill in generate.EXAMINED_SKILLS:
        questions = generate.exam(skill, number)
        answers = answers_of(model, tokenizer, questions)
        num_right = sum(generate.is_right(*pair) for pair in zip(questions, answers, strict=True))
        shares[skill] = num_right / number
    return shares


def _resume(path: Path, plan: Plan, model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint at `path`, if there is one, and return the step to go on with."""
    if not path.exists():
        return 0
    checkpoint = torch.load(path, weights_only=True)
    if checkpoint["plan"] != asdict(plan):
        raise typer.BadParameter(f"{path} belongs to another plan; delete it to start anew")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return int(checkpoint["num_steps_done"])


def _save(path: Path, plan: Plan, model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, done: int) -> None:
    """Replace the checkpoint at `path`; a crash meanwhile leaves the old one whole."""
    checkpoint = {
        "plan": asdict(plan),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "num_steps_done": done,
    }
    torch.save(checkpoint, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def train(plan: Plan, folder: Path, examine_every: int = 400, save_every: int = 200) -> Qwen3ForCausalLM:
    """Return the trained model; `folder` keeps the checkpoint and the tokenizer, and a finished run is loaded from it.

    Raises:
        typer.BadParameter: the checkpoint in `folder` was made with another plan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(plan.seed)
    bpe.save_tokenizer(tokenizer, folder, MAX_LENGTH)
    examiner = AutoTokenizer.from_pretrained(folder)
    model = make_model(plan.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=plan.weight_decay, fused=True
    )
    checkpoint = folder / "checkpoint.pt"
    done = _resume(checkpoint, plan, model, optimizer)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=plan.num_steps, completed=done)
        for step in range(done, plan.num_steps):
            optimizer.param_groups[0]["lr"] = learning_rate(plan, step)
            loss = loss_of(model, make_batch(plan, step, tokenizer))
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            progress.update(task, advance=1, description=f"loss {loss.item():.4f}")
            if (step + 1) % save_every == 0 or step + 1 == plan.num_steps:
                _save(checkpoint, plan, model, optimizer, step + 1)
                progress.console.print(f"step {step + 1}: loss {loss.item():.4f}")
            if (step + 1) % examine_every == 0:
                shares = shares_right(model, examiner, number=60)
                progress.console.print(", ".join(f"{skill} {share:.0%}" for skill, share in shares.items()))
    return model


def main(
    output: Annotated[Path, typer.Option(help="Where the finished model goes.")] = REPOSITORY / "server/demo_model",
    folder: Annotated[Path, typer.Option(help="Where checkpoints are kept.")] = REPOSITORY / "build/demo_model",
    steps: Annotated[int, typer.Option(min=100, help="Training steps.")] = Plan().num_steps,
    threads: Annotated[int, typer.Option(min=1, help="Processor threads.")] = 1,
) -> None:
    """Train the demo model, or go on where an interrupted run stopped, and write it to `output`."""
    torch.set_num_threads(threads)
    plan = Plan(num_steps=steps)
    model = train(plan, folder)
    model.bfloat16()
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)  # safetensors leaves it to its owner; a container's user differs
    bpe.save_tokenizer(make_tokenizer(plan.seed), output, MAX_LENGTH)
    shares = shares_right(Qwen3ForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output), number=200)
    for skill, share in shares.items():
        print(f"{skill:12} {share:7.1%}")


if __name__ == "__main__":
    typer.run(main)
