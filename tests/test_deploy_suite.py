"""One party after another does its worst while three or four honest sites train, all in processes of their own. Each
time three things hold: the honest have the models that a simulation says, nobody needs much memory, and it takes less
than twice as long as without."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography")

from test_deploy_fuzz import at_most, peak
from test_deploy_hostile import peak as peak_of
from test_deploy_processes import HERE, Place, Process, experiment, simulate_failing

from fedkin.config import make_config
from fedkin.deploy import authority
from fedkin.engines.remote import Terms
from fedkin.rounds import Result, run_config
from fedkin.use.model_file import load as load_model

pytestmark = pytest.mark.slow
LIAR = 2
CONFIG = experiment("fedavg", rounds=30)
MEMORY = 1_500_000_000  # bytes
TERMS = Terms(deadline=60, pause=0.0, invalid=0)
REPLIES = [
    "nan",
    "infinite",
    "shape",
    "empty",
    "nothing",
    "float64",
    "int64",
    "half",
    "truth",
    "axis",
    "wide",
    "number",
    "names",
    "more",
    "many",
    "garbage",
    "pickle",
    "large",
    "cut",
    "twice",
    "length",
    "deep",
    "loss",
    "text",
    "steps",
    "word",
    "failed",
    "kind",
    "unkind",
    "strides",
    "bomb",
]
REPORTS = ["infinite", "shape", "nothing", "garbage", "strides", "float64"]
GREETINGS = [
    "classes",
    "other",
    "garbage",
    "bomb",
    "alias",
    "climb",
    "version",
    "negative",
    "axes",
    "mixed",
    "cut",
    "pickle",
    "join",
    "deep",
]
STRANGERS = [
    "plain",
    "garbage",
    "headers",
    "flood",
    "idle",
    "half",
    "drip",
    "nameless",
    "body",
    "old",
    "foreign",
    "server",
    "revoked",
]
IMPOSTORS = [
    "garbage",
    "bomb",
    "announce",
    "endless",
    "gzip",
    "ticket",
    "secret",
    "climb",
    "option",
    "classes",
    "codes",
    "elsewhere",
    "oh",
    "session",
    "hangup",
]


def test_the_suite_is_as_large_as_it_says() -> None:
    counts = [len(set(kinds)) for kinds in (REPLIES, GREETINGS, STRANGERS, IMPOSTORS)]
    assert all(count >= least for count, least in zip(counts, (30, 10, 10, 10), strict=True)), counts


@dataclass
class Crew:
    """Honest sites that stay for one run after another, and how long one takes in peace."""

    here: Place
    honest: dict[int, Process]
    peace: Callable[[], float]

    @cached_property
    def usual(self) -> float:
        self.peace()  # until all have started
        return self.peace()

    def unharmed(self, right: Callable[[], Result], hostile: Callable[[], float]) -> None:
        """The three things, of a run under attack; `hostile` serves one and says how long it took."""
        usual = self.usual
        with at_most(MEMORY):  # forgets what was before
            seconds = hostile()
        assert peak() < MEMORY
        for process in self.honest.values():
            assert process.popen.poll() is None, process.text()[-2000:]
            assert peak_of(process) < MEMORY
        simulated = right()
        newest = max((self.here.folder / "runs").iterdir(), key=lambda p: p.stat().st_mtime).name
        names = [c.name for c in simulated.per_client]
        for place in self.honest:
            name = self.here.names[place]
            assert load_model(self.here.folder / name / "personal.safetensors").card.run == newest
            row = torch.cat([p.detach().flatten() for p in simulated.personal(names.index(name)).parameters()])
            assert (self.here.model(name) - row).abs().max() <= 1e-4 * row.abs().max(), name
        if seconds >= 2 * usual:
            usual = self.peace()  # other work on the machine slows both
        print(f"{seconds:.1f} s, {usual:.1f} s in peace; {peak() >> 20} MB")
        assert seconds < 2 * usual


def crew_of(folder: Path, honest: list[int], peace: Callable[[Place], float]) -> Crew:
    here = Place(folder, 4)
    return Crew(here, {place: here.client(here.names[place], "--stay") for place in honest}, lambda: peace(here))


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """The fourth place is a liar's."""
    made = crew_of(tmp_path_factory.mktemp("crew"), [0, 1, 3], lambda here: lied(here, "always:honest")[1])
    yield made
    made.here.close()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    made = crew_of(tmp_path_factory.mktemp("full"), [0, 1, 2, 3], served)
    yield made
    made.here.close()


# ---------------------------------------------------------------- sites


def lied(here: Place, lies: str, **more: Any) -> tuple[Result, float]:
    """A run with a liar, and its seconds from when the liar is there: starting a process takes what it takes."""
    log = here.folder / f"{here.names[LIAR]}.log"
    before = log.read_text(errors="replace").count("connected to") if log.exists() else 0
    liar, arrived = here.liar(here.names[LIAR], lies), list[float]()

    def watch() -> None:
        liar.wait_for("connected to", 90, before + 1)
        arrived.append(time.monotonic())

    watching = threading.Thread(target=watch, daemon=True)
    try:
        watching.start()
        result = here.serve(CONFIG, terms=TERMS, largest=1 << 20, **more)
        return result, time.monotonic() - arrived[0]
    finally:
        liar.kill()


@cache
def without_replies(here: Place) -> Result:
    return simulate_failing(here, CONFIG, LIAR, range(CONFIG.rounds))


@cache
def undisturbed(here: Place) -> Result:
    return here.simulate(CONFIG)


@cache
def without_the_liar(here: Place) -> Result:
    three = here.folder / "three"
    three.mkdir()
    for place, name in enumerate(here.names):
        if place != LIAR:
            shutil.copy(here.folder / "data" / f"{name}.npz", three)
    return run_config(make_config({**CONFIG.to_dict(), "data": str(three), "clients": 3}))


@pytest.mark.parametrize("kind", REPLIES)
def test_whatever_a_site_replies(crew: Crew, kind: str) -> None:
    def hostile() -> float:
        result, seconds = lied(crew.here, f"always:{kind}")
        assert {f.client for f in result.failures} == {LIAR}
        assert len(result.failures) == CONFIG.rounds
        return seconds

    crew.unharmed(lambda: without_replies(crew.here), hostile)


@pytest.mark.parametrize("kind", REPORTS)
def test_whatever_a_site_says_of_its_model(crew: Crew, kind: str) -> None:
    crew.unharmed(lambda: undisturbed(crew.here), lambda: lied(crew.here, f"report:{kind}")[1])


@pytest.mark.parametrize("kind", GREETINGS)
def test_however_a_site_greets(crew: Crew, kind: str) -> None:
    def hostile() -> float:
        result, seconds = lied(crew.here, f"hello:{kind}", least=3)
        assert len(result.per_client) == 3
        return seconds

    crew.unharmed(lambda: without_the_liar(crew.here), hostile)


# ---------------------------------------------------------------- strangers


@pytest.fixture(scope="module")
def certificates(full: Crew) -> Path:
    """What somebody without a key may have all the same."""
    own, made = full.here.folder / "keys", full.here.folder / "strangers"
    other = authority.new_folder(full.here.folder / "others", ["127.0.0.1"], [full.here.names[0]])
    made.mkdir()
    request = authority.new_site(made, "revoked")
    authority.sign(own, request)
    shutil.copy(own / "sites" / "revoked.crt", made)
    authority.revoke(own, "revoked")
    for kind in ("crt", "key"):
        shutil.copy(other / "sites" / f"{full.here.names[0]}.{kind}", made / f"foreign.{kind}")
        shutil.copy(own / f"server.{kind}", made)
    return made


def served(here: Place) -> float:
    begin = time.monotonic()
    result = here.serve(CONFIG, terms=TERMS)
    assert result.failures == []
    return time.monotonic() - begin


@pytest.mark.parametrize("kind", STRANGERS)
def test_whatever_a_stranger_does(full: Crew, certificates: Path, kind: str) -> None:
    def hostile() -> float:
        words = [kind, str(full.here.port), str(certificates)]
        stranger = full.here.start(words, full.here.folder / f"{kind}.log", (str(HERE / "deploy_stranger.py"),))
        try:
            stranger.wait_for("here", 60)
            seconds = served(full.here)
            assert stranger.popen.poll() is None, stranger.text()
            said = stranger.text()
        finally:
            stranger.kill()
        answered = set(said.splitlines()) - {"here"}
        assert answered == ({"answered: HTTP/1.1 403"} if kind == "revoked" else set())  # signed once, and not listed
        return seconds

    full.unharmed(lambda: undisturbed(full.here), hostile)


# ---------------------------------------------------------------- servers


@pytest.mark.parametrize("kind", IMPOSTORS)
def test_whatever_a_server_did_before(full: Crew, kind: str) -> None:
    """The server was broken into, and the sites came to it; when it is itself again, they are as they were."""

    def hostile() -> float:
        words = [kind, str(full.here.port), str(full.here.folder / "keys")]
        impostor = full.here.start(words, full.here.folder / f"i-{kind}.log", (str(HERE / "deploy_impostor.py"),))
        try:
            impostor.wait_for("served", 90, times=4)
        finally:
            impostor.kill()
        return served(full.here)

    before = set(full.here.folder.parent.rglob("*climbed*"))
    full.unharmed(lambda: undisturbed(full.here), hostile)
    assert set(full.here.folder.parent.rglob("*climbed*")) == before
    assert "\x1b" not in "".join(process.text() for process in full.honest.values())
