"""What fewer bits do to a trained model: the demo model, over chats phrased in ways that its training never used.

Its answers are so certain that their perplexity hardly moves with 3 bits either. So all positions are compared
as well, the user's words among them, where the model is in doubt: the perplexity that a model has over text drawn from
another grows by exp(mean KL divergence) over the other's own.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from demo_model import generate
from demo_model.tokenizer import encode_conversation
from tests.engine.paged import PagedRequests
from weft import server
from weft.engine.cache.specs import group_layers, paged_groups
from weft.engine.describe.config import load_model_config
from weft.engine.kernels.torch.sdpa import SdpaBackend
from weft.engine.layers.block import AttentionStep, StepCaches
from weft.engine.layers.kernels import LayerKernels
from weft.engine.models.loading import load_weights

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


def log_probabilities(
    kernels: LayerKernels,
    chats: list[np.ndarray],
    change: Callable[[AttentionStep], AttentionStep] = lambda step: step,
    folder: Path = FOLDER,
) -> torch.Tensor:
    """(tokens of all chats, vocab_size): what comes next, with attention that may be changed."""
    config = load_model_config(folder)
    decoder = load_weights(folder, config, kernels, device=CPU, dtype=torch.bfloat16, max_model_len=1024)
    groups = group_layers(decoder.cache_specs)
    num_blocks = sum(-(-len(chat) // 16) for chat in chats) + 1
    paged = PagedRequests(num_blocks, 16, (None,))
    batch = paged.make_batch([(paged.add(chat), len(chat)) for chat in chats])
    with torch.inference_mode():
        step = SdpaBackend(paged_groups(groups), num_blocks, 16, torch.bfloat16, CPU).begin(batch)
        ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
        hidden = decoder.forward(ids, positions, StepCaches(change(step)))
        return decoder.compute_logits(hidden).log_softmax(-1)


def growth_of_perplexity(
    plain: torch.Tensor, changed: torch.Tensor, chats: list[np.ndarray], is_answer_next: torch.Tensor
) -> tuple[float, float]:
    """By what share perplexity grows, over the answers (it may shrink), and over text that the plain model would write.

    Args:
        plain, changed: What `log_probabilities` gave.
        chats, is_answer_next: What `held_out_chats` gave.
    """
    following = torch.from_numpy(np.concatenate(chats)).roll(-1)[is_answer_next, None]
    losses = [-logprobs[is_answer_next].gather(1, following).mean().item() for logprobs in (plain, changed)]
    assert math.exp(losses[0]) < 1.4  # it was the trained model that ran: a random one has 1,280
    divergence = (plain.exp() * (plain - changed)).sum(-1).mean().item()
    return math.exp(losses[1] - losses[0]) - 1, math.exp(divergence) - 1
