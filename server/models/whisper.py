"""What a Whisper checkpoint says of its decoder: how an output begins, in which language, and what it cannot hold.

transformers' `generation_whisper` reads the same files. Older ones have neither languages nor tasks: those stand among
the tokens then.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from weft.engine.wire.params import SamplingParams, TimestampRule
from weft.server.errors import InvalidRequestError, UnsupportedValueError, shown
from weft.server.models.seq2seq import read_stated
from weft.server.text.template_files import TemplateFileError, read_object
from weft.server.text.text_tokenizer import TextTokenizer

_log = logging.getLogger(__name__)

_NAMES = """
en=english zh=chinese de=german es=spanish ru=russian ko=korean fr=french ja=japanese pt=portuguese tr=turkish
pl=polish ca=catalan nl=dutch ar=arabic sv=swedish it=italian id=indonesian hi=hindi fi=finnish vi=vietnamese he=hebrew
uk=ukrainian el=greek ms=malay cs=czech ro=romanian da=danish hu=hungarian ta=tamil no=norwegian th=thai ur=urdu
hr=croatian bg=bulgarian lt=lithuanian la=latin mi=maori ml=malayalam cy=welsh sk=slovak te=telugu fa=persian
lv=latvian bn=bengali sr=serbian az=azerbaijani sl=slovenian kn=kannada et=estonian mk=macedonian br=breton eu=basque
is=icelandic hy=armenian ne=nepali mn=mongolian bs=bosnian kk=kazakh sq=albanian sw=swahili gl=galician mr=marathi
pa=punjabi si=sinhala km=khmer sn=shona yo=yoruba so=somali af=afrikaans oc=occitan ka=georgian be=belarusian tg=tajik
sd=sindhi gu=gujarati am=amharic yi=yiddish lo=lao uz=uzbek fo=faroese ht=haitian_creole ps=pashto tk=turkmen
nn=nynorsk mt=maltese sa=sanskrit lb=luxembourgish my=myanmar bo=tibetan tl=tagalog mg=malagasy as=assamese tt=tatar
haw=hawaiian ln=lingala ha=hausa ba=bashkir jw=javanese su=sundanese yue=cantonese
"""
_OTHER_NAMES = """
my=burmese ca=valencian nl=flemish ht=haitian lb=letzeburgesch ps=pushto pa=panjabi ro=moldavian ro=moldovan
si=sinhalese es=castilian zh=mandarin jw=jv
"""
LANGUAGES = {code: name.replace("_", " ") for code, name in re.findall(r"(\w+)=(\w+)", _NAMES)}
"""The languages of all Whisper models, by code."""
_OTHERS = {name: code for code, name in re.findall(r"(\w+)=(\w+)", _OTHER_NAMES)}


class Stated(msgspec.Struct, frozen=True):
    """The fields of both files that count, as transformers names them."""

    decoder_start_token_id: int | None = None
    no_timestamps_token_id: int | None = None
    is_multilingual: bool | None = None
    language: str | None = None
    lang_to_id: dict[str, int] = {}
    task_to_id: dict[str, int] = {}
    forced_decoder_ids: list[tuple[int, int | None]] | None = None
    prev_sot_token_id: int | None = None
    max_initial_timestamp_index: int | None = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    max_length: int | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Whisper:
    """How the decoder of a checkpoint begins.

    Attributes:
        start: The first token behind a prompt.
        languages: By code; none for a model of English alone.
        tasks: `transcribe` and `translate`; none for a model of English alone.
        no_times: Asks for an output without times. The one before it stands for silence, those behind it are times.
        previous: What a prompt begins with; None if there is no such token.
        language: That of the checkpoint, by code; None: it is to be detected.
    """

    stated: Stated
    start: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    no_times: int
    previous: int | None
    language: str | None

    @property
    def first_time(self) -> int:
        """The id of time 0."""
        return self.no_times + 1

    @property
    def silence(self) -> int:
        """The id that stands for it, behind `start`."""
        return self.no_times - 1

    def begin(self, language: str | None, task: str, *, has_times: bool) -> list[int]:
        """What the decoder begins with, behind a prompt."""
        ids = [
            self.start,
            self.languages.get(language or ""),
            self.tasks.get(task),
            None if has_times else self.no_times,
        ]
        return [token_id for token_id in ids if token_id is not None]

    def params(self, num_begun: int, max_own: int, end_id: int, *, has_times: bool) -> SamplingParams:
        """How an output is sampled, at temperature 0.

        Args:
            num_begun: Tokens that the decoder begins with.
            max_own: Most tokens of the decoder.
            end_id: Ends an output.
        """
        stated, banned = self.stated, [*(self.stated.suppress_tokens or ()), *([self.no_times] if has_times else ())]
        most = max_own
        if stated.max_new_tokens is not None:
            most = num_begun + stated.max_new_tokens
        elif stated.max_length is not None:
            most = stated.max_length + min(max_own // 2 - 1, num_begun)
        last = stated.max_initial_timestamp_index
        last = None if last is None else self.first_time + last
        return SamplingParams(
            max_tokens=max(min(most, max_own) - num_begun, 1),
            temperature=0.0,
            bad_words_token_ids=tuple((token_id,) for token_id in banned),
            begin_bans=tuple(stated.begin_suppress_tokens or ()),
            timestamps=TimestampRule(self.first_time, last, end_id) if has_times else None,
            logprobs=0,
        )

    def prompt_ids(self, text: str, tokenizer: TextTokenizer, most: int) -> list[int]:
        """What stands before `start`, to be continued: the end of a text.

        Raises:
            InvalidRequestError: The text holds a control token, or the model takes no prompt.
        """
        if self.previous is None:
            raise UnsupportedValueError("prompt: this model takes none", param="prompt")
        ids = tokenizer.encode(f" {text.strip()}", add_special_tokens=False)
        controls = [i for i in ids if i >= self.no_times or tokenizer.is_special(i)]
        if controls:
            message = f"prompt must hold no control token, got {shown(tokenizer.token_text(controls[0]))}"
            raise InvalidRequestError(message, param="prompt")
        return [self.previous, *ids[-most:]]

    def code_of(self, language: str) -> str:
        """The code of a language that is given by code or name.

        Raises:
            InvalidRequestError: The model does not know it.
        """
        known = self.languages or {"en": 0}
        if (code := _code(known, language)) is None:
            message = f"language must be one of {', '.join(sorted(known))}, got {shown(language)}"
            raise InvalidRequestError(message, param="language")
        return code


def _code(known: Iterable[str], language: str) -> str | None:
    name = language.lower().strip("<|>")
    return next((code for code in known if name in (code, LANGUAGES.get(code)) or _OTHERS.get(name) == code), None)


def read_whisper(checkpoint: Path, tokenizer: TextTokenizer) -> Whisper | None:
    """Read the files of a checkpoint; None if it is no Whisper, or if they do not say how its decoder begins."""
    try:
        if (config := read_object(checkpoint / "config.json")).get("model_type") != "whisper":
            return None
        stated = read_stated(config, read_object(checkpoint / "generation_config.json"), Stated)
    except TemplateFileError as exc:
        _log.warning("%s: what it says of its answers is not used: %s", checkpoint, exc)
        return None
    start = stated.decoder_start_token_id or tokenizer.added_id("<|startoftranscript|>")
    no_times = stated.no_timestamps_token_id or tokenizer.added_id("<|notimestamps|>")
    if start is None or no_times is None:
        return None
    forced = dict(stated.forced_decoder_ids or ())
    found = {code: tokenizer.added_id(f"<|{code}|>") for code in LANGUAGES}
    languages = {key.strip("<|>"): id for key, id in stated.lang_to_id.items()} or _known(found)
    tasks = stated.task_to_id or _known(
        {name: tokenizer.added_id(f"<|{name}|>") for name in ("transcribe", "translate")}
    )
    if stated.is_multilingual is False or forced.get(1) == no_times:
        languages, tasks = {}, {}
    language = _code(languages, stated.language) if stated.language else None  # as transformers, if a task is given
    previous = stated.prev_sot_token_id or tokenizer.added_id("<|startofprev|>")
    return Whisper(stated, start, languages, tasks, no_times, previous, language)


def _known(ids: Mapping[str, int | None]) -> dict[str, int]:
    return {name: token_id for name, token_id in ids.items() if token_id is not None}
