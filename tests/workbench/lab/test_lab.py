"""The lab: what it says without root, and the real thing where namespaces can be made."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradwire.errors import ConfigError, LabError
from gradwire.plan.rate import parse_rate, show_rate, show_time
from gradwire.workbench.lab import lab as plumbing
from gradwire.workbench.lab.lab import NAMESPACES, Lab, check_memory, remove_stale
from gradwire.workbench.lab.processes import check_command, rank_environment, run_ranks
from gradwire.workbench.lab.tcp import round_trip


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        *(("10gbit", 10**10), ("1gbit", 10**9), ("100Mbit", 10**8), ("2.5gbit", 25 * 10**8)),
        *((f"10{unit}", 10**10) for unit in ("Gbps", " Gbit/s", "Gb/s", "gb", " gbits")),
        *(("1 GB/s", 8 * 10**9), ("100MB/s", 8 * 10**8)),
    ],
)
def test_rates_are_read(text, bits):
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["100", "fast", "10 g", "-1gbit", "GB/s", "1e9bit", "10gbyte", ""])
def test_a_rate_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=f"such as 100mbit, got '{text}'"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["999kbit", "40gbit", "0mbit"])
def test_a_rate_that_cannot_be_shaped_is_refused(text):
    with pytest.raises(ConfigError, match=r"from 1 Mbit/s to 34 Gbit/s, got"):
        parse_rate(text)


def test_rates_are_shown_as_people_say_them():
    assert show_rate(95.64e6) == "95.6 Mbit/s"
    assert show_rate(10**10) == "10 Gbit/s"


def test_a_round_trip_is_timed():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        assert 0 < round_trip(server, client) < 1
    assert show_time(0.00512) == "5.12 ms"


@pytest.mark.parametrize("ranks", [1, 0, -3, 251])
def test_ranks_have_a_range(ranks):
    with pytest.raises(ConfigError, match=f"from 2 to 250, got {ranks}"):
        Lab(ranks, "1gbit")


def test_without_root_it_says_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root"):
        Lab(2, "1gbit")


def test_elsewhere_than_on_linux_it_says_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LabError, match="needs Linux"):
        Lab(2, "1gbit")


def test_without_pyroute2_it_names_the_extra(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setitem(sys.modules, "pyroute2", None)
    with pytest.raises(LabError, match=r"pip install 'gradwire\[lab\]'"):
        Lab(2, "1gbit")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_more_ranks_than_fit_are_refused(monkeypatch):
    check_memory(1)
    monkeypatch.setattr(plumbing, "RANK_BYTES", 2**40)
    with pytest.raises(LabError, match=r"ranks=3 need 3072.0 GiB .* Use at most 0"):
        check_memory(3)


def test_a_rank_finds_what_torchrun_sets(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    environment = rank_environment(2, 4, "10.77.0.1", "gw0", 29500)
    wanted = {
        "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "gw0",
        "NCCL_SOCKET_IFNAME": "gw0", "NCCL_HOSTID": "host2", "NCCL_IB_DISABLE": "1",
        "OMP_NUM_THREADS": "2",
    }  # fmt: skip
    assert {name: environment[name] for name in wanted} == wanted
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert rank_environment(2, 4, "10.77.0.1", "gw0", 29500)["OMP_NUM_THREADS"] == "5"


def test_a_command_that_is_not_there_is_refused():
    check_command(["python3"])
    with pytest.raises(ConfigError, match="'no-such-program' is not found"):
        check_command(["no-such-program", "-x"])


def names():
    return sorted(p.name for p in NAMESPACES.glob(f"gradwire-{os.getpid()}-*"))


def test_links_carry_what_was_asked_and_nothing_is_left(real):
    with Lab(3, "50mbit") as lab:
        assert len(names()) == 4
        rates = lab.measure()
    assert len(rates) == 3
    assert all(0.8 < rate / 50e6 < 1.3 for rate in rates)
    assert names() == []


def test_latency_is_measured_and_said(real):
    with Lab(2, "50mbit", "20ms") as lab:
        line = lab.describe()
        assert line.startswith("lab: 2 ranks, asked 50 Mbit/s and 20 ms, measured 4")
        assert 20 <= float(line.rpartition(" and ")[2].removesuffix(" ms")) < 40
        assert 0.8 < lab.measured / 50e6 < 1.0
    assert names() == []


@pytest.mark.parametrize(
    ("text", "message"), [("2s", "at most 1 s, got 2 s"), ("5", "such as 50us")]
)
def test_a_latency_that_is_none_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        Lab(2, "1gbit", text)


@pytest.mark.parametrize(
    ("ranks", "islands"), [(4, 3), (4, 4), (2, 2)], ids=["odd", "of one rank", "two of one"]
)
def test_islands_that_are_none_are_refused(ranks, islands):
    with pytest.raises(ConfigError, match=f"{ranks} ranks make no {islands} islands of two or mor"):
        Lab(ranks, "1gbit", islands=islands)


def test_islands_are_fast_inside_and_slow_between(real):
    with Lab(4, "20mbit", "20ms", islands=2) as lab:
        line = lab.describe()
        with lab._sockets(2, 3) as (server, client):
            assert round_trip(server, client) < 0.01
    assert line.startswith("lab: 2 islands of 2 ranks, asked 20 Mbit/s and 20 ms, measured 1")
    assert lab.measured < 20e6
    assert "inside islands" in line
    assert "Gbit/s" in line.rpartition("inside islands ")[2]
    assert names() == []


def test_a_link_that_is_not_reached_is_an_error(real):
    with Lab(2, "10mbit") as lab:
        lab.rate *= 3
        with pytest.raises(LabError, match=r"'10mbit' is not reached: [\d.]+ Mbit/s measured"):
            lab.measure()


def test_a_kernel_that_cannot_shape_is_named_and_nothing_is_left(real, monkeypatch):
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    def refuse(self, *_, **__):
        raise NetlinkError(2)

    monkeypatch.setattr(IPRoute, "tc", refuse, raising=False)
    with pytest.raises(LabError, match="sch_tbf"), Lab(2, "10mbit"):
        pass
    assert names() == []


TALK = """
import os, socket, sys
rank = int(os.environ["RANK"])
where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    peer, (address, _) = socket.create_server(where).accept()
    print("hello from", address)
else:
    import time
    for _ in range(100):
        try:
            socket.create_connection(where)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    print("oh", file=sys.stderr)
"""


def test_ranks_talk_over_their_links_and_lines_carry_the_rank(real, capfd):
    with Lab(2, "100mbit") as lab:
        assert run_ranks(lab, [sys.executable, "-c", TALK]) == 0
    output = capfd.readouterr()
    assert output.out == "[0] hello from 10.77.0.2\n"
    assert output.err == "[1] oh\n"


def test_the_first_failure_is_the_exit_code_and_stops_the_others(real):
    begin = time.monotonic()
    with Lab(3, "100mbit") as lab:
        assert run_ranks(lab, ["sh", "-c", "[ $RANK = 1 ] && exit 7; sleep 60"]) == 7
        assert run_ranks(lab, ["sh", "-c", "[ $RANK = 1 ] && kill -9 $$; sleep 60"]) == 137
    assert time.monotonic() - begin < 10


def test_a_process_that_outlives_its_rank_ends_with_the_lab(real, tmp_path):
    script = f"setsid sleep 60 & echo $! > {tmp_path}/$RANK"
    with Lab(2, "100mbit") as lab:
        run_ranks(lab, ["sh", "-c", f"({script}) >/dev/null 2>&1 </dev/null"])
        left = [int((tmp_path / rank).read_text()) for rank in "01"]
        assert all(runs(pid) for pid in left)
    time.sleep(0.2)
    assert not any(runs(pid) for pid in left)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# A shell's background jobs ignore Ctrl-C, and so would what they start.
BUILD = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from gradwire.workbench.lab.lab import Lab
from gradwire.workbench.lab.processes import run_ranks
with Lab(2, "100mbit") as lab:
    run_ranks(lab, ["sh", "-c", "echo $$; sleep 60"])
"""


def started():
    """A lab in another process, and the process ids of its ranks."""
    lab = subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True)
    return lab, [int(lab.stdout.readline().split()[1]) for _ in range(2)]


def test_ctrl_c_removes_everything(real):
    lab, ranks = started()
    lab.send_signal(signal.SIGINT)
    lab.communicate(timeout=20)
    assert not list(NAMESPACES.glob(f"gradwire-{lab.pid}-*"))
    assert not any(runs(pid) for pid in ranks)


def test_what_a_killed_lab_left_is_removed_by_the_next_and_a_live_one_is_not(real):
    dead, ranks = started()
    alive, _ = started()
    try:
        dead.kill()
        dead.wait()
        time.sleep(0.2)
        assert not any(runs(pid) for pid in ranks)
        assert len(list(NAMESPACES.glob(f"gradwire-{dead.pid}-*"))) == 3
        remove_stale()
        assert not list(NAMESPACES.glob(f"gradwire-{dead.pid}-*"))
        assert len(list(NAMESPACES.glob(f"gradwire-{alive.pid}-*"))) == 3
    finally:
        alive.send_signal(signal.SIGINT)
        alive.communicate(timeout=20)
        dead.stdout.close()
