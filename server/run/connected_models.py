"""The served models of a server process, each connected to its engine."""

import contextlib
import pathlib
from collections.abc import AsyncIterator, Mapping, Sequence

from weft.server.model.live_models import LiveModels
from weft.server.model.on_demand_client import OnDemandClient
from weft.server.model.prefilling_client import PrefillingClient, with_prefill
from weft.server.model.served_model import ServedModel, served_model
from weft.server.models.engine_client import SocketEngineClient
from weft.server.models.fleet import Fleet
from weft.server.settings import Settings
from weft.server.supervise.runtime_folder import engine_folder
from weft.server.text.tokenizer import Tokenizer


def load_tokenizers(settings: Settings) -> Mapping[str, Tokenizer]:
    """The tokenizer of each model; those of one checkpoint share theirs.

    Raises:
        TokenizerError: One cannot be read.
    """
    folders = {name: pathlib.Path(entry.model or "") for name, entry in settings.fleet.items()}
    loaded = {folder: Tokenizer.load(folder) for folder in dict.fromkeys(folders.values())}
    return {name: loaded[folder] for name, folder in folders.items()}


@contextlib.asynccontextmanager
async def connected_models(
    settings: Settings, tokenizers: Mapping[str, Tokenizer], runtime_dir: pathlib.Path
) -> AsyncIterator[tuple[Mapping[str, ServedModel], Fleet, Sequence[SocketEngineClient]]]:
    """The models by each of their names, their states, and the connections, which end with the context."""
    served, fleet = dict[str, ServedModel](), Fleet(runtime_dir, settings)
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for index, name in enumerate(settings.fleet):
            on_demand, folder = settings.fleet[name].load == "on-demand", engine_folder(runtime_dir, index)
            client = await stack.enter_async_context(SocketEngineClient(folder, on_demand=on_demand))
            clients.append(client)
            loading = OnDemandClient(name, client, fleet, settings.load_timeout_s) if on_demand else client
            own = settings.for_model(name)
            whole = with_prefill(name, loading, own)
            if isinstance(whole, PrefillingClient):
                stack.push_async_callback(whole.aclose)
            served[name] = served_model(whole, tokenizers[name], own, on_demand=on_demand)
        yield LiveModels(served, fleet), fleet, clients
