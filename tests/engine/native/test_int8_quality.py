"""What int8 does to a trained model: the demo model, over chats phrased in ways that its training never used.

Its answers are so certain that their perplexity hardly moves with 3 bits either. So all positions are compared
as well, the user's words among them, where the model is in doubt: the perplexity that a model has over text drawn from
another grows by exp(mean KL divergence) over the other's own.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import server
from benchmarks.demo_model import generate
from benchmarks.demo_model.tokenizer import encode_conversation
from engine.attention.backend import group_layers
from engine.attention.sdpa import SdpaBackend
from engine.models.config import load_model_config
from engine.native.kit import NativeKit
from engine.native.library import load
from engine.weights import load_weights
from tests.engine.paged import PagedRequests

FOLDER = Path(server.__file__).parent / "demo_model"
CPU = torch.device("cpu")
CHATS_OF_A_SKILL = 4


def held_out_chats() -> tuple[list[np.ndarray], torch.Tensor]:
    """Token ids of each chat, and for all of them in a row whether the model itself must produce the next one."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    chats, is_answer_next = [], []
    for skill in generate.EXAMINED_SKILLS:
        for question in generate.exam(skill, CHATS_OF_A_SKILL):
            exchange = question.exchange
            messages = [*question.messages, exchange.answer]
            token_ids, is_learned = encode_conversation(tokenizer, messages, exchange.tools)
            chats.append(np.array(token_ids))
            is_answer_next += [*is_learned[1:], False]
    return chats, torch.tensor(is_answer_next)


def log_probabilities(kit: NativeKit, chats: list[np.ndarray]) -> torch.Tensor:
    """(tokens of all chats, vocab_size): what comes next."""
    config = load_model_config(FOLDER)
    decoder = load_weights(FOLDER, config, kit, device=CPU, dtype=torch.bfloat16, max_model_len=1024)
    groups = group_layers(decoder.kv_specs)
    num_blocks = sum(-(-len(chat) // 16) for chat in chats) + 1
    paged = PagedRequests(num_blocks, 16, (None,))
    batch = paged.make_batch([(paged.add(chat), len(chat)) for chat in chats])
    with torch.inference_mode():
        step = SdpaBackend(groups, num_blocks, 16, torch.bfloat16, CPU).begin(batch)
        hidden = decoder.forward(torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions), step)
        return decoder.compute_logits(hidden).log_softmax(-1)


def test_perplexity_stays_within_one_percent() -> None:
    library = load()
    if library is None:
        pytest.skip("no native kernels on this machine")
    chats, is_answer_next = held_out_chats()
    plain, quantized = (log_probabilities(NativeKit(library, is_int8), chats) for is_int8 in (False, True))
    following = torch.from_numpy(np.concatenate(chats)).roll(-1)[is_answer_next, None]
    losses = [-logprobs[is_answer_next].gather(1, following).mean().item() for logprobs in (plain, quantized)]
    assert math.exp(losses[0]) < 1.4  # it was the trained model that ran: a random one has 1,280
    assert math.exp(abs(losses[1] - losses[0])) < 1.01
    divergence = (plain.exp() * (plain - quantized)).sum(-1).mean().item()
    assert 0 < math.exp(divergence) - 1 < 0.001  # 6 bits exceed this
