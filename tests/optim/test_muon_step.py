"""benchmarks/muon_step.py, on a tiny GPT."""

import importlib.util
import re
import sys
from pathlib import Path

import torch

PATH = Path(__file__).parents[2] / "benchmarks" / "muon_step.py"


def test_it_times_three_optimisers_in_turns(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("muon_step", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    asked = "--vocabulary 64 --width 32 --layers 1 --heads 2 --window 16 --batch 2 --steps 3"
    monkeypatch.setattr(sys, "argv", ["muon_step.py", *asked.split(), "--warmup", "1"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    turns = []
    for name, make in module.MAKERS.items():
        monkeypatch.setitem(module.MAKERS, name, noted(name, make, turns))
    module.main()
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.endswith("32 tokens a step")
    assert [line[:14].strip() for line in lines] == list(module.MAKERS)
    assert all(re.search(r"\d ms \(p20 .*, p80 .*\), \d+\.\d{3} x adamw$", line) for line in lines)
    assert "1.000 x" in lines[0]
    # torch's Muon comes with an AdamW beside it.
    assert turns == ["adamw", "torch muon", "torch muon", "gradwire muon"] * 4


def noted(name, make, turns):
    """`make`, whose optimisers note each of their steps."""

    def made(model):
        optimizers = make(model)
        for optimizer in optimizers:
            optimizer.register_step_post_hook(lambda *_: turns.append(name))
        return optimizers

    return made
