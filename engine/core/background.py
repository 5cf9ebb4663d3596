"""Lets background requests give way: they wait, or are preempted, while any other request runs or waits."""

from weft.engine.core.waiting_queue import WaitingQueue
from weft.engine.request import Request
from weft.engine.shared.background import is_background


def gives_way(request: Request, other: Request) -> bool:
    """Whether a request must not compute beside another one."""
    return is_background(request.priority) and not is_background(other.priority)


def in_the_way(running: list[Request], waiting: WaitingQueue) -> list[Request]:
    """The background requests to preempt, because another request runs or waits. `running` is in order.

    One without tokens to compute ends with the launched steps.
    """
    others = [request for request in (*running[:1], waiting.first) if request is not None]
    if not running or not any(gives_way(running[-1], other) for other in others):
        return []
    return [r for r in running if is_background(r.priority) and r.num_new_tokens > 0]
