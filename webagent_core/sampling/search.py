"""Agent Q (arXiv:2408.07199): a tree of actions over real attempts, and pairs from nodes whose actions differ in worth.

A page cannot be copied, so a state is restored by starting over and acting out the actions that led to it. What the
search knows of pages is an `Environment`; of models, a `Policy`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from webagent_core.browser.errors import BrowserError
from webagent_core.recipe import Recipe
from webagent_core.sampling.pairs import Answer, Pair


@dataclass(frozen=True)
class Seen:
    """What the environment shows. `reward` is that of the finished attempt, None where nobody could judge it."""

    observation: str
    done: bool = False
    reward: float | None = None


class Environment(Protocol):
    """One task. Raises BrowserError for what no policy can have caused; an action that cannot be done is no error."""

    group: str
    goal: str

    async def start(self) -> Seen:
        """Back to the task's start."""

    async def act(self, action: str) -> Seen:
        """Do one action, given in its one-line form."""


@dataclass(frozen=True)
class State:
    """h_t of the paper: the goal, all actions so far and the page as it is now.

    An action is both what the page was told, in one line, and what the policy said when it chose it (`responses`).
    """

    goal: str
    actions: tuple[str, ...]
    observation: str
    responses: tuple[str, ...] = ()

    def after(self, answer: Answer, observation: str) -> State:
        """The state that an answer leads to."""
        return State(self.goal, (*self.actions, answer.action), observation, (*self.responses, answer.text))


@dataclass(frozen=True)
class Proposed:
    """A policy's answers to one state, and the chat they answer."""

    messages: list[dict]
    answers: list[Answer]
    prompt_ids: list[int] = field(default_factory=list)


class Policy(Protocol):
    async def propose(self, state: State, count: int) -> Proposed:
        """`count` sampled answers, each with the log-probability it was sampled with."""

    async def rank(self, state: State, answers: Sequence[Answer]) -> Sequence[int]:
        """Indices of `answers`, the most promising first, as the model itself sees it."""


@dataclass(frozen=True)
class SearchSettings:
    """The paper gives no number: these are ours.

    `mix` 1 leaves the model's ranking out, `exploration` 0 the bonus for what was tried less.
    """

    proposals: int = 3  # K
    exploration: float = 1.0  # c_exp
    mix: float = 0.5  # alpha: Q = alpha * measured + (1 - alpha) * ranking
    threshold: float = 0.2  # theta: difference in Q from which two actions make a pair
    iterations: int = 10
    depth: int = 6  # actions of an attempt
    most_actions: int | None = None  # acted out in all, restoring included; no iteration begins beyond it
    ranking: str = "asked"  # how the policy ranks its proposals: asked for the best, or by their likelihood

    def __post_init__(self) -> None:
        if self.proposals < 2 or self.iterations < 1 or self.depth < 1 or not 0 <= self.mix <= 1:
            raise ValueError(f"{self} is not allowed: proposals >= 2, iterations >= 1, depth >= 1, 0 <= mix <= 1")

    @classmethod
    def of(cls, recipe: Recipe) -> SearchSettings:
        given = recipe.search.model_dump(exclude_none=True) if recipe.search else {}
        return cls(**given)


@dataclass
class Edge:
    """An action that was proposed at a node, and what is known of it."""

    answer: Answer
    ranking: float  # Q-hat: 1 for the action ranked first, 0 for the last
    visits: int = 0
    measured: float = 0.0  # Q-tilde: running mean of the rewards of attempts through it; 0 before the first
    broken: int = 0  # attempts through it that came to no reward: they say nothing of its worth, but were made
    child: Node | None = None

    @property
    def attempts(self) -> int:
        return self.visits + self.broken

    def q(self, mix: float) -> float:
        """Eq. 10."""
        return mix * self.measured + (1 - mix) * self.ranking


@dataclass
class Node:
    state: State
    seen: Seen
    edges: list[Edge] | None = None  # None: not expanded
    messages: list[dict] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)

    @property
    def attempts(self) -> int:
        """N(h): attempts through its actions."""
        return sum(edge.attempts for edge in self.edges or [])


@dataclass
class Tree:
    """A finished search."""

    group: str
    root: Node
    counts: Counter[str] = field(default_factory=Counter)

    def nodes(self) -> Iterator[Node]:
        waiting = [self.root]
        while waiting:
            node = waiting.pop(0)
            yield node
            waiting += [edge.child for edge in node.edges or [] if edge.child]

    def describe(self, mix: float) -> str:
        """The tree as indented lines, with Q, visits and ranking of every action."""
        lines = [f"{self.group}: {', '.join(f'{count} {what}' for what, count in sorted(self.counts.items()))}"]

        def add(node: Node, indent: str) -> None:
            for edge in node.edges or []:
                lines.append(
                    f"{indent}{edge.answer.action}  Q {edge.q(mix):.2f}  measured {edge.measured:.2f} in"
                    f" {edge.visits}  ranking {edge.ranking:.2f}"
                )
                if edge.child:
                    add(edge.child, indent + "  ")

        add(self.root, "  ")
        return "\n".join(lines)


def ucb1(q: float, of_node: int, of_action: int, exploration: float) -> float:
    """Q + c sqrt(log N(h) / (1 + N(h'))) (Eq. 7), N being attempts; no bonus before the node's first one."""
    return q + exploration * math.sqrt(math.log(max(of_node, 1)) / (1 + of_action))


def ranking_scores(order: Sequence[int], count: int) -> list[float]:
    """Scores from a ranking, best first: evenly from 1 for the first to 0 for the last; 1 for a single action."""
    if sorted(order) != list(range(count)):
        raise ValueError(f"order = {list(order)} is not allowed: every index below {count} once")
    scores = [0.0] * count
    for place, index in enumerate(order):
        scores[index] = 1.0 if count == 1 else 1 - place / (count - 1)
    return scores


class _NotRestored(Exception):
    """The same actions led to another page than the first time."""


async def search(environment: Environment, policy: Policy, settings: SearchSettings) -> Tree:
    """Search one task. Draws nothing itself: the same environment and policy give the same tree.

    An iteration goes down by UCB1 to an action that was never tried, expanding nodes on the way, restores its node,
    tries it, plays on with the policy's own single answers to the end of the attempt or to `depth`, and adds the
    reward (0 where the attempt did not end) to the running mean of every action on the way. An iteration that breaks,
    or whose end nobody could judge, changes no mean and is counted: `env_error`, `not_restored`, `unjudged`; its
    actions count as tried in UCB1 alone, lest one that always breaks be chosen for ever.

    Raises:
        BrowserError: the task did not open even once.
    """
    seen = await environment.start()
    root = Node(State(environment.goal, (), seen.observation), seen)
    tree = Tree(environment.group, root)
    budget = math.inf if settings.most_actions is None else settings.most_actions
    for _ in range(settings.iterations):
        if tree.counts["actions"] >= budget or root.seen.done:
            break
        path: list[Edge] = []
        tree.counts["iterations"] += 1
        reward = None
        try:
            reward = await _attempt(tree, environment, policy, settings, path)
            tree.counts["unjudged"] += reward is None
        except BrowserError:
            tree.counts["env_error"] += 1
        except _NotRestored:
            tree.counts["not_restored"] += 1
        tree.counts["successes"] += reward is not None and reward >= 1
        for edge in path:
            if reward is None:
                edge.broken += 1
            else:
                edge.visits += 1
                edge.measured += (reward - edge.measured) / edge.visits
    return tree


async def _attempt(
    tree: Tree, environment: Environment, policy: Policy, settings: SearchSettings, path: list[Edge]
) -> float | None:
    """One iteration; leaves the tree's actions on the way in `path` and returns the attempt's reward."""
    node = tree.root
    while True:
        if node.seen.done:
            return node.seen.reward
        if len(path) >= settings.depth:
            return 0.0
        if node.edges is None:
            await _expand(tree, node, policy, settings)
        if not node.edges:
            return 0.0  # no answer held an action: the attempt ends here
        edge = _selected(node, settings)
        path.append(edge)
        if edge.child is None:
            break
        node = edge.child

    await _restore(tree, environment, node)
    seen = await _act(tree, environment, edge.answer.action)
    state = node.state.after(edge.answer, seen.observation)
    edge.child = Node(state, seen)
    while not seen.done and len(state.actions) < settings.depth:
        answers = (await policy.propose(state, 1)).answers
        if not answers or answers[0].action is None:
            return 0.0
        seen = await _act(tree, environment, answers[0].action)
        state = state.after(answers[0], seen.observation)
    return seen.reward if seen.done else 0.0


def _selected(node: Node, settings: SearchSettings) -> Edge:
    """The action of the largest UCB1; of equal ones that which broke least often, then the first proposed."""
    total = node.attempts
    return max(node.edges, key=lambda e: (ucb1(e.q(settings.mix), total, e.attempts, settings.exploration), -e.broken))


async def _expand(tree: Tree, node: Node, policy: Policy, settings: SearchSettings) -> None:
    """K proposals, of which equal actions are one and answers without an action none, ranked by the model."""
    proposed = await policy.propose(node.state, settings.proposals)
    answers: dict[str, Answer] = {}
    for answer in proposed.answers:
        if answer.action is None:
            tree.counts["format_errors"] += 1
        else:
            answers.setdefault(answer.action, answer)
    distinct = list(answers.values())
    order = await policy.rank(node.state, distinct) if len(distinct) > 1 else range(len(distinct))
    scores = ranking_scores(order, len(distinct))
    node.edges = [Edge(answer, score) for answer, score in zip(distinct, scores, strict=True)]
    node.messages, node.prompt_ids = proposed.messages, proposed.prompt_ids


async def _restore(tree: Tree, environment: Environment, node: Node) -> None:
    """Bring the environment back to a node."""
    seen = await environment.start()
    for action in node.state.actions:
        seen = await _act(tree, environment, action)
    if seen.observation != node.state.observation or seen.done:
        raise _NotRestored


async def _act(tree: Tree, environment: Environment, action: str) -> Seen:
    tree.counts["actions"] += 1
    return await environment.act(action)


def search_pairs(tree: Tree, settings: SearchSettings) -> list[Pair]:
    """Pairs of actions of one node that were both tried and whose Q differ by the threshold or more.

    Raises:
        ValueError: an answer has no log-probability; the stored ones are the reference of the loss (Eq. 5).
    """
    pairs = []
    for node in tree.nodes():
        tried = [edge for edge in node.edges or [] if edge.visits]
        tried.sort(key=lambda edge: -edge.q(settings.mix))  # stable: of equal ones the first proposed stays first
        for place, better in enumerate(tried):
            for worse in tried[place + 1 :]:
                margin = better.q(settings.mix) - worse.q(settings.mix)
                # The last bits of a running mean are no difference.
                if margin <= 1e-9 or margin < settings.threshold - 1e-9:
                    continue
                for answer in (better.answer, worse.answer):
                    if answer.logp is None:
                        raise ValueError(
                            f"{tree.group}: logp of {answer.action} is missing: the log-probability it was sampled with"
                        )
                pairs.append(
                    Pair(
                        tree.group,
                        node.messages,
                        chosen=better.answer,
                        rejected=worse.answer,
                        source="search",
                        prompt_ids=list(node.prompt_ids),
                        margin=margin,
                    )
                )
    return pairs
