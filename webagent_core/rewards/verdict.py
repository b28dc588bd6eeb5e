"""What a judge said: success, failure, or nothing that can be read. One grammar for all judges.

Tolerant about spelling (case, markdown, quotes, full-width letters, think blocks), strict about meaning. Only a
*statement* of the verdict counts: the label on a line of its own, at the start of the text, or behind a cue such as
"Verdict:". A label in the middle of a sentence, in a quotation, in an echo of the instruction, in a condition or in
the result of one step is a mention. An explicit correction replaces what was stated before it. Statements that
disagree without one, and everything else that is not plainly a verdict, are `unparseable`: the judge is asked again
or the trajectory left out, and a doubtful verdict is never a success.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Literal, NamedTuple

from webagent_core.rewards.json_verdict import read_json_verdict
from webagent_core.rewards.reply_text import DOUBT, LABEL, LOWER_NO, LOWER_YES, YES, marked, visible, without_thoughts


class Verdict(StrEnum):
    SUCCESS = "success"
    FAILURE = "failure"
    UNPARSEABLE = "unparseable"


Protocol = Literal["label", "status", "json", "yesno"]
PROTOCOLS: tuple[Protocol, ...] = ("label", "status", "json", "yesno")

_LABELS: dict[str, dict[str, list[str]]] = {
    "label": {"success": ["success"], "failure": ["not success"]},
    "status": {"success": ["success"], "failure": ["failure"]},
    "yesno": {"success": ["yes"], "failure": ["no"]},
}

# ---- cue words, after folding (no accents, lower case)
_CUES = (
    "final|overall|verdict|correction|decision|evaluation|judge?ment|assessment|conclusion|determination|ruling|result|outcome|"
    "answer|status|label|grade|rating|classification|"
    "urteil|ergebnis|bewertung|fazit|entscheidung|antwort|"
    "veredicto|veredito|resultado|decisao|evaluacion|avaliacao|conclusao|respuesta|resposta|"
    "resultat|jugement|verdetto|risultato|esito|giudizio|oordeel|uitslag|werdykt|wynik|"
    "вердикт|результат|итог|вывод|оценка|решение|ответ|karar|sonuc|hukum|deger?lendirme|"
    "الحكم|النتيجة|القرار|הכרעה|פסק|निर्णय|परिणाम|ket luan|ket qua"
)
_CUES_NO_SPACES = (
    "判定|结论|結論|最终|最終|结果|結果|判断|判斷|裁定|裁决|評価|评估|评价|评判|答案|总评|总结|状态|"
    "판정|결론|결과|최종|평가|คำตัดสิน|ผลลัพธ์"
)
_CUE = rf"(?:(?<![^\W_])(?:{_CUES})(?![^\W_])|(?:{_CUES_NO_SPACES}))"
_CONNECTOR = r"(?:[:=\->|\u2013\u2014\u2192\u21d2]+|(?<![^\W_])(?:is|are|as|ist|es|est|lautet|e)(?![^\W_])|是|为|為|は)"
_FILL = (
    r"(?:[\s\"'\u2018\u2019\u201c\u201d\u00ab\u00bb\u300c\u300d\u300e\u300f(\[{|:=\->]"
    r"|(?<![^\W_])(?:a|an|the|clear|clearly|definite|definitely|full|complete|total|therefore|thus|hence|so)(?![^\W_]))*"
)
# Between a cue and its connector a few words may stand: "Final verdict for the whole run:".
_STATEMENT = re.compile(
    rf"{_CUE}[^\n.!?;:=|\u3002{LABEL[1:-1]}]{{0,60}}?{_CONNECTOR}{_FILL}(?P<label>{LABEL})"
)
_CONCLUSION = re.compile(
    rf"(?<![^\W_])(?:so|therefore|thus|hence|consequently)[\s,]+"
    rf"(?:(?:it|this|the task|that) (?:is|was) )?(?:a )?(?P<label>{LABEL})"
)
_BULLET = r"[ \t]*(?:[-+\u2022\u2023\u25e6][ \t]+)?"
_QUOTES = "\"'\u2018\u2019\u201c\u201d\u00ab\u00bb\u300c\u300d\u300e\u300f"
_ALONE = re.compile(rf"{_BULLET}[\s{_QUOTES}(\[{{|]*(?P<label>{LABEL})(?P<end>[^\w\n?{LABEL[1:-1]}]*)$")
_LEADING = re.compile(rf"[\s{_QUOTES}(\[]*(?P<label>{LABEL})")

# With labels of another language the closing line may have a cue word that is not among ours.
_FOREIGN = re.compile(rf"\s*(?P<cue>[^\d:=\n]{{2,40}}?)\s*[:=]{_FILL}(?P<label>{LABEL})[^\w\n?]*")

_BECAUSE = r"(?:because|since|as|given|due|for|weil|da|porque|car|because)(?![^\W_])"
_BUT = re.compile(
    r"\W*(?:but|except|although|though|however|only|pending|not|no|never|n't|false|denied|achieved|was|were|has|had|"
    r"cannot|isn't|wasn't|if|when|unless|provided|assuming|would|should|could|requires?|means|criteria|criterion|aber|"
    r"pero|mais|no[nt]?)(?![^\W_])"
)
_OR = re.compile(
    rf"\W*(?:(?:or|and|vs|versus|oder|ou|o|y|et|или|или|veya|ya da)(?![^\W_])|或者?|还是|または|또는|/|\|)?"
    rf"[^\w{LABEL[1:-1]}]*{LABEL}"
)
_PARTIAL = re.compile(
    r"(?:partial|partially|partly|near|nearly|almost|half|limited|mixed|some|incomplete|qualified)\W*$"
)

# ---- what makes a sentence something other than a verdict
_CONDITION = re.compile(
    r"(?<![^\W_])(?:if|whether|unless|would|could|might|may|should|must|had|either|options?|choose|reply|respond|"
    r"asked to|have to|need to|instructed|supposed|initial|initially|preliminary|tentative|tempting|not yet|"
    r"wenn|waere|ware|si|seria|serait)(?![^\W_])"
)
_ATTRIBUTED = re.compile(
    r"(?<![^\W_])(?:says?|said|saying|reads?|reading|states?|stated|stating|claims?|claimed|claiming|contains?|"
    r"containing|shows?|showing|displays?|displaying|displayed|prints?|printed|writes?|wrote|written|announces?|"
    r"labell?ed|titled|banner|injected|planted|message|(?:agent|assistant|user|page|site|website|screenshot|popup)"
    r"(?:'s|s'|\u2019s)?(?: \d+)?(?: own)?(?: final| last)? (?:verdict|answer|status|result|response|text|output))"
    r"(?![^\W_])"
)
_PART = re.compile(
    r"(?<![^\W_])(?:(?:sub[- ]?)?(?:step|task|goal)s?|votes?|voter|judge \d+|criteri(?:on|a)|items?|checks?|points?|"
    r"sub\w+|parts?|stages?|phases?|rounds?|attempts?|screenshots?|schritt|paso|etape|http)(?![^\W_])"
    r"|[#(]?\d+[.)]\s|步骤|第.{1,3}步|ステップ"
)
_WHOLE = re.compile(r"(?<![^\W_])(?:final|overall)(?![^\W_])|最终|最終|最后|总体|최종")
_CORRECTION = re.compile(
    r"(?:^|[.!?;:\u3002\u2014])\s*(?:(?:no|but|hmm?|oh)\W+)?"
    r"(?:wait|actually|hmm?|oops|hold on|correction|korrektur|correccion)\s*[,.:!\u2026\u2014-]"
    r"|(?<![^\W_])(?:i correct|correcting (?:my|the)|on second thoughts?|scratch that|strike that|i changed? my mind|"
    r"let me (?:reconsider|re-?check|re-?evaluate|re-?think|re-?examine|revise|correct)|"
    r"i (?:was|am) (?:wrong|mistaken)|i made a mistake|"
    r"(?:revised|corrected|updated) (?:\w+ )?(?:verdict|answer|evaluation|decision)|i retract|"
    r"i take (?:it|that) back)(?![^\W_])|更正|我错了"
)


class _Found(NamedTuple):
    at: int
    success: bool | None  # None: the judge states something, but not plainly
    final: bool


def parse_verdict(
    text: str,
    protocol: Protocol = "label",
    *,
    labels: Mapping[str, Sequence[str]] | None = None,
    keys: Sequence[str] = ("success", "verdict"),
    finish_reason: str | None = None,
) -> Verdict:
    """Read a judge's reply.

    Args:
        text: any string.
        protocol: what the judge was asked for: `label` (free text, then SUCCESS or NOT SUCCESS), `status` (a line
            `Status: success|failure`), `json` (an object with one of `keys`) or `yesno`.
        labels: {"success": [...], "failure": [...]} in place of the words of `label`, in any language.
        finish_reason: "length" if the token limit cut the reply. What may go on behind the cut is no verdict.

    Raises:
        ValueError: unknown protocol, or labels without both kinds.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol = {protocol!r} is not allowed: one of {', '.join(PROTOCOLS)}")
    cut = finish_reason == "length"
    text = without_thoughts(visible(text))
    if protocol == "json":
        return _of(read_json_verdict(text, keys=keys, cut=cut))
    words = labels or _LABELS[protocol]
    if not words.get("success") or not words.get("failure"):
        raise ValueError(f"labels = {dict(words)!r} is not allowed: words for both success and failure")
    if re.match(r"\s*(?:```(?:json)?\s*)?\{", text):
        return _of(read_json_verdict(text, keys=keys, cut=cut))
    found = list(_statements(marked(text, words, english=labels is None), protocol, cut, foreign=labels is not None))
    return _of(_settled(found))


def _of(success: bool | None) -> Verdict:
    return Verdict.UNPARSEABLE if success is None else Verdict.SUCCESS if success else Verdict.FAILURE


# ------------------------------------------------------------------------------------------------ finding statements


def _statements(text: str, protocol: Protocol, cut: bool, foreign: bool) -> Iterator[_Found]:
    lines = text.rstrip().split("\n")
    echoes = _echoed_lines(lines)
    cue = re.compile(r"(?<![^\W_])status[\s\"']*[:=]") if protocol == "status" else None
    seen_text = False
    at = 0
    heading = ""  # the line above, if it announces something
    for number, line in enumerate(lines):
        last = number == len(lines) - 1
        begins, seen_text = not seen_text, seen_text or bool(line.strip())
        if number not in echoes and re.search(LABEL, line):
            for found in _in_line(line, protocol, begins, heading, cue):
                # The very end of a reply that was cut may be half a word: "SUCCESS" of "SUCCESSFUL, but".
                if not (cut and last and not line[found.at + 1 :].strip()):
                    yield _Found(at + found.at, found.success, found.final)
        # A judge that starts to correct itself and does not come to an end has withdrawn what it said.
        for correction in _CORRECTION.finditer(line):
            yield _Found(at + correction.start(), None, final=True)
        if line.strip():
            heading = line
        at += len(line) + 1
    if foreign and lines and (found := _FOREIGN.fullmatch(lines[-1])) and not _PART.search(found["cue"]):
        yield _Found(at - len(lines[-1]) - 1 + found.start("label"), _is_success(found), final=True)


def _in_line(
    line: str, protocol: Protocol, begins: bool, heading: str, cue: re.Pattern[str] | None
) -> Iterator[_Found]:
    if protocol == "status":
        for found in re.finditer(rf"{cue.pattern}{_FILL}(?P<label>{LABEL})", line):
            if _free(line[max(0, found.start() - 400) : found.start()]) and not line[found.end() :].strip(
                " .,;!\"'`)}|\u201d"
            ):
                yield _Found(found.start("label"), _is_success(found), final=True)
        return
    alone = _ALONE.match(line)
    if alone:
        if not re.search(r"(?<![^\W_])(?:options?|choices?|one of|possible|allowed|labels?)(?![^\W_])", heading):
            yield _Found(alone.start("label"), _is_success(alone), bool(_WHOLE.search(heading)))
        return
    lead = _LEADING.match(line)
    if lead and _starts_a_reason(line, lead, protocol, begins):
        yield _Found(lead.start("label"), _doubted(line, lead), final=False)
        return
    for found in (*_STATEMENT.finditer(line), *_CONCLUSION.finditer(line)):
        before = line[max(0, found.start("label") - 400) : found.start("label")]
        sentence = re.split(r"[.!?;\u3002\ue010](?:\s|$)", before)[-1]
        rest = line[found.end() :]
        if not _free(sentence) or rest.lstrip("\"' )").startswith("?") or _OR.match(rest):
            continue
        if re.match(r"[^\S\n]*[^\W_]", rest) and not re.match(rf"\s*{_BECAUSE}", rest) and not _BUT.match(rest):
            continue  # "Result: no items", "Final: success page reached": the label belongs to another word
        yield _Found(found.start("label"), _doubted(line, found), bool(_WHOLE.search(sentence)))
    partial = re.search(
        rf"{_CUE}[^\n.!?;]{{0,40}}?{_CONNECTOR}\s*(?P<adjective>[^\n.:;]{{0,20}}?)\s*(?P<label>{LABEL})", line
    )
    if (
        partial
        and _PARTIAL.search(partial["adjective"] + " ")
        and _free(line[max(0, partial.start() - 400) : partial.start()])
    ):
        yield _Found(partial.start("label"), False, final=True)


def _is_success(found: re.Match[str]) -> bool | None:
    label = found["label"]
    return None if label == DOUBT else label in (YES, LOWER_YES)


def _doubted(line: str, found: re.Match[str]) -> bool | None:
    """The verdict, or None for a success that is taken back in the same breath."""
    success = _is_success(found)
    return None if success and _BUT.match(line[found.end() :]) else success


def _starts_a_reason(line: str, lead: re.Match[str], protocol: Protocol, begins: bool) -> bool:
    """Whether a line that begins with a label states it: "NOT SUCCESS because ...", "SUCCESS: all is there"."""
    rest = line[lead.end() :].lstrip(_QUOTES + ")]")
    if _OR.match(rest) or rest.startswith("?"):
        return False
    if protocol == "yesno":
        return begins and bool(re.match(r"\s*(?:[,.:;!\u2013\u2014-]|$)", rest))
    if lead["label"] in (LOWER_YES, LOWER_NO) and not begins:
        return False
    return bool(re.match(rf"\s*(?:[.:;!\u2013\u2014(-]|,?\s*{_BECAUSE}|,?\s*(?:but|although|however)(?![^\W_]))", rest))


def _free(sentence: str) -> bool:
    """Whether a statement behind these words is the judge's own, about the whole and without a condition."""
    if _CONDITION.search(sentence) or _ATTRIBUTED.search(sentence):
        return False
    return not _PART.search(sentence) or bool(re.search(rf"{_WHOLE.pattern}\W*{_CUE}?[^:=]{{0,20}}$", sentence))


def _echoed_lines(lines: list[str]) -> set[int]:
    """Lines that list both labels one under the other: the options as the instruction gave them."""
    bulleted = [
        (number, alone["label"] in (YES, LOWER_YES))
        for number, line in enumerate(lines)
        if re.match(r"[ \t]*[-+\u2022\u2023\u25e6][ \t]+", line) and (alone := _ALONE.match(line))
    ]
    echoes: set[int] = set()
    for (first, one), (second, other) in zip(bulleted, bulleted[1:], strict=False):
        if second == first + 1 and one != other:
            echoes |= {first, second}
    return echoes


def _settled(found: list[_Found]) -> bool | None:
    """What the statements come to: the one they agree on since the last correction or doubt."""
    found = sorted(found, key=lambda each: each.at)
    for index in reversed(range(len(found))):
        if found[index].success is None:
            found = found[index + 1 :]
            break
    if not found:
        return None
    closing = found[-1]
    if all(each.success == closing.success for each in found):
        return closing.success
    # An earlier success may give way to a final failure; what would end as a success is asked again.
    return False if closing.final and not closing.success and not any(each.final for each in found[:-1]) else None
