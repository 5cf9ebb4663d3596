"""Train the demo model from scratch and write it, in Hugging Face layout, into the package.

    python -m demo_model.train

Owns the model's shape, the packing of conversations into batches, and the training loop. Invariant: batch n is a
function of the seed and n alone, and a checkpoint holds all the rest, so an interrupted run that is started again
ends as if it had never stopped. It refuses a checkpoint that another plan has left behind.
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from demo_model import generate
from demo_model import tokenizer as bpe
from demo_model.skill import Reply

REPOSITORY = Path(__file__).parents[1]
MAX_LENGTH = 4096
NUM_TOKENIZER_CHATS = 30_000
CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, slots=True)
class Shape:
    """What the model is made of."""

    num_layers: int = 6
    hidden_size: int = 192
    intermediate_size: int = 512


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the result depends on, beside the code.

    The rates rise to their peaks for `num_warmup_steps`; then they fall in a line to nothing.
    """

    shape: Shape = Shape()
    seed: int = 11
    num_steps: int = 4500
    num_warmup_steps: int = 100
    matrix_learning_rate: float = 0.015  # of Muon, for the matrices of the layers
    other_learning_rate: float = 2e-3  # of AdamW, for embeddings and norms
    weight_decay: float = 0.1
    num_rows: int = 8
    row_length: int = 512
    longest_row_every: int = 60


FURTHER_PLAN = Plan(seed=21, num_steps=1000, matrix_learning_rate=0.006, other_learning_rate=7e-4)
"""For more of the same, from the model that is there."""

FURTHER_SHARE = 0.7
"""Of the weights after further training, in the mean with those before: less is forgotten (Wortsman et al., 2022)."""

DRAFT_PLAN = Plan(shape=Shape(num_layers=2, hidden_size=128, intermediate_size=384), num_steps=2000)
"""The model that guesses what the other one will say, for speculative decoding."""


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


def make_model(plan: Plan) -> Qwen3ForCausalLM:
    """Return a model of the plan's shape with random weights in float32."""
    torch.manual_seed(plan.seed)
    config = Qwen3Config(
        vocab_size=bpe.VOCAB_SIZE,
        hidden_size=plan.shape.hidden_size,
        intermediate_size=plan.shape.intermediate_size,
        num_hidden_layers=plan.shape.num_layers,
        num_attention_heads=plan.shape.hidden_size // 32,
        num_key_value_heads=plan.shape.hidden_size // 32,  # with 2, copying is learned later: see README.md
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=bpe.SPECIAL_TOKENS.index(bpe.END_OF_MESSAGE),
        pad_token_id=bpe.SPECIAL_TOKENS.index(bpe.END_OF_TEXT),
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig.from_dict(
        {
            "eos_token_id": [config.eos_token_id, config.pad_token_id],
            "pad_token_id": config.pad_token_id,
            "do_sample": True,
            "temperature": 0.3,  # what is served unless a request says otherwise; at 1.0 a story can lose its thread
        }
    )
    return model


def make_tokenizer(seed: int) -> Tokenizer:
    """Return the tokenizer, made from conversations that no batch contains.

    A word is whole where chats are made of it, not where they are about it: what is sorted, spelled, told or called is
    letters, as it will be in an exam and for users, unless it occurs as often as in one chat of a hundred.
    """
    random = Random(f"tokenizer {seed}")
    chats = [generate.conversation(random, 1) for _ in range(NUM_TOKENIZER_CHATS)]
    texts = [part for chat in chats for part in bpe.plain_parts(bpe.render(chat.messages, chat.tools))]
    common = {
        word for word, number in Counter(re.findall(r"\w+", " ".join(texts))).items() if number >= len(chats) / 100
    }
    values = generate.values_of_chats()
    return bpe.make_tokenizer(texts, lambda word: word in common or word.lower() not in values)


def _document(random: Random, tokenizer: Tokenizer, row_length: int) -> tuple[list[int], list[bool]]:
    """Return the ids of one conversation or, now and then, of a plain text that ends with `<|endoftext|>`."""
    if random.random() < 0.03:
        token_ids = tokenizer.encode(generate.plain_text(random) + bpe.END_OF_TEXT).ids
        return token_ids, [False] + [True] * (len(token_ids) - 1)
    num_turns = random.choice((1, 1, 1, 2, 2, 3, 4)) if row_length < MAX_LENGTH else random.randint(1, 80)
    chat = generate.conversation(random, num_turns)
    return bpe.encode_conversation(tokenizer, chat.messages, chat.tools)


def make_batch(plan: Plan, step: int, tokenizer: Tokenizer) -> PackedBatch:
    """Return the batch of `step` (>= 0): mostly some short rows, now and then one of full length."""
    random = Random(f"batch {plan.seed} {step}")
    num_rows, row_length = plan.num_rows, plan.row_length
    if step % plan.longest_row_every == plan.longest_row_every - 2:
        num_rows, row_length = 1, MAX_LENGTH
    rows: list[tuple[list[int], list[bool], list[int]]] = []
    for _ in range(num_rows):
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


def loss_of(model: Qwen3ForCausalLM, body: Callable[..., Any], batch: PackedBatch) -> torch.Tensor:
    """Return the mean cross-entropy, in nats, over the learned tokens; the head runs on no other position.

    `body` is `model.model`, perhaps compiled: on a CPU half as fast again, and faster in float32 than in bfloat16.
    """
    hidden = body(
        input_ids=batch.token_ids, attention_mask=batch.attention_mask(), use_cache=False
    ).last_hidden_state  # (num_rows, length, hidden)
    is_next_learned = batch.is_learned[:, 1:]
    logits = model.lm_head(hidden[:, :-1][is_next_learned])  # (num_learned, vocab)
    return functional.cross_entropy(logits, batch.token_ids[:, 1:][is_next_learned])


def make_optimizers(plan: Plan, model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, which needs half the steps here, and AdamW for all the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=plan.matrix_learning_rate, weight_decay=plan.weight_decay),
        torch.optim.AdamW(others, lr=plan.other_learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def share_of_rate(plan: Plan, step: int) -> float:
    """Return which share of the peak rates holds at `step`."""
    return min((step + 1) / plan.num_warmup_steps, (plan.num_steps - step) / (plan.num_steps - plan.num_warmup_steps))


def read_reply(text: str) -> Reply:
    """Split what the model wrote as the server's parsers would; for exams while it learns."""
    text = text.partition(bpe.END_OF_MESSAGE)[0]
    reasoning, _, content = text.rpartition(bpe.END_THINKING)
    calls = []
    for found in re.findall(rf"{bpe.BEGIN_CALL}\n(.*?)\n{bpe.END_CALL}", content, re.DOTALL):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            call = json.loads(found)
            calls.append((call["name"], call["arguments"]))
    return Reply(content.partition(bpe.BEGIN_CALL)[0].strip(), reasoning.strip(), tuple(calls))


@torch.inference_mode()
def replies_of(model: Qwen3ForCausalLM, tokenizer: Any, questions: Sequence[generate.Question]) -> list[Reply]:
    """Return what `model` answers greedily to all `questions` at once; `tokenizer` is transformers' own."""
    tokenizer.padding_side = "left"
    texts = [
        tokenizer.apply_chat_template(
            list(question.messages),
            tools=list(question.exchange.tools) or None,
            enable_thinking=question.exchange.thinks,
            add_generation_prompt=True,
            tokenize=False,
        )
        for question in questions
    ]
    prompts = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    prompts.pop("token_type_ids", None)
    generated: Any = model.generate  # type: ignore[misc] # its annotation asks for more than a model
    output = generated(**prompts, max_new_tokens=generate.MAX_ANSWER_TOKENS, do_sample=False)  # (num_questions, length)
    written = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :])  # with markers, which skipping drops
    return [read_reply(text) for text in written]


def shares_right(model: Qwen3ForCausalLM, tokenizer: Any, number: int) -> dict[str, float]:
    """Return, for every examined skill, which share of `number` held-out chats the model answers right."""
    shares: dict[str, float] = {}
    for skill in generate.EXAMINED_SKILLS:
        questions = generate.exam(skill, number)
        replies = replies_of(model, tokenizer, questions)
        num_right = sum(question.is_right(reply) for question, reply in zip(questions, replies, strict=True))
        shares[skill] = num_right / number
    return shares


def resume(path: Path, plan: Plan, model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer]) -> int:
    """Load the checkpoint at `path`, if there is one, and return the step to go on with."""
    if not path.exists():
        return 0
    checkpoint = torch.load(path, weights_only=True)
    done = int(checkpoint["num_steps_done"])
    if checkpoint["plan"] != asdict(plan):
        raise typer.BadParameter(f"{path} belongs to another plan; delete it to start anew")
    model.load_state_dict(checkpoint["model"])
    for optimizer, state in zip(optimizers, checkpoint["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    return done


def save(path: Path, plan: Plan, model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer], done: int) -> None:
    """Replace the checkpoint at `path`; a crash meanwhile leaves the old one whole."""
    checkpoint = {
        "plan": asdict(plan),
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "num_steps_done": done,
    }
    torch.save(checkpoint, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def train(
    plan: Plan,
    tokenizer: Tokenizer,
    folder: Path,
    start: Path | None = None,
    examine_every: int = 1500,
    save_every: int = 200,
) -> Qwen3ForCausalLM:
    """Return the trained model; `folder` keeps the checkpoint and the tokenizer, and a finished run is loaded from it.

    Args:
        start: The model whose weights training begins with; None begins with random ones.

    Raises:
        typer.BadParameter: the checkpoint in `folder` was made with another plan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save_tokenizer(tokenizer, folder, MAX_LENGTH)
    examiner = AutoTokenizer.from_pretrained(folder)
    model = make_model(plan)
    if start:
        model.load_state_dict(Qwen3ForCausalLM.from_pretrained(start, dtype=torch.float32).state_dict())
    body = torch.compile(model.model, dynamic=False)
    optimizers = make_optimizers(plan, model)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    checkpoint = folder / CHECKPOINT
    done = resume(checkpoint, plan, model, optimizers)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=plan.num_steps, completed=done)
        for step in range(done, plan.num_steps):
            loss = loss_of(model, body, make_batch(plan, step, tokenizer))
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, peak in zip(optimizers, peaks, strict=True):
                optimizer.param_groups[0]["lr"] = peak * share_of_rate(plan, step)
                optimizer.step()
                optimizer.zero_grad()
            progress.update(task, advance=1, description=f"loss {loss.item():.4f}")
            if (step + 1) % save_every == 0 or step + 1 == plan.num_steps:
                save(checkpoint, plan, model, optimizers, step + 1)
                progress.console.print(f"step {step + 1}: loss {loss.item():.4f}")
            if (step + 1) % examine_every == 0:
                shares = shares_right(model, examiner, number=12)
                progress.console.print(", ".join(f"{skill} {share:.0%}" for skill, share in shares.items()))
    return model


def main(
    output: Annotated[Path, typer.Option(help="Where the finished model goes.")] = REPOSITORY / "server/demo_model",
    folder: Annotated[Path, typer.Option(help="Where checkpoints are kept.")] = REPOSITORY / "build/demo_model",
    steps: Annotated[int | None, typer.Option(min=200, help="Training steps, if not those of the plan.")] = None,
    further: Annotated[bool, typer.Option("--further", help="Go on from the model that `output` holds.")] = False,
    draft: Annotated[bool, typer.Option("--draft", help="Train the small draft of the model instead.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Processor threads.")] = 1,
) -> None:
    """Train the demo model, or go on where an interrupted run stopped, and write it to `output`."""
    if draft and further:
        raise typer.BadParameter("--draft is trained from scratch: leave --further out")
    torch.set_num_threads(threads)
    plan = DRAFT_PLAN if draft else FURTHER_PLAN if further else Plan()
    if steps is not None:
        plan = replace(plan, num_steps=steps)
    tokenizer = Tokenizer.from_file(str(output / "tokenizer.json")) if draft or further else make_tokenizer(plan.seed)
    if draft:  # it drafts for the model, whose tokenizer it shares
        output, folder = output / "draft", folder / "draft"
    if further:
        folder = folder / "further"
    model = train(plan, tokenizer, folder, output if further else None)
    if further:
        before = Qwen3ForCausalLM.from_pretrained(output, dtype=torch.float32).state_dict()
        mean = {n: before[n] * (1 - FURTHER_SHARE) + w * FURTHER_SHARE for n, w in model.state_dict().items()}
        model.load_state_dict(mean)
    model.bfloat16()
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)  # safetensors leaves it to its owner; a container's user differs
    if further:
        (folder / CHECKPOINT).unlink()  # or the next one would take it for its own, finished already
    if draft:
        return
    bpe.save_tokenizer(tokenizer, output, MAX_LENGTH)
    shares = shares_right(Qwen3ForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output), number=200)
    for skill, share in shares.items():
        print(f"{skill:16} {share:7.1%}")


if __name__ == "__main__":
    typer.run(main)
