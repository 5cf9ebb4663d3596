import llguidance
import torch

from tests.engine.guidance.demo import VOCAB_SIZE, matcher
from tests.engine.requests_for_tests import request
from weft.engine.loop.grammars import MaskComputer
from weft.engine.request import Request
from weft.engine.schedule.scheduler import ScheduledRequest, ScheduledStep


def scheduled(asked: Request, first_row: int, num_rows: int, drafts: tuple[int, ...] = ()) -> ScheduledRequest:
    return ScheduledRequest(asked, 0, 2, 2, drafts, 0, first_row, num_rows, 0)


def test_rows_with_a_grammar_get_a_mask_and_no_others(vocabulary: llguidance.LLTokenizer) -> None:
    one, two = (vocabulary.tokenize_str(digit)[0] for digit in "12")
    plain, guided, drafted, prefilling = (request([1, 2], i) for i in range(4))
    for asked in (guided, drafted, prefilling):
        asked.grammar = matcher(vocabulary, 'start: "1" "2"')
    computer = MaskComputer(VOCAB_SIZE)
    step = ScheduledStep(
        [scheduled(plain, 0, 1), scheduled(prefilling, 1, 0), scheduled(guided, 1, 1), scheduled(drafted, 2, 2, (one,))]
    )
    masks = computer.begin(step)
    assert masks is not None
    result = masks.result(timeout=120)
    assert result.rows.tolist() == [1, 2, 3]
    biases = torch.zeros(4, VOCAB_SIZE)
    result.apply(biases)
    biases = biases[1:]
    assert torch.equal(biases[0], biases[1])
    assert (biases[0][one], biases[0][two]) == (0, -torch.inf)
    assert (biases[2][one], biases[2][two]) == (-torch.inf, 0)
    assert computer.begin(ScheduledStep([scheduled(plain, 0, 1), scheduled(prefilling, 1, 0)])) is None
