import gc

from weft.engine.wire import machine as garbage


def test_what_is_there_is_not_looked_at_again() -> None:
    thresholds = gc.get_threshold()
    try:
        garbage.collect_rarely()
        assert gc.get_freeze_count() > 10_000 and gc.get_threshold()[0] == garbage.GC_THRESHOLD
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
