"""Tree search on a small maze, and pairs: from the search and from corrections."""

from __future__ import annotations

import json
import math

import pytest
import torch

from webagent_core.browser.errors import PageDied
from webagent_core.episode.actions import Action
from webagent_core.episode.trajectory import ExitStatus, Step, Trajectory
from webagent_core.objectives import evaluate
from webagent_core.recipe import load_recipe
from webagent_core.rewards.judge_client import JudgeClient, Reply
from webagent_core.sampling.pairs import (
    Answer,
    Correction,
    correction_pairs,
    demonstrator_correction,
    model_corrections,
    pair_of,
    read_correction,
)
from webagent_core.sampling.search import (
    Edge,
    Proposed,
    SearchSettings,
    Seen,
    ranking_scores,
    search,
    search_pairs,
    ucb1,
)

torch.set_num_threads(1)


class Maze:
    """Words are places: "" is the start, each action adds its letter. Ends after `length` letters; `goal` is won."""

    group = "maze#0"
    goal = "say the word"

    def __init__(self, word="aba", length=3):
        self.word, self.length = word, length
        self.starts = 0
        self.acted = []
        self.dies_at = None  # a place at which the page breaks
        self.forgetful = False  # the same actions lead to another page each time
        self.judged = True

    def seen(self):
        done = len(self.place) >= self.length
        reward = float(self.place == self.word) if self.judged else None
        noise = f" visit {self.starts}" if self.forgetful else ""
        return Seen(f"at {self.place!r}{noise}", done, reward if done else None)

    async def start(self):
        self.place = ""
        self.starts += 1
        return self.seen()

    async def act(self, action):
        self.acted.append(action)
        self.place += action
        if self.place == self.dies_at:
            raise PageDied("the page died")
        return self.seen()


class Guesser:
    """Proposes letters in order; plays on with the first; ranks by a given order of letters."""

    def __init__(self, letters="abc", order="cba", logp=-1.0):
        self.letters, self.order, self.logp = letters, order, logp
        self.asked = []

    async def propose(self, state, count):
        self.asked.append((state.actions, state.observation, count))
        answers = [
            Answer(f"Action: {letter}", None if letter == "?" else letter, [ord(letter)], self.logp)
            for letter in self.letters[:count]
        ]
        return Proposed([{"role": "user", "content": state.observation}], answers, [1, 2])

    async def rank(self, state, answers):
        return sorted(range(len(answers)), key=lambda i: self.order.index(answers[i].action))


def settings(**changes):
    return SearchSettings(**{"mix": 1.0, "iterations": 40, "depth": 3, "threshold": 0.3} | changes)


def edge(tree, word):
    """The action at the end of `word`."""
    node = tree.root
    for letter in word:
        found = next(e for e in node.edges if e.answer.action == letter)
        node = found.child
    return found


async def test_the_search_finds_the_way_and_counts_it():
    maze = Maze()
    tree = await search(maze, Guesser(), settings())
    assert edge(tree, "aba").measured == 1.0
    best = tree.root
    word = ""
    while best.edges:
        top = max(best.edges, key=lambda e: e.visits)
        word, best = word + top.answer.action, top.child
    assert word == "aba"
    assert tree.counts["iterations"] == 40 == tree.root.attempts
    assert tree.counts["actions"] == len(maze.acted)


async def test_every_mean_is_that_of_the_rewards_below_it():
    tree = await search(Maze(), Guesser(), settings())
    for node in tree.nodes():
        for e in node.edges or []:
            if e.child and e.child.edges:
                below = [(b.visits, b.measured) for b in e.child.edges]
                # All attempts but the first went on through the tree; that one played on by itself, and lost.
                assert e.visits == sum(n for n, _ in below) + 1
                won = round(e.measured * e.visits)
                assert won == pytest.approx(e.measured * e.visits)
                assert won - round(sum(n * q for n, q in below)) in (0, 1)


async def test_the_same_search_twice_gives_the_same_tree():
    trees = [await search(Maze(), Guesser(), settings()) for _ in range(2)]
    assert trees[0].describe(1.0) == trees[1].describe(1.0)


async def test_a_node_is_restored_by_acting_out_what_led_to_it():
    maze, policy = Maze("aaaa", length=4), Guesser("ab", "ab")
    tree = await search(maze, policy, settings(depth=4, iterations=12))
    for node in tree.nodes():
        assert node.state.observation == f"at {''.join(node.state.actions)!r}"
    assert maze.starts == 1 + sum(1 for node in tree.nodes()) - 1  # once to look, and once for each action tried
    assert all(observation == f"at {''.join(actions)!r}" for actions, observation, _ in policy.asked)


def test_ucb1_by_hand():
    assert ucb1(0.5, 9, 2, 1.0) == pytest.approx(0.5 + math.sqrt(math.log(9) / 3))
    assert ucb1(0.5, 9, 2, 0.0) == 0.5
    assert ucb1(0.25, 0, 0, 1.0) == ucb1(0.25, 1, 0, 1.0) == 0.25


def test_q_is_a_mixture():
    e = Edge(Answer("", "a"), ranking=1.0, visits=4, measured=0.25)
    assert [e.q(mix) for mix in (0.0, 0.5, 1.0)] == [1.0, 0.625, 0.25]


def test_scores_from_a_ranking():
    assert ranking_scores([2, 0, 1], 3) == [0.5, 0.0, 1.0]
    assert ranking_scores([0], 1) == [1.0]
    with pytest.raises(ValueError, match=r"order = \[0, 0\]"):
        ranking_scores([0, 0], 2)


async def test_the_ranking_decides_what_is_tried_first_and_mix_1_leaves_it_out():
    first = {}
    for mix in (0.5, 1.0):
        maze = Maze()
        await search(maze, Guesser(order="cba"), settings(mix=mix, iterations=1))
        first[mix] = maze.acted[0]
    assert first == {0.5: "c", 1.0: "a"}


async def test_without_exploration_the_first_success_is_repeated():
    greedy = await search(Maze("aaa"), Guesser(), settings(exploration=0.0, iterations=20))
    curious = await search(Maze("aaa"), Guesser(), settings(exploration=2.0, iterations=20))
    tried = [sum(e.visits > 0 for e in tree.root.edges) for tree in (greedy, curious)]
    assert tried == [1, 3]


async def test_other_switches_of_the_search():
    wide = await search(Maze(), Guesser("abcde", "abcde"), settings(proposals=5))
    assert len(wide.root.edges) == 5
    assert len((await search(Maze(), Guesser(), settings(proposals=2))).root.edges) == 2
    shallow = await search(Maze(), Guesser(), settings(depth=2))  # no attempt reaches the end
    assert shallow.counts["successes"] == 0
    assert max(len(node.state.actions) for node in shallow.nodes()) == 2
    maze = Maze()
    few = await search(maze, Guesser(), settings(most_actions=10))
    assert 10 <= len(maze.acted) < 10 + 6 and few.counts["iterations"] < 40
    assert (await search(Maze(), Guesser(), settings(iterations=3))).counts["iterations"] == 3


async def test_equal_proposals_are_one_and_answers_without_an_action_none():
    tree = await search(Maze(), Guesser("aa?", "a"), settings(iterations=2))
    assert [e.answer.action for e in tree.root.edges] == ["a"]
    assert tree.counts["format_errors"] > 0
    hopeless = await search(Maze(), Guesser("???", ""), settings(iterations=2))
    assert hopeless.root.edges == [] and search_pairs(hopeless, settings()) == []


async def test_a_page_that_breaks_says_nothing_about_an_action():
    maze = Maze()
    maze.dies_at = "b"
    tree = await search(maze, Guesser(), settings(iterations=12))
    assert 0 < tree.counts["env_error"] < 6  # it is tried less and less often
    assert edge(tree, "a").visits + edge(tree, "c").visits == 12 - tree.counts["env_error"]
    broken = next(e for e in tree.root.edges if e.answer.action == "b")
    assert (broken.visits, broken.measured) == (0, 0.0)
    at_the_start = [pair for pair in search_pairs(tree, settings(threshold=0.0)) if "''" in pair.messages[0]["content"]]
    assert [(pair.chosen.action, pair.rejected.action) for pair in at_the_start] == [("a", "c")]


async def test_an_attempt_that_nobody_could_judge_is_not_a_failure():
    maze = Maze()
    maze.judged = False
    tree = await search(maze, Guesser(), settings(iterations=5))
    assert tree.counts["unjudged"] == 5
    assert all(e.visits == 0 for e in tree.root.edges)


async def test_a_page_that_cannot_be_restored_is_counted():
    maze = Maze()
    maze.forgetful = True
    tree = await search(maze, Guesser(), settings(iterations=4))
    assert tree.counts["not_restored"] == 4
    assert search_pairs(tree, settings()) == []


# ---------------------------------------------------------------------------------------------------- search pairs


async def test_pairs_are_of_tried_actions_of_one_node_that_differ_enough():
    tree = await search(Maze(), Guesser(), settings())
    pairs = search_pairs(tree, settings())
    assert pairs
    for pair in pairs:
        place = pair.messages[0]["content"][4:-1]
        better, worse = edge(tree, place + pair.chosen.action), edge(tree, place + pair.rejected.action)
        assert better.visits and worse.visits
        assert pair.margin == pytest.approx(better.measured - worse.measured) and pair.margin >= 0.3
        assert "aba".startswith(place + pair.chosen.action)
        assert (pair.source, pair.task, pair.prompt_ids) == ("search", "maze#0", [1, 2])
    assert search_pairs(tree, settings(threshold=1.1)) == []
    stricter = search_pairs(tree, settings(threshold=0.99))
    assert 0 < len(stricter) < len(pairs) and all(pair in pairs for pair in stricter)


async def test_the_threshold_is_met_from_above_and_equal_actions_are_no_pair():
    tree = await search(Maze(), Guesser(), settings(iterations=1))
    a, b, c = tree.root.edges
    a.visits = b.visits = c.visits = 2
    a.measured, b.measured, c.measured = 0.1 + 0.2, 0.0, 0.0
    pairs = search_pairs(tree, settings(threshold=0.3))
    assert [(p.chosen.action, p.rejected.action) for p in pairs] == [("a", "b"), ("a", "c")]
    assert len(search_pairs(tree, settings(threshold=0.0))) == 2  # b and c are equal
    c.visits = 0  # never tried: its Q says nothing
    assert len(search_pairs(tree, settings(threshold=0.3))) == 1


async def test_stored_log_probabilities_are_the_reference_of_the_loss():
    tree = await search(Maze(), Guesser(logp=-2.0), settings())
    pair = search_pairs(tree, settings())[0]
    logp = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
    sides = [{"logp": logp, "ref_logp": side.logp} for side in (pair.chosen, pair.rejected)]
    assert evaluate("agentq", pairs=[sides]).loss.item() == pytest.approx(math.log(2))  # the policy is the reference
    tree = await search(Maze(), Guesser(logp=None), settings())
    with pytest.raises(ValueError, match="maze#0: logp of . is missing"):
        search_pairs(tree, settings())


def test_search_settings_are_the_recipes():
    recipe = load_recipe("agentq", profile=None, overrides={"policy.model": "m", "search.threshold": 0.4})
    assert SearchSettings.of(recipe) == SearchSettings(3, 1.0, 0.5, 0.4, 10, 6)
    with pytest.raises(ValueError, match="proposals"):
        SearchSettings(proposals=1)


async def test_a_pair_is_plain_data():
    pair = search_pairs(await search(Maze(), Guesser(), settings()), settings())[0]
    assert pair_of(json.loads(json.dumps(pair.record()))) == pair


# ---------------------------------------------------------------------------------------------------- corrections

PAGE = "ok 1 <button>\nno 2 <button>\nyes 3 <button>"


def clicked(*ids, reward=0.0, status=ExitStatus.ANSWERED, task="miniwob/click-button"):
    steps = [
        Step(
            url="",
            observation=PAGE,
            messages=[{"role": "user", "content": f"{PAGE} step {number}"}],
            response=f"Action: click({id})",
            action=Action("click", element=str(id)),
            prompt_ids=[5, number],
            response_ids=[id],
        )
        for number, id in enumerate(ids)
    ]
    return Trajectory(task, 0, f"{task}#0", 'Click on the "no" button.', steps, status, reward)


def test_a_correction_and_what_was_answered_are_a_pair_at_that_state():
    trajectory = clicked(2, 3, 1)
    pairs, left_out = correction_pairs([trajectory], [[Correction(1, "no 2\nAction: click(2)")]])
    (pair,) = pairs
    assert not left_out
    assert pair.messages is trajectory.steps[1].messages
    assert pair.prompt_ids == [5, 1]
    assert pair.chosen == Answer("no 2\nAction: click(2)", "click(2)")
    assert pair.rejected == Answer("Action: click(3)", "click(3)", [3])
    assert pair.source == "correction"


def test_no_pair_without_a_real_correction():
    trajectory = clicked(2, 3)
    corrections = [Correction(0, "click(2)"), Correction(1, "I cannot tell")]
    pairs, left_out = correction_pairs([trajectory], [corrections])
    assert pairs == [] and left_out == {"same action": 1, "no action": 1}
    broken = clicked(3, reward=None, status=ExitStatus.ENV_ERROR)
    pairs, left_out = correction_pairs([broken, trajectory], [[], []])
    assert pairs == [] and left_out == {"invalid": 1, "uncorrected": 1}
    with pytest.raises(ValueError, match="correction of step 2 is not allowed: 0 to 1"):
        correction_pairs([trajectory], [[Correction(2, "click(1)")]])


def test_a_step_that_held_no_action_can_be_corrected_too():
    trajectory = clicked(1)
    trajectory.steps[0].action = None
    pairs, _ = correction_pairs([trajectory], [[Correction(0, "click(2)")]])
    assert pairs[0].rejected.action is None


def test_the_demonstrator_finds_the_first_wrong_step_of_a_failure():
    trajectories = [clicked(2, 3, 1), clicked(3, reward=1.0)]
    pairs, left_out = correction_pairs(trajectories, [demonstrator_correction(each) for each in trajectories])
    assert [(p.prompt_ids, p.chosen.action, p.rejected.action) for p in pairs] == [([5, 1], "click(2)", "click(3)")]
    assert left_out == {"uncorrected": 1}
    assert demonstrator_correction(clicked(3, task="miniwob/book-flight")) == []


async def test_a_model_corrects_what_failed_and_only_that(chat_server):
    chat_server.replies += [
        "Let me think about it.",
        'The second step.\n{"step": 2, "answer": "no 2\\nAction: click(2)"}',
        '{"step": null}',
        *['{"step": 3, "answer": "there is no such step"}'] * 2,
    ]
    client = JudgeClient(chat_server.settings.model_copy(update={"attempts": 2, "backoff_seconds": 0}))
    first, broken = clicked(2, 3), clicked(3, reward=None, status=ExitStatus.ENV_ERROR)
    assert await model_corrections(client, [clicked(2, reward=1.0), broken]) == [[], []]
    assert chat_server.questions == []
    for expected in ([Correction(1, "no 2\nAction: click(2)")], [], []):
        assert await model_corrections(client, [first]) == [expected]
    shown = json.loads(chat_server.questions[0]["messages"][1]["content"])
    assert shown["goal"] == first.goal and [step["number"] for step in shown["steps"]] == [1, 2]
    assert shown["steps"][1] == {"number": 2, "page": PAGE, "answer": "Action: click(3)"}


@pytest.mark.parametrize(
    "text",
    ['{"step": 0, "answer": "x"}', '{"step": 2}', '{"answer": "x"}', '{"step": "1", "answer": "x"}', "{", "no", "} {"],
)
def test_a_correction_that_cannot_be_read_is_asked_for_again(text):
    assert read_correction(Reply(text), steps=2) is None
    assert read_correction(Reply('{"step": 1, "answer": "x"}', "length"), steps=2) is None


def test_pairs_feed_the_loss_of_ui_tars():
    (pair,), _ = correction_pairs([clicked(3)], [demonstrator_correction(clicked(3))])
    assert pair.chosen.logp is pair.rejected.logp is None  # the reference model computes both
    logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    loss = evaluate("uitars", pairs=[[{"logp": logp, "ref_logp": logp.detach()}] * 2]).loss
    assert loss.item() == pytest.approx(math.log(2))
