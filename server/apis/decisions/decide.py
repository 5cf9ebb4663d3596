"""Scores the answers to questions about one input, without generating text.

The messages and the question are one prompt. The model's probabilities of the next token say how probable the label of
each answer is. All that comes before the questions is rendered and encoded once, and the prefix cache computes it once.
A label of several tokens has the product of their probabilities: the prompt is followed by each beginning of a label,
which makes a trie, and each of its nodes is one request. Few requests run at a time, so that others are served between
them. A probability depends on the prompt alone, if the engine's results do not depend on load.
"""

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby

import msgspec
from starlette.requests import Request

from weft.engine.wire.messages import Pin
from weft.server.apis.decisions.questions import Asked
from weft.server.errors import ContextLengthError, InvalidRequestError, UnsupportedValueError
from weft.server.formats.detection import OutputFormats
from weft.server.formats.reasoning import ReasoningBlock
from weft.server.generate.events import Counts
from weft.server.generate.pipeline import complete
from weft.server.generate.prompts import pins_of
from weft.server.http.context import ServerContext
from weft.server.task.task import Chat, Task, Texts
from weft.server.text.chat_template import ChatTemplateError, TemplateOptions
from weft.server.text.text_tokenizer import TextTokenizer, TextTooLongError, TokenRoom

MAX_NUM_RUNNING = 32
"""Most requests of one body that the engine has at a time; never more than half of what it runs."""

_ANSWER = "decided"
"""An answer, rendered only to see what the template puts before it."""

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A question behind the common beginning, and the spellings of each label as ids."""

    tail: list[int]
    labels: list[list[Ids]]

    @property
    def nodes(self) -> list[Ids]:
        """Every beginning of a label, the empty one first."""
        spellings = [ids for label in self.labels for ids in label]
        return list(dict.fromkeys(ids[:n] for ids in spellings for n in range(len(ids))))


async def decide(
    chat: Chat, asked: Sequence[Asked], task: Task, request: Request, context: ServerContext
) -> tuple[list[list[float]], Counts]:
    """Score every label of every question.

    Args:
        chat: The input. Each question goes on its last message if that is the user's, else it is a message of its own.
        task: What all requests have in common; its input does not count.

    Returns:
        The logarithms of the labels' probabilities, by question, and the token counts of the questions' prompts.

    Raises:
        ApiError: As `respond`.
    """
    model = task.model
    size = task.size + sum(len(question.text) for question in asked)
    context.metrics.of(model.name).note_retry(request.headers.get("x-stainless-retry-count", ""))
    head, pins, prompts = await context.workers.run_template(model.tokenizer, size, _encode, chat, asked, task)
    # All questions first: they alone count as usage, and their blocks are in the cache for the rest.
    nodes = sorted(((i, node) for i, prompt in enumerate(prompts) for node in prompt.nodes), key=lambda at: len(at[1]))
    found: list[dict[Ids, dict[int, float]]] = [{} for _ in prompts]
    counts = Counts(*[0] * len(fields(Counts)))
    for part in _parts(nodes, max(1, min(MAX_NUM_RUNNING, model.engine_info.max_num_seqs // 2))):
        wanted = {ids[len(node)] for i, node in part for ids in _below(prompts[i], node)}
        texts = Texts([(asked[i].at, [*head, *prompts[i].tail, *node]) for i, node in part], pins=pins)
        sampling = msgspec.structs.replace(task.sampling, logprob_token_ids=tuple(sorted(wanted)))
        choices, report = await complete(replace(task, input=texts, sampling=sampling), request, context)
        pins = ()
        for (i, node), choice in zip(part, choices, strict=True):
            logprobs = choice.tokens[0].logprobs
            assert logprobs is not None, "asked for, so the engine reports them"
            found[i][node] = dict(zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True))
        if not part[0][1]:
            counts = _sum(counts, report.counts())
    return [_scores(prompt, known) for prompt, known in zip(prompts, found, strict=True)], counts


def _parts(nodes: Sequence[tuple[int, Ids]], size: int) -> Iterator[list[tuple[int, Ids]]]:
    """Cut sorted nodes into parts of this size, each on one level of the tries."""
    for _, group in groupby(nodes, key=lambda at: len(at[1])):
        level = list(group)
        yield from (level[start : start + size] for start in range(0, len(level), size))


def _below(prompt: _Prompt, node: Ids) -> Iterator[Ids]:
    """The spellings that go on from a node."""
    return (ids for label in prompt.labels for ids in label if len(ids) > len(node) and ids[: len(node)] == node)


def _scores(prompt: _Prompt, known: dict[Ids, dict[int, float]]) -> list[float]:
    def score(ids: Ids) -> float:
        return sum(known[ids[:n]][token_id] for n, token_id in enumerate(ids))

    return [log_sum([score(ids) for ids in label]) for label in prompt.labels]


def log_sum(values: Sequence[float]) -> float:
    """The logarithm of the sum of what these are the logarithms of."""
    top = max(values)
    return top if top == -math.inf else top + math.log(sum(math.exp(value - top) for value in values))


def _sum(one: Counts, other: Counts) -> Counts:
    return Counts(*(getattr(one, field.name) + getattr(other, field.name) for field in fields(Counts)))


def _encode(chat: Chat, asked: Sequence[Asked], task: Task) -> tuple[list[int], Sequence[Pin], list[_Prompt]]:
    tokenizer, max_len = task.model.tokenizer, task.model.engine_info.max_model_len
    room, labels = TokenRoom(max_len), dict[str, list[Ids]]()
    try:
        head, gap, end = _frame(tokenizer, task.model.formats, chat)
        head_ids = tokenizer.encode_rendered(head, room)
        pins = pins_of(tokenizer, chat, head_ids, room)
        prompts = []
        for question in asked:
            for label in question.labels:
                if label not in labels:
                    labels[label] = _spellings(tokenizer, label)
            spelled = [labels[label] for label in question.labels]
            _check_distinct(spelled, question.at)
            tail = tokenizer.encode_inserted(gap + question.text, end, room)
            num_tokens = len(head_ids) + len(tail) + max(len(ids) for label in spelled for ids in label)
            if num_tokens > max_len:
                raise TextTooLongError(num_tokens)
            prompts.append(_Prompt(tail, spelled))
    except ChatTemplateError as exc:
        raise InvalidRequestError(str(exc), param="input") from exc
    except RecursionError as exc:
        raise InvalidRequestError("input is nested too deeply", param="input") from exc
    except TextTooLongError as exc:
        message = f"the context holds at most {max_len} tokens, but input and a question have at least {exc.num_tokens}"
        raise ContextLengthError(message, param="input") from None
    return head_ids, pins, prompts


def _frame(tokenizer: TextTokenizer, formats: OutputFormats, chat: Chat) -> tuple[list[str], str, list[str]]:
    """Render the chat; return the pieces before the question, the spaces between, and the pieces behind it."""
    mark = secrets.token_hex(16)
    *messages, last = chat.messages
    if last["role"] == "user":
        messages.append({**last, "content": f"{last['content']}\n\n{mark}"})
    else:
        messages += [last, {"role": "user", "content": mark}]
    pieces = tokenizer.render_chat(messages, chat.options)
    found = [i for i, piece in enumerate(pieces) if mark in piece]
    if len(found) != 1 or pieces[found[0]].count(mark) != 1:
        raise ChatTemplateError("the chat template does not show the question once")
    before, _, behind = pieces[found[0]].partition(mark)
    end = [behind, *pieces[found[0] + 1 :]]
    end[-1] += _opening(tokenizer, formats, chat.options)
    head = before.rstrip(" ")  # a space before a word is part of the word's token
    return [*pieces[: found[0]], head], before[len(head) :], [piece for piece in end if piece]


def _opening(tokenizer: TextTokenizer, formats: OutputFormats, options: TemplateOptions) -> str:
    """What stands between the end of a prompt and the answer: for example empty reasoning, or the header of a channel.

    The template tells it by the way it renders a finished answer. If it leaves out there what a prompt has opened, the
    reasoning is closed.
    """
    question = {"role": "user", "content": "x"}
    prompt = "".join(tokenizer.render_chat([question], options))
    finished = replace(options, add_generation_prompt=False)
    whole = "".join(tokenizer.render_chat([question, {"role": "assistant", "content": _ANSWER}], finished))
    if whole.startswith(prompt):
        opening, _, _ = whole[len(prompt) :].partition(_ANSWER)
        if opening.strip():
            return opening
    reasoning = formats.reasoning
    is_open = reasoning is not None and reasoning.block(prompt) is ReasoningBlock.OPEN
    return f"\n{reasoning.end}\n\n" if reasoning and is_open else ""


def _spellings(tokenizer: TextTokenizer, label: str) -> list[Ids]:
    """The ids of a label as models write it: small or capital, with or without a space before it."""
    found: list[Ids] = []
    for text in dict.fromkeys((label, label.capitalize() if label.islower() else label)):
        plain, spaced = (tuple(tokenizer.encode_continuation(t)) for t in (text, f" {text}"))
        found += [plain, spaced] if len(spaced) <= len(plain) else [plain]  # a lone space is no spelling
    return list(dict.fromkeys(found))


def _check_distinct(labels: list[list[Ids]], at: str) -> None:
    """Check that every spelling is one label's alone, and not the beginning of another."""
    spellings = [ids for label in labels for ids in label]
    beginnings = {ids[:n] for ids in spellings for n in range(len(ids))}
    if len(set(spellings)) < len(spellings) or not beginnings.isdisjoint(spellings):
        message = f"{at}: the labels of its answers cannot be told apart in this model's vocabulary"
        raise UnsupportedValueError(message, param=at)
