"""Runs requests to their end, and what they gained."""

from weft.engine.loop.engine import Engine
from weft.engine.wire.messages import AddRequest, RequestOutput

Outputs = dict[tuple[int, int], RequestOutput]


def run(engine: Engine, adds: list[AddRequest]) -> Outputs:
    """What each choice gained, by request and index; the invariants hold after every step."""
    outputs: Outputs = {}
    for add in adds:
        engine.add(0, add)
    for _ in range(20_000):
        if not engine.has_work:
            break
        for _, output in engine.step():
            key = (output.request_id, output.index)
            if key in outputs:
                outputs[key].merge(output)
            else:
                outputs[key] = output
        engine.scheduler.check_integrity()
    assert not engine.has_work, "requests wait for ever"
    return outputs


def ids(outputs: Outputs) -> dict[tuple[int, int], list[int]]:
    return {key: output.token_ids for key, output in outputs.items()}
