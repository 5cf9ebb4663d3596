"""Holds outputs back until the prompt before them is stored where other engines find it.

So whoever gets the first output may send the prompt to another engine, which loads it. The blocks are held and written
by the cache (`engine/cache/shared_tier.py`), which bounds the time.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from weft.engine.cache.manager import KVCacheManager
from weft.engine.core.output_collector import Outputs
from weft.engine.schedule.scheduler import ScheduledRequest, ScheduledStep


@dataclass(slots=True)
class _Held:
    stored: "Future[None]"
    outputs: Outputs = field(default_factory=list)


class StoredPrompts:
    """Owner of the outputs that are held back."""

    def __init__(self, kv: KVCacheManager, *, is_every: bool) -> None:
        """Store the prompts of requests that ask for it, or of every request."""
        self._kv = kv
        self._is_every = is_every
        self._held: dict[tuple[int, int], _Held] = {}  # by connection and request id

    def __bool__(self) -> bool:
        """Whether outputs are held back. Then `hold` has to be called again soon."""
        return bool(self._held)

    def hold(self, steps: Sequence[ScheduledStep], outputs: Outputs) -> Outputs:
        """Begin to store the prompts that these ended steps have computed to their end.

        Returns:
            The outputs that may be sent now, of these and of those held back before; in order for each request.
        """
        for scheduled in (each for step in steps for each in step.requests if self._is_due(each)):
            request = scheduled.request
            if request.key[:2] not in self._held:
                hashes = request.block_hashes[: request.num_prompt_tokens // self._kv.block_size]
                self._held[request.key[:2]] = _Held(self._kv.offload.store(hashes))
        if not self._held:
            return outputs
        self._kv.finish_loads()
        sent: Outputs = []
        for connection, output in outputs:
            held = self._held.get((connection, output.request_id))
            (sent if held is None else held.outputs).append((connection, output))
        for key in [key for key, held in self._held.items() if held.stored.done()]:
            sent += self._held.pop(key).outputs
        return sent

    def _is_due(self, scheduled: ScheduledRequest) -> bool:
        request = scheduled.request
        if not (self._is_every or request.caching.is_stored):
            return False
        return scheduled.start < request.num_prompt_tokens <= scheduled.start + scheduled.num_tokens
