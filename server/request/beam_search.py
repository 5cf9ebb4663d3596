"""Reads the beam search options of a body.

The engine does the search. It returns whole choices at the end, best first.
"""

from collections.abc import Mapping

from weft.engine.shared.messages import BeamOptions
from weft.engine.shared.sampling_params import MAX_BEAMS
from weft.server.errors import InvalidRequestError, shown
from weft.server.schemas.common import GenerationBody

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("logit_bias", "bad_words", "stop", "logprob_token_ids"), ({}, [])),
    **dict.fromkeys(("allowed_token_ids", "prompt_logprobs", "suffix"), ()),
    **dict.fromkeys(("stream", "echo", "prewarm"), (False,)),
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "repetition_penalty": (1,),
}
"""Fields that a beam search cannot honour, each with its neutral values.

The search uses the model's own probabilities, and runs to the end.
"""


def beam_options(body: GenerationBody) -> BeamOptions | None:
    """Read the options of a body; None if it asks for no beam search.

    Raises:
        InvalidRequestError: A field cannot be used with beam search, or an option of beam search is given without it.
    """
    if not body.use_beam_search:
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(body, name) not in (None, neutral):
                raise InvalidRequestError(f"{name} is only allowed when use_beam_search is true", param=name)
        return None
    neutral_values = {**_NEUTRAL, "best_of": (1 if body.n is None else body.n,)}
    for name, values in neutral_values.items():
        value = getattr(body, name, None)
        if value is not None and value not in values:
            raise InvalidRequestError(f"{name} cannot be used with use_beam_search, got {shown(value)}", param=name)
    if body.n is not None and body.n > MAX_BEAMS:
        raise InvalidRequestError(f"n must be at most {MAX_BEAMS} with use_beam_search, got {body.n}", param="n")
    length_penalty = 1.0 if body.length_penalty is None else body.length_penalty
    if not -10.0 <= length_penalty <= 10.0:
        raise InvalidRequestError(
            f"length_penalty must be between -10 and 10, got {length_penalty}", param="length_penalty"
        )
    return BeamOptions(length_penalty, body.early_stopping or False)
