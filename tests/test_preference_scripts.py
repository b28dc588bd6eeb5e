"""The scripts of UI-TARS and Agent Q, in processes of their own and on real pages: what they leave, how they resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from webagent_core.sampling.pairs import Pair, load_pairs

RECIPES = Path(__file__).parents[1] / "recipes"
PATIENT = {"browser.navigation_timeout": 60.0, "browser.action_timeout": 20.0, "browser.episode_timeout": 300.0}
CHANGED = {
    "uitars": {"pairs.per_update": 4, "pairs.imitation_steps": 4, "train.save_every": 1},
    "agentq": {"pairs.per_update": 4, "pairs.rounds": 2, "search.iterations": 4, "train.save_every": 1},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(method: str, out: Path, cache: Path, *arguments: str) -> str:
    command = [sys.executable, str(RECIPES / method / "train_trl.py"), "--smoke", "--out", str(out), *arguments]
    for key, value in (PATIENT | CHANGED[method]).items():
        command += ["--set", f"{key}={value}"]
    environment = os.environ | {"WEBAGENT_CACHE": str(cache), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=900)
    assert done.returncode == 0 and done.stderr == "", done.stderr[-3000:]
    return done.stdout


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) | {"seconds": 0} for line in (out / "metrics.jsonl").read_text().splitlines()]


def check_tokens(pairs: list[Pair], tokenizer) -> None:
    for pair in pairs:
        chat = tokenizer.apply_chat_template(
            pair.messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        assert pair.prompt_ids == chat
        for answer in (pair.chosen, pair.rejected):
            assert tokenizer.decode(answer.response_ids, skip_special_tokens=True) == answer.text
        assert pair.chosen.action != pair.rejected.action


@pytest.mark.slow
@pytest.mark.parametrize("method", CHANGED)
def test_a_run_gathers_trains_and_resumes(method, tmp_path, cache):
    out = tmp_path / "run"
    said = run(method, out, cache)
    assert "success on held-out seeds" in said.splitlines()[-1]
    rounds = sorted((out / "rounds").iterdir())
    assert len(rounds) == CHANGED[method].get("pairs.rounds", 1)
    gathered = [load_pairs(folder / "pairs.jsonl") for folder in rounds]
    tokenizer = AutoTokenizer.from_pretrained(out / "policy")
    for pairs in gathered:
        check_tokens(pairs, tokenizer)
    if method == "uitars":
        assert gathered[0] and {pair.source for pair in gathered[0]} == {"correction"}
        assert (rounds[0] / "imitated").is_dir()
        assert all(answer.logp is None for pair in gathered[0] for answer in (pair.chosen, pair.rejected))
    else:
        assert all((folder / "trees.txt").read_text().strip() for folder in rounds)
        assert all(answer.logp < 0 for pairs in gathered for pair in pairs for answer in (pair.chosen, pair.rejected))
    lines = metrics(out)
    assert (lines[0]["phase"], lines[-1]["phase"]) == ("before", "after")
    trained = [line["update"] for line in lines if line["phase"] == "train"]
    assert trained == [first + 1 for first, pairs in zip((0, 1), gathered + gathered, strict=False) if pairs]
    assert (out / "report.html").is_file() and (out / "learning_curve.png").is_file()

    # As if the run had been killed in its last round, after what it had gathered and before its last update.
    weights = load_file(out / "policy" / "model.safetensors")
    (out / "policy").rename(tmp_path / "policy")
    for folder in rounds[-1].glob("checkpoints/checkpoint-*"):
        if int(folder.name.rsplit("-", 1)[1]) == len(trained) // len(rounds):
            folder.rename(tmp_path / folder.name)
    kept = (rounds[-1] / "pairs.jsonl").read_bytes()
    said = run(method, out, cache, "--resume")
    assert "kept from before" in said and (rounds[-1] / "pairs.jsonl").read_bytes() == kept
    assert metrics(out) == lines
    again = load_file(out / "policy" / "model.safetensors")
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
