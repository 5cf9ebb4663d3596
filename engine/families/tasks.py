"""Decides from a checkpoint's files what it is for: to write text, to make vectors, or to score.

Reads config.json and modules.json (sentence-transformers) only; imports no torch. Whether its weights allow another
task that somebody asks for is not known here.
"""

from pathlib import Path

from weft.engine.fields import Fields

CLASSIFIER = "ForSequenceClassification"
_HEADLESS = ("Model", "ForMaskedLM", "ForPreTraining")
_SCORE_MODULE = "LogitScore"


def is_headless(architecture: str) -> bool:
    """Whether models of this name have no head that writes text, nor one of a classifier."""
    return architecture.endswith(_HEADLESS) and not architecture.endswith("HeadModel")


def own_task(folder: Path) -> str:
    """What the checkpoint is for: generate, embed or classify.

    A reranker that answers yes or no is a causal model with one of two marks: a module `LogitScore`, or
    `classifier_from_token` in config.json (vLLM), the texts of no and yes.

    Raises:
        ModelError: A file is missing or malformed.
    """
    fields = Fields.read(folder / "config.json")
    architecture = (*fields.texts("architectures"), "")[0]
    modules = module_kinds(folder)
    if architecture.endswith(CLASSIFIER) or fields.has("classifier_from_token") or _SCORE_MODULE in modules:
        return "classify"
    return "embed" if modules or is_headless(architecture) else "generate"


def module_kinds(folder: Path) -> list[str]:
    """The kinds of the modules of sentence-transformers, such as Pooling; none without modules.json."""
    path = folder / "modules.json"
    if not path.exists():
        return []
    return [(fields.optional_text("type") or "").rpartition(".")[2] for fields in Fields.read_list(path)]
