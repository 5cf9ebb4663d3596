"""EXAONE 4: norms behind each half, QK-norm; layers with full attention know no positions if others have a window."""

from weft.engine.models.families.family import FamilySwitches, Norms, QKNorm, family
from weft.engine.models.families.fields import Fields
from weft.engine.models.families.windows import read_window, windowless, windows_by_pattern


@family("Exaone4ForCausalLM")
def exaone4(fields: Fields) -> FamilySwitches:
    """Without a window all layers have full attention and rotary embeddings."""
    window = read_window(fields, 4096)
    windows = windows_by_pattern(fields, window, 4) if window is not None else ()
    return FamilySwitches(
        norms=Norms.AFTER,
        qk_norm=QKNorm(),
        sliding_windows=windows,
        ropeless=windowless(windows),
        defaults={"rms_norm_eps": 1e-5},
    )
