"""What a decoder makes of texts: by Weft's engine as it serves them, and by transformers in float32.

The reference is transformers' own reading of the same file: it dequantizes a GGUF file's weights to float32. Texts are
the passages of `text.md`, each a prompt of its own.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from tokenizers import Tokenizer

from weft.engine.batch import ScoreBatch
from weft.engine.gguf.folder import made_folder
from weft.engine.runner import model_runner
from weft.engine.sampling.scores import LogprobTensors, score
from weft.engine.start.startup import start
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, EngineOptions, TokensOutput
from weft.engine.wire.params import SamplingParams

NUM_PROMPTS, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 32, 24, 64  # of greedy outputs
MAX_MODEL_LEN = 512
FORMS: dict[str, dict[str, str]] = {
    "as it comes": {},
    "`--kv-cache-dtype int8`": {"kv_cache_dtype": "int8"},
    "`--quantization int8`": {"quantization": "int8"},
    "`--quantization int4`": {"quantization": "int4"},
    "`--dtype float32`": {"dtype": "float32"},
}
"""Every way in which Weft can keep the weights and the cache of a GGUF file on a CPU, as engine options."""


def passages(file: Path) -> list[list[int]]:
    """Token ids of each passage, as the file's own tokenizer begins a prompt."""
    tokenizer = Tokenizer.from_file(str(made_folder(file) / "tokenizer.json"))
    texts = Path(__file__).with_name("text.md").read_text(encoding="utf-8").split("\n\n## ")
    return [tokenizer.encode(text).ids for text in texts]


def prompts(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Short prompts of one length, cut out of passages; a token that begins them all begins each prompt, too."""
    first = [texts[0][0]] if len({text[0] for text in texts}) == 1 else []
    body = [token for text in texts for token in text[len(first) :]]
    step, size = len(body) // NUM_PROMPTS, NUM_PROMPT_TOKENS - len(first)
    return [first + body[index * step :][:size] for index in range(NUM_PROMPTS)]


class Served:
    """Weft's engine over a model, stepped by hand: real schedule, batches, kernels and caches."""

    def __init__(self, model: Path, **options: str) -> None:
        """Load a GGUF file or a folder. Raises ModelError if the options are not for it."""
        folder = made_folder(model) if model.suffix == ".gguf" else model
        limits = EngineOptions(
            model=str(folder),
            device="cpu",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=NUM_PROMPTS,
            kv_cache_memory=1 << 30,
            prefix_caching=False,
            **options,  # type: ignore[arg-type]
        )
        self._engine = start(limits, "real").engine

    def log_probabilities(self, token_ids: Sequence[int]) -> torch.Tensor:
        """(len(token_ids) - 1, vocab_size) float32: what follows each token but the last."""
        rows: list[torch.Tensor] = []

        def kept(logits: torch.Tensor, scores: ScoreBatch) -> LogprobTensors:
            rows.append(logits.log_softmax(-1))
            return score(logits, scores)

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        with patch.object(model_runner, "score", kept):
            self._run([token_ids], params)
        return torch.cat(rows)

    def greedy(self, token_ids: Sequence[Sequence[int]], num_tokens: int = NUM_OUTPUT_TOKENS) -> list[list[int]]:
        """The ids that follow each of some prompts, all of which run at once."""
        return self._run(token_ids, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))

    def _run(self, token_ids: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        for number, ids in enumerate(token_ids):
            self._engine.add(0, AddRequest(TokensInput(list(ids)), params, request_id=number))
        outputs: list[list[int]] = [[] for _ in token_ids]
        while self._engine.has_work:
            for _, output in self._engine.step():
                assert isinstance(output, TokensOutput), output
                outputs[output.request_id] += output.token_ids
        return outputs


class Reference:
    """The module of transformers in float32, without Weft's code."""

    def __init__(self, file: Path) -> None:
        """Read a GGUF file; this takes seconds."""
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()

    @torch.inference_mode()
    def log_probabilities(self, token_ids: Sequence[int]) -> torch.Tensor:
        """As `Served.log_probabilities`."""
        return self.model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)

    @torch.inference_mode()
    def greedy(self, token_ids: Sequence[Sequence[int]], num_tokens: int = NUM_OUTPUT_TOKENS) -> list[list[int]]:
        """As `Served.greedy`, of prompts of one length, which need no padding."""
        self.model.generation_config.eos_token_id = None  # an output goes on
        ids = torch.tensor(token_ids)
        mask = torch.ones_like(ids)
        whole = self.model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False)
        return whole[:, ids.shape[1] :].tolist()


@dataclass(frozen=True, slots=True)
class Closeness:
    """How far log-probabilities are from the reference's, over all tokens.

    Attributes:
        num_tokens: How many were predicted.
        divergence: Kullback-Leibler, from the reference, mean over tokens.
        difference: Of the log-probability of the token that is there, mean of its magnitude.
        perplexity: Of the text, by the reference.
        growth: By what share perplexity is above the reference's.
        same_top: Share of tokens for which both find the same one most probable.
    """

    num_tokens: int
    divergence: float
    difference: float
    perplexity: float
    growth: float
    same_top: float


def closeness(pairs: Iterator[tuple[Sequence[int], torch.Tensor, torch.Tensor]]) -> Closeness:
    """Compare: of each passage its ids, the reference's log-probabilities, and the other ones."""
    count, sums = 0, torch.zeros(5, dtype=torch.float64)
    for token_ids, plain, other in pairs:
        following = torch.tensor(token_ids[1:])[:, None]
        losses = [-rows.gather(1, following).double() for rows in (plain, other)]
        divergence = torch.nn.functional.kl_div(other, plain, reduction="sum", log_target=True).double()
        same = (plain.argmax(-1) == other.argmax(-1)).sum().double()
        moved = (losses[0] - losses[1]).abs().sum()
        sums += torch.stack([divergence, moved, losses[0].sum(), losses[1].sum(), same])
        count += len(following)
    divergence, difference, plain_loss, other_loss, same_top = (sums / count).tolist()
    growth = math.exp(other_loss - plain_loss) - 1
    divergence = max(divergence, 0.0)  # of equal ones, rounding leaves less than nothing
    return Closeness(count, divergence, difference, math.exp(plain_loss), growth, same_top)
