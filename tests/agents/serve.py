"""`weft serve` over the scripted engine and the recorded server: `python -m tests.agents.serve MODEL PORT`."""

import sys

from weft.engine.wire import errors as logs
from weft.server.settings import Settings
from weft.server.supervise import supervisor

NAME = "scripted"
"""What agents call the model."""


def main(model: str, port: int) -> int:
    logs.configure("text", "supervisor")
    settings = Settings(
        model=model,
        port=port,
        served_model_name=(NAME,),
        kv_cache_memory="64MB",
        server_processes=1,
        stall_timeout_s=60,
    )
    modules = ("tests.agents.scripted_engine", "tests.agents.recorded_server")
    engine, server = ((sys.executable, "-m", "weft.engine.start.launch", module) for module in modules)
    return supervisor.run(settings, supervisor.Commands(engine, server), shows_status=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
