"""A finished trajectory as one training sequence, with a mask over the tokens that the model itself sampled.

Most methods train on steps, each a row with a prompt of its own. ARPO trains on the whole trajectory at once (o_i of
its section 3.1): its context only ever grows, so the prompt of a step is what came before it and the next turn. The
token ids are those of the rollout throughout; no text is tokenised again here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from webagent_core.episode.trajectory import Trajectory


@dataclass
class TokenSequence:
    """One row. `response_mask` is as long as `response_ids`: 1 where the model sampled the token, 0 elsewhere."""

    prompt_ids: list[int]
    response_ids: list[int]  # all after the first prompt: responses, and what was put between them
    response_mask: list[int]
    pictures: list[bytes] = field(default_factory=list)  # whose tokens are in the row, in their order
    steps: range = range(0)  # of the trajectory
    truncated: bool = False  # cut at the limit


def lay_out(
    prompt_ids: Sequence[int],
    segments: Iterable[tuple[str, Sequence[int]]],
    *,
    max_tokens: int | None = None,
    picture_token: int | None = None,
) -> TokenSequence:
    """Put a prompt and what followed it in one row.

    Args:
        prompt_ids: never cut.
        segments: (role, token ids) in order; the tokens of role "model" are trained on, all others are not:
            observations, and the separators and generation prompts that a chat template adds.
        max_tokens: of prompt and response. The row is cut there, in whatever segment that falls, but never inside a
            picture: a picture that does not fit goes as a whole.
        picture_token: the id that stands, many times in a row, for a picture.

    Raises:
        ValueError: the prompt alone is more than `max_tokens`.
    """
    ids, mask = list(prompt_ids), [0] * len(prompt_ids)
    for role, tokens in segments:
        ids += tokens
        mask += [int(role == "model")] * len(tokens)
    end = len(ids) if max_tokens is None else min(len(ids), max_tokens)
    if picture_token is not None and end < len(ids) and ids[end] == picture_token:
        while end and ids[end - 1] == picture_token:
            end -= 1
    start = len(prompt_ids)
    if end < start:
        raise ValueError(f"max_tokens = {max_tokens} is not allowed: the prompt alone has {start} tokens")
    return TokenSequence(list(prompt_ids), ids[start:end], mask[start:end], truncated=end < len(ids))


def sequences_of(
    trajectory: Trajectory, *, max_tokens: int | None = None, picture_token: int | None = None
) -> list[TokenSequence]:
    """The rows of a trajectory: one, if the prompt of every step begins with all that came before it.

    Where it does not, because a context was cut or a template renders an earlier turn anew (without its thinking, say),
    a new row begins with that step: what was sampled is never left out, nor put behind tokens that the model did not
    see. Steps without token ids, of a policy that kept none, are refused.

    Args:
        max_tokens, picture_token: see `lay_out`; given `picture_token`, a row has the screenshots that are left in it.

    Raises:
        ValueError: a step has no token ids, or the pictures of a row are not as many as its steps' screenshots.
    """
    parts: list[tuple[range, list[int], list[tuple[str, list[int]]]]] = []
    so_far: list[int] = []
    for index, step in enumerate(trajectory.steps):
        if not step.prompt_ids or not step.response_ids:
            raise ValueError(f"steps[{index}].prompt_ids and response_ids: got none, allowed is what the policy saw")
        if parts and step.prompt_ids[: len(so_far)] == so_far:
            steps, prompt, segments = parts[-1]
            segments += [("observation", step.prompt_ids[len(so_far) :]), ("model", step.response_ids)]
            parts[-1] = (range(steps.start, index + 1), prompt, segments)
        else:
            parts.append((range(index, index + 1), step.prompt_ids, [("model", step.response_ids)]))
        so_far = step.prompt_ids + step.response_ids

    rows = []
    for steps, prompt, segments in parts:
        row = lay_out(prompt, segments, max_tokens=max_tokens, picture_token=picture_token)
        row.steps = steps
        if picture_token is not None:
            # The last ones that were taken: a row that begins later has earlier pictures in its prompt.
            shown = _pictures(prompt, picture_token) + sum(_pictures(ids, picture_token) for _, ids in segments)
            taken = [step.screenshot for step in trajectory.steps[: steps.stop]]
            if shown > len(taken) or None in taken[len(taken) - shown :]:
                raise ValueError(f"steps: got {shown} pictures in the tokens, allowed is one for each screenshot")
            left = _pictures(row.prompt_ids + row.response_ids, picture_token)
            row.pictures = taken[len(taken) - shown :][:left]
        rows.append(row)
    return rows


def _pictures(ids: Sequence[int], picture_token: int) -> int:
    """Runs of the token. A chat template puts marks around each picture, so two never touch."""
    return sum(one == picture_token and before != picture_token for before, one in zip([None, *ids], ids, strict=False))


def extend_prompt(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    before: Sequence[int],
    now: Sequence[int],
    end_of_turn: int,
) -> list[int]:
    """The prompt of the next step as a rollout should give it to the model: the sampled ids stay as they were sampled.

    To render the chat again and tokenise it may split a response into other tokens than those that were sampled, or
    leave its thinking out. So only what is new is taken from a rendering.

    Args:
        prompt_ids, response_ids: of the step before.
        before: a chat that ends with any assistant turn, rendered without a generation prompt.
        now: the same chat and the new turn, rendered with one.
        end_of_turn: the id that ends an assistant turn; a response that was cut off lacks it.

    Raises:
        ValueError: `now` does not begin with `before`, or that has no end of a turn.
    """
    before, now = list(before), list(now)
    if now[: len(before)] != before or end_of_turn not in before:
        raise ValueError("now: it does not begin with `before`, which has to hold end_of_turn; take a shorter chat")
    closing = before[len(before) - 1 - before[::-1].index(end_of_turn) :]
    said = list(response_ids)
    if said and said[-1] == end_of_turn:
        said.pop()
    return [*prompt_ids, *said, *closing, *now[len(before) :]]
