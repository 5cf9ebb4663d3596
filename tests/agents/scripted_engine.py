"""The engine process with its real scheduler, cache and grammars, whose steps sample what a script says.

Started in place of `weft.engine.process`. It loads a real checkpoint as ever. Then a runner that computes nothing takes
the place of the model runner, so that prompts of an agent cost no time. Grammars are asked as for any model: a script
that says what its request's grammar forbids is written down as a fault.
"""

import functools
import os
import pathlib
import sys
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import tokenizers

from tests.agents.script import FOLDER, Asked, Script
from weft.engine import process
from weft.engine.batch import Batch, RowMasks, StepResult
from weft.engine.request import Request, RequestKey
from weft.engine.schedule.scheduler import ScheduledStep
from weft.engine.wire.messages import EngineOptions


@dataclass
class Saying:
    """What one request is told to say; every turn ends with an end of sequence."""

    asked: Asked
    text: str
    lasts: bool
    forbidden: set[int] = field(default_factory=set)


class ScriptedRunner:
    """An executor that knows which requests a batch is made of, and says the script."""

    def __init__(self, script: Script, tokenizer: tokenizers.Tokenizer) -> None:
        self._script = script
        self._tokenizer = tokenizer
        self._encode = functools.lru_cache(1000)(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
        self._step = ScheduledStep()
        self._sayings: dict[RequestKey, Saying] = {}

    def expect(self, step: ScheduledStep) -> None:
        """Learn what the next launch computes."""
        self._step = step

    def launch(self, batch: Batch, masks: "Future[RowMasks] | None") -> list[int]:
        ids: list[int] = []
        rows = masks.result() if masks is not None else None
        for scheduled in self._step.requests:
            request = scheduled.request
            for index in range(scheduled.num_rows):
                output = request.token_ids[request.num_prompt_tokens :] + list(scheduled.draft_token_ids[:index])
                saying = self._saying(request)
                ids.append(self._next_id(request, saying, output))
                if rows is not None and not _allows(rows, len(ids) - 1, ids[-1]):
                    self._note_forbidden(request, saying, output, ids[-1])
        return ids

    def collect(self, launched: list[int]) -> StepResult:
        return StepResult(launched, {}, [])

    def prepare(self) -> bool:
        return False

    def check_device(self) -> None:
        """It never fails."""

    def _saying(self, request: Request) -> Saying:
        if request.key not in self._sayings:
            prompt = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
            index, turn = self._script.choose(prompt)
            cached = request.num_cached_tokens or 0
            asked = Asked(index, request.num_prompt_tokens, cached, [], prompt)
            self._sayings[request.key] = Saying(asked, turn.say, turn.lasts)
            self._script.note(asked)
        return self._sayings[request.key]

    def _next_id(self, request: Request, saying: Saying, output: list[int]) -> int:
        """The first id of what is left to say. A grammar may have forced ids that cut the text elsewhere."""
        said = self._tokenizer.decode(output, skip_special_tokens=False)
        if said.startswith(saying.text):
            return self._encode(" word")[0] if saying.lasts else min(request.eos_token_ids)
        if not saying.text.startswith(said):
            self._note(saying, f"a grammar forced {said[-80:]!r}")
            return min(request.eos_token_ids)
        return self._encode(saying.text[len(said) :])[0]

    def _note_forbidden(self, request: Request, saying: Saying, output: list[int], token_id: int) -> None:
        said = self._tokenizer.decode(output, skip_special_tokens=False)
        self._note(saying, f"a grammar forbids {self._tokenizer.id_to_token(token_id)!r} behind {said[-200:]!r}")

    def _note(self, saying: Saying, fault: str) -> None:
        saying.asked.faults.append(fault)
        self._script.note(saying.asked)


def _allows(masks: RowMasks, row: int, token_id: int) -> bool:
    at = np.flatnonzero(masks.rows == row)
    return not len(at) or bool(int(masks.bits[at[0], token_id // 32]) >> token_id % 32 & 1)


class ScriptedProcess(process.EngineProcess):
    """The engine process over the scripted runner."""

    def __init__(self, runtime_dir: pathlib.Path, options: EngineOptions) -> None:
        super().__init__(runtime_dir, options)
        tokenizer = tokenizers.Tokenizer.from_file(str(pathlib.Path(options.model) / "tokenizer.json"))
        self._runner = ScriptedRunner(Script(pathlib.Path(os.environ[FOLDER])), tokenizer)
        self._engine._executor = self._runner  # type: ignore[assignment]

    def _before_launch(self, step: ScheduledStep) -> None:
        super()._before_launch(step)
        self._runner.expect(step)


if __name__ == "__main__":
    process.EngineProcess = ScriptedProcess  # type: ignore[misc]
    sys.exit(process.main(pathlib.Path(sys.argv[1])))
