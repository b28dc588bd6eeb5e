"""The action grammars: what a policy may answer in one turn, and how an answer is read.

An answer is prose with exactly one action in it. The action stands in an envelope; the first kind found wins:
`<action>...</action>`, a line `Action: ...`, a fenced block, or the whole answer. What comes before the winner is
thought and is not read for actions. A second action after it is an error: running one of two while the loss covers both
would credit tokens that never acted. Text in `<think>...</think>` is thought too.

The parsers are tolerant about spelling (quotes, case, keyword arguments, comments, end-of-turn tokens) and strict about
meaning: what is not one unambiguous action comes back as a `FormatError`, never as a guess. Text inside the quotes of
an action is inert, whatever it looks like: a page cannot make the policy act by being quoted.

One pass from left to right finds the envelopes and reads the call in each, in time linear in the length of the answer.

There are two grammars: actions on elements of a page that is read as text (`parse_action`), and actions at points of a
screenshot (`parse_coordinate_action`), whose numbers `CoordinateSpace` turns into pixels.
"""

from webagent_core.episode.actions.action import Action, FormatError, Kind
from webagent_core.episode.actions.coordinates import (
    COORDINATE_GRAMMAR,
    coordinate_thought_of,
    parse_coordinate_action,
)
from webagent_core.episode.actions.elements import GRAMMAR, parse_action, thought_of
from webagent_core.episode.actions.spaces import CoordinateSpace, smart_resize, to_css

__all__ = [
    "COORDINATE_GRAMMAR",
    "GRAMMAR",
    "Action",
    "CoordinateSpace",
    "FormatError",
    "Kind",
    "coordinate_thought_of",
    "parse_action",
    "parse_coordinate_action",
    "smart_resize",
    "thought_of",
    "to_css",
]
