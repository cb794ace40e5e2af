"""The tutorial's lines, run as they stand: two sites in namespaces, with latency between."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from gradwire.workbench.lab.lab import LINK, Lab

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/two-sites.md"
SMALL = ["--steps", "31", "--say", "10", "--width", "32", "--depth", "1", "--batch", "2"]
"""A model and a run for a test; 31 steps are one round and a rest, which is exchanged too."""


def site_lines():
    """The command of each site: its variables and its words."""
    for line in re.findall(r"^.*torchrun --nnodes 2 .*$", PAGE.read_text(), re.M):
        words = shlex.split(line)
        count = words.index("torchrun")
        yield dict(word.split("=", 1) for word in words[:count]), words[count:]


def test_the_page_has_a_line_for_each_site():
    (first, one), (second, two) = site_lines()
    assert first == second == {"GLOO_SOCKET_IFNAME": "wg0", "NCCL_SOCKET_IFNAME": "wg0"}
    assert [a for a, b in zip(one, two, strict=True) if a != b] == ["0"], "the node's rank alone"
    assert "10.77.0.1" in one


def rename(lab, rank, name):
    """Call a rank's interface as the tutorial does."""
    from pyroute2 import IPRoute

    with lab.inside(rank), IPRoute() as routes:
        index = routes.link_lookup(ifname=LINK)[0]
        routes.link("set", index=index, state="down")
        routes.link("set", index=index, ifname=name)
        routes.link("set", index=index, state="up")


def test_two_sites_train_as_the_page_says(real):
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    usual = os.environ | {
        "PATH": programs, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:1", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    with Lab(2, "100mbit", "20ms") as lab:
        sites = []
        for rank, (variables, words) in enumerate(site_lines()):
            rename(lab, rank, "wg0")
            with lab.inside(rank):
                sites.append(
                    subprocess.Popen(
                        [*words, *SMALL],
                        cwd=ROOT,
                        env=usual | variables,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
        try:
            said = [site.communicate(timeout=240)[0] for site in sites]
        finally:
            for site in sites:
                site.kill()
    assert [site.returncode for site in sites] == [0, 0], said
    assert "recipe 'muon-wan' stands for every=30" in said[0]
    assert re.search(r"step +30  loss \d", said[0])
    assert "2 exchanges, " in said[0]
    assert "; 0 skipped" in said[0]
