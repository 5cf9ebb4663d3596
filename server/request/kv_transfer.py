"""`kv_transfer_params`: one server computes a prompt, another one continues it.

The blocks go through the folder that both share, and are found there by their content. So the servers need to tell each
other nothing about where blocks are, and any server that shares the folder may continue the prompt.
"""

from weft.engine.shared.messages import EngineInfo
from weft.server.errors import InvalidRequestError
from weft.server.request.cache_options import cache_salt_of, uses_cache
from weft.server.schemas.common import GenerationBody


def stores_prompt(body: GenerationBody, engine: EngineInfo) -> bool:
    """Whether another server waits for the blocks of the prompt.

    Raises:
        InvalidRequestError: The engine shares no folder, or the request makes no blocks that could be shared.
    """
    params = body.kv_transfer_params
    for name in ("do_remote_decode", "do_remote_prefill"):
        if engine.kv_role == "none" and getattr(params, name, None):
            path = f"kv_transfer_params.{name}"
            raise InvalidRequestError(f"{path} needs a server with a kv_role, which shares its blocks", param=path)
    if params is None or not params.do_remote_decode:
        return False
    if params.do_remote_prefill or not uses_cache(body.prompt_cache_options):
        other = "kv_transfer_params.do_remote_prefill" if params.do_remote_prefill else "prompt_cache_options.mode"
        path = "kv_transfer_params.do_remote_decode"
        raise InvalidRequestError(f"{path} cannot be used with this {other}", param=path)
    return True


def salt_of(body: GenerationBody) -> str:
    """The salt of a request's blocks; that of another server's request if this one is made for it."""
    if body.kv_transfer_params is not None and body.kv_transfer_params.cache_salt is not None:
        return body.kv_transfer_params.cache_salt
    return cache_salt_of(body.cache_salt, body.prompt_cache_key)
