"""The tiny policy's tokenizer: words where the corpus has them, characters elsewhere, every number one token.

A policy of 0.5 M parameters learns to copy a name only if it is the same token wherever it stands. Hence spaces,
quotes and newlines between words are tokens of their own: a word never carries its left neighbour. A number does take
the space before it along, so that an element's id is the token right after its name: the shortest way there is to
look it up."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, START, END, UNKNOWN = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# What the observation and the action grammar repeat all the time is one token each.
FRAME = (
    [f"{role}\n" for role in ("system", "user", "assistant")]
    + ["Task: ", "Feedback: ", "\nAction: ", "Simplified HTML", ', "', '")', ' = "', '" "', "[page cut here]"]
    + [f"{name}(" for name in ("click", "type", "select", "scroll", "goto", "back", "wait", "stop")]
    + [f" <{kind}>" for kind in ("button", "link", "clickable", "tab", "checkbox", "radio", "select", "textarea")]
    + [f" <input {kind}>" for kind in ("text", "password", "number", "date", "email", "search")]
)
_CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
_WORD = re.compile(r"[A-Za-z]+")


def build_tokenizer(
    corpus: Iterable[str],
    vocabulary: int = 1500,
    seen_in: int = 3,
    *,
    frame: Sequence[str] = FRAME,
    numbers: int = 200,
    special: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
) -> PreTrainedTokenizerFast:
    """Build the tokenizer from texts of the kind it will read. The same corpus gives the same tokenizer.

    Args:
        corpus: texts, one for each episode; their most frequent words of two letters and more become tokens.
        vocabulary: most tokens there may be, the fixed ones (about 560) included.
        seen_in: a word must stand in this many texts. A password or a made-up name stands in one: as a token it would
            teach the policy a word that it never meets again, and leave it without practice on those that it will meet.
        frame: what is one token wherever it stands.
        numbers: those below this one are one token each.
        special: tokens that no text can spell.
    """
    counts = Counter(word for text in corpus for word in set(_WORD.findall(text)) if len(word) > 1)
    words = sorted((word for word in counts if counts[word] >= seen_in), key=lambda word: (-counts[word], word))
    counted = [space + str(number) for number in range(numbers) for space in ("", " ")]
    fixed = [PAD, START, END, UNKNOWN, *special, *frame, *_CHARACTERS, *counted]
    tokens = list(dict.fromkeys(fixed + words))[:vocabulary]
    ids = {token: index for index, token in enumerate(tokens)}

    # The longest frame first, then a run of letters, a run of digits, or a single character. Inside a run the model
    # takes the longest known prefix, so an unknown word falls apart into words and letters, the same way wherever it
    # stands.
    framed = "|".join(re.escape(piece) for piece in sorted(frame, key=len, reverse=True))
    tokenizer = Tokenizer(
        models.WordPiece(ids, unk_token=UNKNOWN, continuing_subword_prefix="", max_input_chars_per_word=10_000)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{framed}|[A-Za-z]+| ?[0-9]+|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[START, *special],
        padding_side="left",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
