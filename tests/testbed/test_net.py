"""Real namespaces, real traffic: rates hold and change, strangers share, ranks run, nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from jaxcoll.errors import JaxcollError, UsageError
from jaxcoll.testbed import Flow, HostRanks, Testbed, clean, iproute, net, racks, spines, star, state
from testbed.helpers import Start, left_over

pytestmark = pytest.mark.usefixtures("testbed_allowed")


def arrived(flows, seconds: float = 1.2) -> list[float]:
    start = time.monotonic()
    time.sleep(seconds)
    return flows.rates(start)


def test_a_link_keeps_its_rate_and_changes_it_while_used():
    with Testbed(star(2, 1, 100e6)) as bed:
        flows = bed.start_flows([Flow("x0", "h0")])
        time.sleep(0.6)
        before = arrived(flows)[0]
        bed.set_rate("h0", 25e6, "down")
        time.sleep(0.6)
        slow = arrived(flows)[0]
        bed.set_rate("h0", 80e6)
        time.sleep(0.6)
        again = arrived(flows)[0]
        assert bed.rates["h0", "down"] == bed.rates["h0", "up"] == 80e6
    assert 75e6 < before < 110e6
    assert 15e6 < slow < 35e6
    assert 55e6 < again < 95e6


def test_a_direction_is_slowed_by_itself():
    with Testbed(star(2, 1, 100e6)) as bed:
        bed.set_rate("h0", 10e6, "up")
        # Another peer each way: acknowledgements of the one mustn't queue behind the data of the other.
        flows = bed.start_flows([Flow("h0", "h1"), Flow("x0", "h0")])
        time.sleep(0.6)
        out, into = arrived(flows)
    assert out < 16e6
    assert into > 50e6


def test_peers_share_a_link_evenly_whatever_their_connections():
    with Testbed(star(1, 2, 60e6)) as bed:
        flows = bed.start_flows([Flow("x0", "h0", connections=1), Flow("x1", "h0", connections=8)])
        time.sleep(0.8)
        few, many = arrived(flows, 1.8)
    assert 40e6 < few + many < 70e6
    assert 0.55 < few / many < 1.8


def test_without_fairness_connections_compete():
    with Testbed(star(1, 2, 60e6, fair=False)) as bed:
        # One connection against eight has taken half as much as they by luck; against 32 it gets a few per cent.
        flows = bed.start_flows([Flow("x0", "h0", connections=1), Flow("x1", "h0", connections=32)])
        time.sleep(0.8)
        few, many = arrived(flows, 1.8)
    assert few / many < 0.5


def test_the_spine_is_thin_and_racks_are_not():
    with Testbed(racks(4, 0, 100e6, 20e6)) as bed:
        flows = bed.start_flows([Flow("h0", "h1"), Flow("h0", "h2")])
        time.sleep(0.6)
        inside, across = arrived(flows)
    assert inside > 45e6
    assert across < 28e6


def test_connections_spread_over_the_spines():
    with Testbed(spines(2, 0, 200e6, 20e6, width=2)) as bed:
        flows = bed.start_flows([Flow("h0", "h1", connections=16)])
        time.sleep(0.6)
        total = arrived(flows)[0]
        sent = [bed.sent_bytes(f"leaf0-spine{j}", "up") for j in range(2)]
    assert total > 26e6, "16 connections got no more than one spine's 20 Mbit/s"
    assert min(sent) > 0.1 * max(sent)


def test_bursts_come_and_go():
    with Testbed(star(1, 1, 50e6)) as bed:
        flows = bed.start_flows([Flow("x0", "h0", burst=(0.5, 1.5))])
        samples = []
        for _ in range(20):
            time.sleep(0.2)
            samples.append(sum(flows.rates(time.monotonic() - 0.45)))
    assert min(samples) < 1e6
    assert max(samples) > 20e6


def test_flows_that_cannot_be_are_refused():
    with Testbed(star(1, 1)) as bed:
        with pytest.raises(UsageError, match="no host or outsider"):
            bed.start_flows([Flow("x0", "h5")])
        with pytest.raises(JaxcollError, match="sender of the flow x0 -> h0 ended"):
            bed.start_flows([Flow("x0", "h0", congestion="no such control")])
        with pytest.raises(UsageError, match="direction"):
            bed.set_rate("h0", 1e6, "sideways")  # type: ignore[arg-type]


PROGRAM = """
import os, socket, sys
names = sorted(name for _, name in socket.if_nameindex() if name != "lo")
print(os.environ["JAXCOLL_LAUNCH_RANK"], socket.gethostbyname(socket.gethostname()), *names,
      os.environ["JAXCOLL_LAUNCH_COORDINATOR"], os.environ["JAXCOLL_CONTROL_IFNAME"], os.readlink("/proc/self/ns/net"))
"""


def test_ranks_run_inside_their_hosts():
    with Testbed(star(2)) as bed, HostRanks(bed, [sys.executable, "-c", PROGRAM], ["h1", "h0", "h0"], port=99) as ranks:
        done = ranks.wait(60)
        rows = [output.split() for output in done.outputs]
    assert done.codes == [0, 0, 0]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert [row[1] for row in rows] == ["10.77.0.2", "10.77.0.1", "10.77.0.1"]
    assert all(row[2:6] == ["ctl0", "eth0", "10.77.0.2:99", "=ctl0"] for row in rows)
    assert rows[1][6] == rows[2][6] != rows[0][6] != os.readlink("/proc/self/ns/net")


def test_the_control_network_is_not_slow():
    with Testbed(star(2, 0, 1e6)) as bed:
        script = (
            "import socket; s = socket.create_server(('10.78.0.2', 9)); c = s.accept()[0]\nwhile c.recv(1 << 20): pass"
        )
        server = bed.spawn("h1", [sys.executable, "-c", script])
        send = (
            "import socket, time\nfor _ in range(200):\n try: s = socket.create_connection(('10.78.0.2', 9)); break\n"
        )
        send += " except OSError: time.sleep(0.05)\nstart = time.time(); s.sendall(bytes(4 << 20)); s.close()\n"
        send += "assert time.time() - start < 5, 'at 1 Mbit/s it takes 33 s'"
        client = bed.spawn("h0", [sys.executable, "-c", send])
        assert client.wait(30) == 0, client.stderr.read()
        assert server.wait(30) == 0
        client.stderr.close()
        server.stderr.close()


@pytest.mark.parametrize("layout", [star(2), spines(2)], ids=lambda layout: layout.name)
def test_the_data_network_has_one_congestion_control(layout):
    script = (
        "import socket, sys, time\nfor _ in range(200):\n try: s = socket.create_connection((sys.argv[1], 9)); break\n"
    )
    script += " except OSError: time.sleep(0.05)\n"
    script += "print(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16), file=sys.stderr); s.recv(1)"
    serve = "import socket, sys\nc = socket.create_server((sys.argv[1], 9)).accept()[0]\n"
    serve += "print(c.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16), file=sys.stderr)"
    for control in ("reno", "cubic"):
        with Testbed(layout, congestion=control) as bed:
            ends = [bed.spawn(host, [sys.executable, "-c", code, bed.layout.station("h1")])
                    for host, code in (("h1", serve), ("h0", script))]  # fmt: skip
            said = [end.communicate(timeout=60)[1].decode() for end in ends]
        assert all(control in words for words in said), said


def test_a_testbed_leaves_nothing():
    with Testbed(star(2, 1), "tnothing") as bed:
        sleeper = bed.spawn("h0", [sys.executable, "-c", "import time; time.sleep(600)"])
        bed.start_flows([Flow("x0", "h0")])
        assert len(left_over("tnothing")) == 5
        with pytest.raises(UsageError, match="running already"):
            Testbed(star(1), "tnothing")
        assert len(left_over("tnothing")) == 5
    assert left_over("tnothing") == []
    assert sleeper.wait(10) == -signal.SIGKILL
    sleeper.stderr.close()
    with pytest.raises(UsageError, match="small letters"):
        Testbed(star(1), "Not-A-Name")


def test_a_failed_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(net, "shaping_lines", lambda end, rate: [f"qdisc add dev {end.interface} root nonsense"])
    with pytest.raises(JaxcollError, match="nonsense"):
        Testbed(star(1), "tfailed")
    assert left_over("tfailed") == []
    assert not list(state.FOLDER.glob("tfailed*"))


KILLED = """
import sys, time
from jaxcoll.testbed import *
bed = Testbed(star(2, 1), "tkilled")
bed.start_flows([Flow("x0", "h0")])
bed.spawn("h1", ["setsid", sys.executable, "-c", "import os, time; os.fork(); time.sleep(600)"])
time.sleep(0.5)
print("ready", flush=True)
time.sleep(600)
"""


def test_kill_9_of_the_parent_leaves_nothing_after_clean(start: Start):
    parent = start("-c", KILLED)
    assert parent.stdout.readline() == "ready\n", parent.stderr.read()
    names = left_over("tkilled")
    assert len(names) == 5
    inside = state.processes_in([state.namespace("tkilled", "h1")])
    assert len(inside) == 2
    assert len(list(state.FOLDER.glob("tkilled*"))) == 2  # its claim, and the folder of what its programs write
    clean()
    assert left_over("tkilled") == names  # it lives: hands off
    parent.kill()
    parent.wait()
    # The child that had a new session and a child of its own outlives the parent; the namespaces do as well.
    assert left_over("tkilled") == names
    done = start("-m", "jaxcoll", "testbed", "clean")
    said = done.communicate(timeout=60)[0]
    assert all(name in said for name in names)
    assert left_over("tkilled") == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in inside if not zombie(pid))
    assert not list(state.FOLDER.glob("tkilled*"))


def zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_next_start_removes_what_a_killed_one_left(start: Start):
    parent = start("-c", KILLED)
    assert parent.stdout.readline() == "ready\n", parent.stderr.read()
    parent.kill()
    parent.wait()
    with Testbed(star(1), "tnext"):
        assert left_over("tkilled") == []


def test_namespaces_without_a_file_are_removed():
    iproute.run("ip", lines=[f"netns add {state.PREFIX}tlost-h0", "netns add tforeign"])
    try:
        assert f"{state.PREFIX}tlost-h0" in clean()
        assert left_over("tlost") == []
        assert "tforeign" in iproute.namespaces()
    finally:
        iproute.run("ip", "netns", "del", "tforeign")


def test_clean_ends_a_running_one_on_demand(start: Start):
    parent = start("-c", KILLED)
    assert parent.stdout.readline() == "ready\n", parent.stderr.read()
    forced = start("-m", "jaxcoll", "testbed", "clean", "--kill", "tkilled")
    forced.communicate(timeout=60)
    assert parent.wait(10) == -signal.SIGKILL
    assert left_over("tkilled") == []


def test_terminate_is_a_clean_end(start: Start):
    up = start("-m", "jaxcoll", "testbed", "up", "--hosts", "2", "--name", "tterm")
    while "show" not in (line := up.stdout.readline()):
        assert line, up.stderr.read()
    assert left_over("tterm")
    up.send_signal(signal.SIGTERM)
    assert up.wait(30) == 128 + signal.SIGTERM
    assert left_over("tterm") == []


def test_batch_errors_name_the_line():
    with pytest.raises(JaxcollError, match="link set nothing up"):
        iproute.run("ip", lines=["link show dev lo", "link set nothing up"])


def test_a_program_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(iproute, "_LIMIT_S", 0.2)
    with pytest.raises(JaxcollError, match=r"sleep 60: no end after 0\.2 s"):
        iproute.run("sleep", "60")
