"""A counter is defined once: one more field of `Counters` is on the page, among the metrics and in the stats."""

import subprocess
import sys

PROGRAM = """
import importlib.util, inspect, pathlib, sys, tempfile
import msgspec
from weft.engine.wire import status_page

source = inspect.getsource(status_page)
first = '    prompt_tokens: Annotated[int, Shown("Prompt tokens processed.")] = 0\\n'
assert source.count(first) == 1
fields = '    num_knots: Annotated[int, Shown("Knots.")] = 0\\n'
fields += '    slack: Annotated[float, Shown("Slack.", "s")] = 0.0\\n'
exec(compile(source.replace(first, fields + first), status_page.__file__, "exec"), status_page.__dict__)

from weft.engine.schedule.scheduler import Counters
from weft.server.apis.admin.status import engine_stats
from weft.server.http.metrics import EngineCollector

counters = Counters()
counters.num_knots += 7
counters.slack += 0.5
page = status_page.StatusPage(pathlib.Path(tempfile.mkdtemp()) / "status")
page.write(status_page.Status(epoch_id=1, **msgspec.structs.asdict(counters)))

class Client:
    info = None

    def status(self):
        return page.read()

samples = [sample for metric in EngineCollector({Client(): "m"}, "weft:").collect() for sample in metric.samples]
metrics = {sample.name: sample.value for sample in samples}
assert metrics["weft:num_knots_total"] == 7 and metrics["weft:s_total"] == 0.5, metrics
stats = engine_stats(page.read())
assert stats["num_knots"] == 7 and stats["slack"] == 0.5 and stats["prompt_tokens"] == 0, stats
print("arrived")
"""


def test_another_counter_arrives_everywhere() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.stdout == "arrived\n", done.stderr
