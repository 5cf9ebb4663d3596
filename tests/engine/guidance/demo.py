"""The demo model, whose tokenizer is a real one, and requests to it under grammars."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import llguidance
import tokenizers

from weft.engine.guidance.compiler import GrammarCompiler
from weft.engine.guidance.matcher import Forcing, GrammarMatcher
from weft.engine.loop.engine import Engine
from weft.engine.request import Outputs
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, FinishReason, Guidance, RequestOutput

DEMO_MODEL = Path(__file__).parents[3] / "server" / "demo_model"
TOKENIZER = tokenizers.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
VOCAB_SIZE: int = TOKENIZER.get_vocab_size()
PROMPT: list[int] = TOKENIZER.encode("Who are you?").ids


def json_grammar(schema: object) -> str:
    """What a server sends for a schema."""
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})


def matcher(vocabulary: llguidance.LLTokenizer, text: str) -> GrammarMatcher:
    """A grammar of its own, compiled as the engine does."""
    return GrammarCompiler(lambda: Forcing(vocabulary)).compile(text).result(timeout=120).copy()


@dataclass
class Answers:
    """What came of the requests that an engine ran: by request and choice."""

    token_ids: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    ends: dict[tuple[int, int], RequestOutput] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)

    def take(self, outputs: Outputs) -> None:
        for _, output in outputs:
            key = (output.request_id, output.index)
            self.token_ids.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.ends[key] = output

    def text(self, request_id: int = 0, index: int = 0) -> str:
        text: str = TOKENIZER.decode(self.token_ids[request_id, index])
        return text

    def reason(self, request_id: int = 0, index: int = 0) -> FinishReason | None:
        return self.ends[request_id, index].finish_reason


def run(engine: Engine, *adds: AddRequest) -> Answers:
    """Run requests to their ends; each is compiled before any is scheduled."""
    answers = Answers()
    for add in adds:
        engine.add(0, add)
    while engine.pending.grammars:
        answers.faults |= {c.request.key.request_id: c.fault for c in engine.take_ready() if c.fault is not None}
    while engine.has_work:
        answers.take(engine.step())
        engine.scheduler.check_integrity()
    return answers


def guided(add: AddRequest, grammar: str | None, **more: object) -> AddRequest:
    """The request under a grammar."""
    return AddRequest(
        TokensInput(add.input.token_ids), add.sampling_params, add.num_choices,
        deadline=add.deadline, guidance=Guidance(grammar, **more),  # type: ignore[arg-type]
        request_id=add.request_id,
    )  # fmt: skip
