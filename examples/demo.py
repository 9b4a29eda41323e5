"""`make demo`: a training job that strangers' traffic slows down, and that mends itself, in three minutes.

    python examples/demo.py                 needs root, or user namespaces, and `ip` and `tc`; else runs the plain demo
    python examples/demo.py --plain         the plain demo: the same model on 8 processes, jax.lax against jaxcoll

Eight emulated hosts (network namespaces, links of 200 Mbit/s, real TCP) train the Flax model of train_digits.py. Then
strangers begin to send into one of the hosts. The tuner notices, moves the job's traffic, and says why; nothing is
compiled again and no step is lost. At the end stands a page that shows the run.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxcoll import report
from jaxcoll.bench.control import ENV, Channel, Listener, Message
from jaxcoll.bench.groups import Group
from jaxcoll.errors import JaxcollError
from jaxcoll.testbed import Testbed, access, star
from jaxcoll.testbed.plan import background
from jaxcoll.testbed.ranks import HostRanks

HOSTS, STRANGERS, VICTIM, LINK = 8, 2, 3, 200e6
BATCH, WIDTH = 256, 512
# Steps. On a quiet network the tuner may move, too: to what carries most there. The strangers come after that.
BLOCK, QUIET, BUSY = 6, 36, 102
DEADLINE = 300.0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="the plain demo, without emulated hosts")
    parser.add_argument("--schedule", default="dual_tree", help="what the job begins with (dual_tree)")
    parser.add_argument("--steps", type=int, default=BUSY, help="with the strangers there (%(default)s)")
    parser.add_argument("-o", "--output", type=Path, default=Path("demo_report.html"), help="the page (%(default)s)")
    return parser.parse_args(argv)


# ------------------------------------------------------------------------------------------------------- in every host


class Rank:
    """A rank of the job: trains as it is told, and times its steps."""

    def __init__(self) -> None:
        import jax
        from jax.sharding import NamedSharding
        from jax.sharding import PartitionSpec as P
        from train_digits import AXIS, load, make_logits, make_params, make_trainer

        import jaxcoll

        self.mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
        self.sharding = NamedSharding(self.mesh, P(AXIS))
        self.images, self.labels, *self.test = load(0)
        self.logits = make_logits(WIDTH)
        self.trainer = make_trainer("jaxcoll", jaxcoll, self.mesh, self.logits, make_params(WIDTH, 0, self.mesh))
        self.rng = np.random.default_rng(1)
        self.leads = jax.process_index() == 0
        self.mine = np.array_split(np.arange(BATCH), jax.process_count())[jax.process_index()]

    def steps(self, count: int) -> Message:
        """Answers {"seconds", "ended", "loss", "tuner"}: by step, the wall clock after each, and the tuner's status."""
        import jax

        import jaxcoll

        seconds: list[float] = []
        ended: list[float] = []
        loss = 0.0
        for _ in range(count):
            rows = self.rng.permutation(len(self.images))[:BATCH][self.mine]
            batch = [jax.make_array_from_process_local_data(self.sharding, d[rows]) for d in (self.images, self.labels)]
            start = time.perf_counter()
            trained = self.trainer.step(self.trainer.params, self.trainer.opt_state, *batch)
            self.trainer.params, self.trainer.opt_state, found = trained
            loss = float(found.addressable_data(0))
            seconds.append(time.perf_counter() - start)
            ended.append(time.time())
        tuner = jaxcoll.status()["tuner"] if self.leads else None
        return {"seconds": seconds, "ended": ended, "loss": loss, "tuner": tuner}

    def accuracy(self) -> Message:
        """Answers {"accuracy"} on the test set."""
        import jax
        import jax.numpy as jnp

        params = jax.tree.map(lambda leaf: leaf.addressable_data(0), self.trainer.params)
        hits = jnp.argmax(jax.jit(self.logits)(params, self.test[0]), axis=-1) == self.test[1]
        return {"accuracy": float(jnp.mean(hits))}


def serve() -> int:
    """Serves the demo's own process over the connection that was made before this one entered its host."""
    from jaxcoll import launch

    channel = Channel(socket.socket(fileno=int(os.environ[ENV + "_FD"])))
    launch.initialize()
    rank = Rank()
    while True:
        try:
            message = channel.receive()
        except EOFError:
            return 0
        name = message.pop("do")
        if name == "quit":
            return 0
        try:
            channel.send(getattr(rank, name)(**message))
        except Exception as error:
            channel.send({"error": f"{type(error).__name__}: {error}"})


# ------------------------------------------------------------------------------------------------------------ the story


class Story:
    """What has been measured so far: (wall clock at its end, milliseconds) of every step."""

    def __init__(self, group: Group):
        self.group, self.steps = group, list[tuple[float, float]]()
        self.loss = 0.0
        self.decisions: list[dict[str, Any]] = []

    def train(self, count: int) -> None:
        """Trains for so many steps, and tells every decision as it comes into force."""
        for _ in range(0, count, BLOCK):
            answers = self.group.ask(DEADLINE, do="steps", count=BLOCK)
            slowest = [1e3 * max(times) for times in zip(*(a["seconds"] for a in answers))]
            self.steps += zip(answers[0]["ended"], slowest)
            self.loss = answers[0]["loss"]
            found = [d for d in answers[0]["tuner"]["decisions"] if d["committed"]]
            middle = statistics.median(slowest)
            print(f"  step {len(self.steps):3d}: {middle:6.0f} ms a step, loss {self.loss:.3f}", flush=True)
            for decision in found[len(self.decisions) :]:
                print(f"  the tuner: {decision['reason']}", flush=True)
            self.decisions = found

    def between(self, since: float, until: float) -> list[float]:
        """Milliseconds of the steps that ended in that time."""
        return [ms for at, ms in self.steps if since < at <= until]


def tell(story: Story, quiet_until: float, busy_since: float) -> None:
    """The numbers that it is about; what there was no step of is left out."""
    times = [d["time"] for d in story.decisions]
    first = min((at for at in times if at <= quiet_until), default=quiet_until)
    moved = min((at for at in times if at > busy_since), default=float("inf"))
    after = story.between(moved, float("inf"))
    rows = {
        "quiet, as it began": story.between(0.0, first)[BLOCK:],
        "quiet, after a first move": story.between(first, quiet_until),
        "congested, not tuned yet": story.between(busy_since, moved),
        "congested, after tuning": after[len(after) // 3 :],
    }
    print(f"\n{'':28}  ms a step (median)   steps")
    for name, found in rows.items():
        if found:
            print(f"{name:28}{statistics.median(found):20.0f}{len(found):8d}")
    if after:
        return
    if story.decisions:
        print("The tuner had moved before they came, to what the quiet network carries best; it bears them too.")
    else:
        print("The tuner has moved nothing this time: on a busy machine the emulated links aren't what is slow.")


def congested(args: argparse.Namespace, folder: Path) -> int:
    """The story on the testbed."""
    log = folder / "demo_run.jsonl"
    log.unlink(missing_ok=True)
    env = {"JAXCOLL_TUNER": "on", "JAXCOLL_RUN_LOG": str(log), "JAXCOLL_SCHEDULE": args.schedule}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with Testbed(star(HOSTS, STRANGERS, LINK)) as bed, Listener() as listener:
        print(f"{HOSTS} hosts, links of 200 Mbit/s, schedule {args.schedule}; starting a rank on each ...", flush=True)
        command = [sys.executable, __file__]
        with HostRanks(bed, command, env={**listener.env, **env}) as ranks:
            group = Group(ranks, listener, HOSTS)
            story = Story(group)
            print("training on a quiet network")
            story.train(QUIET)
            quiet_until = time.time()
            print(f"{STRANGERS} strangers begin to send into host {VICTIM}, without end", flush=True)
            with bed.start_flows(background(bed.layout, STRANGERS, VICTIM, 1)):
                busy_since = time.time()
                story.train(args.steps)
                accuracy = group.ask(DEADLINE, do="accuracy")[0]["accuracy"]
            group.close()
    tell(story, quiet_until, busy_since)
    print(f"accuracy on the test set: {accuracy:.3f}")
    report.write(log, args.output, "Eight hosts, one of them congested")
    print(f"the run as a page: {args.output}   (its log: {log}; `jaxcoll replay {log}` decides it again)")
    return 0 if accuracy > 0.9 else 1


def plain() -> int:
    """The demo that needs no testbed."""
    return subprocess.run([sys.executable, str(Path(__file__).with_name("train_digits.py")), "--demo"]).returncode


def main(argv: list[str]) -> int:
    args = parse(argv)
    lacking = access.missing()
    if args.plain or lacking:
        if lacking and not args.plain:
            print(f"There can be no emulated network here. Missing: {'; '.join(lacking)}.")
            print("The plain demo runs in its place.\n", flush=True)
        return plain()
    access.enter([sys.executable, __file__, *argv])
    try:
        return congested(args, args.output.resolve().parent)
    except JaxcollError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(serve() if ENV + "_FD" in os.environ else main(sys.argv[1:]))
