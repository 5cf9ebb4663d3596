"""Encodes the input of a task into prompts of token ids; long inputs in a thread.

Encoding of a text stops as soon as it cannot fit. Prompts are truncated if the caller asked for it. All this happens
before anything is sent to the engine.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from weft.engine.wire.messages import Pin
from weft.server.errors import ContextLengthError, InvalidRequestError
from weft.server.http.limits import LONG_SIZE, Workers
from weft.server.models.seq2seq import last_text, with_source
from weft.server.task.parts import located, without_first
from weft.server.task.request_options import find_pins, marked
from weft.server.task.task import Chat, Prompt, Task, Texts
from weft.server.task.validation import check_range, check_token_ids
from weft.server.text.chat_template import ChatTemplateError
from weft.server.text.text_tokenizer import TextTokenizer, TextTooLongError, TokenRoom


async def encode_chat(
    tokenizer: TextTokenizer, chat: Chat, room: TokenRoom, workers: Workers, size: int
) -> tuple[Prompt, list[Pin]]:
    """Encode messages; return the prompt and the pins, which keep beginnings of the prompt in the prefix cache.

    Args:
        size: Of the messages, in bytes.

    Raises:
        InvalidRequestError: The template refuses the messages, or there is no template.
        TextTooLongError: There is no room for the prompt.
    """
    pieces, shown = await workers.run_template(tokenizer, size, _rendered, tokenizer, chat)

    def encode() -> tuple[Prompt, list[Pin]]:
        if tokenizer.is_of_encoder:
            return Prompt(tokenizer.encode(pieces[0], True, room)), []
        placed, spans = chat.spans.placed(pieces)
        token_ids = tokenizer.encode_rendered(placed, room)
        ids = {span.placeholder: tokenizer.added_id(span.placeholder) for span in spans}
        pins = _pins(tokenizer, chat, token_ids, shown, room)
        return Prompt(token_ids, None, *located(token_ids, spans, ids)), pins

    return await workers.run(size + chat.spans.num_chars, encode)


def encode_now(tokenizer: TextTokenizer, chat: Chat, room: TokenRoom) -> list[int]:
    """The prompt ids of messages, for what has a thread; raises as `encode_chat` does."""
    pieces, _ = _rendered(tokenizer, replace(chat, breakpoints=()))
    if tokenizer.is_of_encoder:
        return tokenizer.encode(pieces[0], True, room)
    return tokenizer.encode_rendered(chat.spans.placed(pieces)[0], room)


def _rendered(tokenizer: TextTokenizer, chat: Chat) -> tuple[list[str], list[str]]:
    """The chat rendered, and with marks at its breakpoints if it has any. An encoder reads the last message alone."""
    if tokenizer.is_of_encoder:
        return [last_text(chat.messages, chat.param, continues=chat.options.continue_final_message)], []
    try:
        return _shown(tokenizer, chat, chat.messages), _marked(tokenizer, chat)
    except ChatTemplateError as exc:
        raise InvalidRequestError(str(exc), param=chat.param) from exc
    except RecursionError as exc:
        raise InvalidRequestError(f"{chat.param} is nested too deeply", param=chat.param) from exc


def _shown(tokenizer: TextTokenizer, chat: Chat, messages: list[dict[str, Any]]) -> list[str]:
    return chat.spans.rendered(messages, partial(tokenizer.render_chat, options=chat.options))


def _marked(tokenizer: TextTokenizer, chat: Chat) -> list[str]:
    return _shown(tokenizer, chat, marked(chat.messages, chat.breakpoints)) if chat.breakpoints else []


def pins_of(tokenizer: TextTokenizer, chat: Chat, token_ids: list[int], room: TokenRoom) -> list[Pin]:
    """The pins of the chat's breakpoints within its prompt, or within a beginning of it."""
    return _pins(tokenizer, chat, token_ids, _marked(tokenizer, chat), room)


def _pins(
    tokenizer: TextTokenizer, chat: Chat, token_ids: list[int], rendered: list[str], room: TokenRoom
) -> list[Pin]:
    if not chat.breakpoints:
        return []
    bound = TokenRoom(room.num_tokens, keeps_end=True)  # a beginning that does not fit is cut, never refused
    placed, _ = chat.spans.placed(rendered)
    return find_pins(chat.breakpoints, token_ids, placed, partial(tokenizer.encode_rendered, room=bound))


def num_prompt_tokens(max_model_len: int, max_tokens: int | None, *, is_bound: bool) -> int:
    """How many tokens a prompt may have that is shortened for the sake of its output.

    If `max_tokens` only bounds the output and is more than the context holds, one token of output is enough.
    """
    is_cut = max_tokens is None or (is_bound and max_tokens >= max_model_len)
    return max(0, max_model_len - (1 if is_cut or max_tokens is None else max_tokens))


class PromptEncoder:
    """Encodes the texts of one task.

    Every method raises ContextLengthError if a text does not fit the context, alone or together with the output.
    """

    def __init__(self, task: Task, workers: Workers) -> None:
        self._task = task
        self._workers = workers
        self._tokenizer = task.model.tokenizer
        self._info = task.model.engine_info
        self._room = TokenRoom(self._info.max_prompt, keeps_end=task.truncate_to is not None)

    async def prompts(self) -> tuple[list[Prompt], list[Pin]]:
        """Every prompt, and for messages the pins, which keep beginnings of the prompt in the prefix cache.

        Raises:
            InvalidRequestError: The template refuses the messages, there is no prompt, or a prompt is empty.
        """
        if isinstance(self._task.input, Texts):
            prompts = [self._truncated(prompt) for prompt in await self._texts(self._task.input)]
            self._check_context(prompts, "prompt")
            return prompts, list(self._task.input.pins)
        param = self._task.input.param
        with self._checking_context(param):
            whole, pins = await encode_chat(
                self._tokenizer, self._task.input, self._room, self._workers, self._task.size
            )
        prompt = self._truncated(replace(whole, token_ids=self._in_language(whole.token_ids)))
        self._check_context([prompt], param)
        num_cut = len(whole.token_ids) - len(prompt.token_ids)
        return [prompt], [Pin(max(0, pin.num_tokens - num_cut), pin.ttl_s) for pin in pins]

    async def prediction(self) -> tuple[int, ...]:
        """The ids of the text that the output will probably contain; empty if there is no prediction."""
        text = self._task.wishes.prediction
        if not text:
            return ()
        with self._checking_context("prediction.content", has_output=False):
            room = TokenRoom(self._info.max_model_len)
            return tuple(await self._workers.run(len(text), self._tokenizer.encode, text, False, room))

    async def _texts(self, input: Texts) -> list[Prompt]:
        begin, filling = self._tokenizer.bos_token_id, input.filling
        if input.items is None:
            stand_in = list(self._info.eos_token_ids[:1]) if filling is None else []
            prompts = [Prompt([begin] if begin is not None else stand_in)]
        else:
            # Many short texts together take long, too.
            num_chars = min(sum(len(item) for _, item in input.items), LONG_SIZE - 1)
            prompts = [await self._prompt(item, at, num_chars, input) for at, item in input.items]
        if filling is not None:
            encode, suffix = self._tokenizer.encode_continuation, input.suffix
            with self._checking_context("suffix"):
                suffix_ids = await self._workers.run(len(suffix), encode, suffix, self._room)
            prompts = [Prompt(filling.prompt(prompt.token_ids, suffix_ids, begin)) for prompt in prompts]
        if not prompts or not all(prompt.token_ids for prompt in prompts):
            raise InvalidRequestError("prompt must hold at least one token, got none", param="prompt")
        return prompts

    async def _prompt(self, item: str | list[int], at: str, num_chars: int, input: Texts) -> Prompt:
        if isinstance(item, str):
            size, encode = max(num_chars, len(item)), self._tokenizer.encode
            with self._checking_context("prompt"):
                token_ids = await self._workers.run(size, encode, item, input.add_special_tokens, self._room)
            return Prompt(self._in_language(token_ids), item)
        if self._task.truncate_to is None:  # before each id is checked
            self._check_context([Prompt(item)], "prompt")
        await self._workers.run_light(len(item), check_token_ids, item, self._info.vocab_size, at)
        return Prompt(self._in_language(item))

    def _in_language(self, token_ids: list[int]) -> list[int]:
        source = self._task.encoded.source
        return token_ids if source is None else with_source(self._tokenizer, token_ids, source)

    def _truncated(self, prompt: Prompt) -> Prompt:
        """The prompt, cut to its end if the caller asked for that. A cut prompt has no text."""
        num_kept, max_len = self._task.truncate_to, self._info.max_prompt
        if num_kept == -1:  # keep as many as leave room for the output, which has its own behind an encoder
            max_tokens = 0 if self._info.max_input else self._task.sampling.max_tokens
            num_kept = num_prompt_tokens(max_len, max_tokens, is_bound=self._task.fits_context)
        elif num_kept is not None:
            name = "truncate_prompt_tokens"
            check_range(f"{name}, when it is not -1,", num_kept, 1, max_len, param=name)
        if num_kept is None or not 0 < num_kept < len(prompt.token_ids):
            return prompt
        num_cut = len(prompt.token_ids) - num_kept
        return Prompt(prompt.token_ids[num_cut:], None, *without_first(num_cut, prompt.spans, prompt.pictures))

    def _check_context(self, prompts: list[Prompt], param: str) -> None:
        max_tokens = self._task.num_reserved
        for num_tokens in (len(prompt.token_ids) for prompt in prompts):
            room = self._info.room(num_tokens, len(self._task.encoded.begin))
            if num_tokens > self._info.max_prompt or (1 if max_tokens is None else max_tokens) > room:
                raise self._context_length_error(num_tokens, param, "", max_tokens)

    @contextmanager
    def _checking_context(self, param: str, *, has_output: bool = True) -> Generator[None, None, None]:
        """Turn TextTooLongError, raised while a text of this field is encoded, into ContextLengthError."""
        try:
            yield
        except TextTooLongError as exc:
            max_tokens = self._task.num_reserved if has_output else None
            raise self._context_length_error(exc.num_tokens, param, "at least ", max_tokens) from None

    def _context_length_error(
        self, num_prompt_tokens: int, param: str, at_least: str, max_tokens: int | None
    ) -> ContextLengthError:
        num_output_tokens = 1 if max_tokens is None else max_tokens
        if longest := self._info.max_input:
            shown = f"{at_least}{num_prompt_tokens} in {param} and {num_output_tokens} for the output were asked for"
            text = f"the model reads at most {longest} tokens and writes at most {self._info.max_own}, but {shown}"
            return ContextLengthError(text, param=param, num_tokens=num_prompt_tokens, max_num_tokens=longest)
        return ContextLengthError(
            f"the context holds at most {self._info.max_model_len} tokens, but "
            f"{at_least}{num_prompt_tokens + num_output_tokens} were asked for: {at_least}{num_prompt_tokens} in "
            f"{param} and {'at least ' if max_tokens is None else ''}{num_output_tokens} for the output",
            param=param,
            num_tokens=num_prompt_tokens,
            max_num_tokens=max(0, self._info.max_model_len - num_output_tokens),
        )
