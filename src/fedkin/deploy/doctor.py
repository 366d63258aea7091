"""Is this site ready? Each step is checked for itself, says what it found, and names the fix where it fails.

Nothing here trains, and nothing about the data leaves the machine: the server sees a connection and one HTTP request.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedkin.errors import FedKinError, UsageError

if TYPE_CHECKING:
    from fedkin.config import Config

WAIT = 5.0  # seconds for each word of the server
SOON = 30  # days before a certificate runs out
OFF = 300.0  # seconds that a clock may be wrong: certificates go by it
PACKAGES = ("h11", "httpx", "cryptography")
SIGN = "on the server: fedkin keys sign DIR NAME.csr; copy DIR/sites/NAME.crt"
RENEW = "on the server: fedkin keys renew DIR --host NAME"

State = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Step:
    name: str
    state: State
    found: str
    fix: str = ""


def failed(name: str, found: object, fix: str) -> Step:
    return Step(name, "failed", str(found), fix)


def examine(
    *,
    server: str | None = None,
    ca: str | None = None,
    key: str | None = None,
    cert: str | None = None,
    data: str | None = None,
    task: str | None = None,
    vocabulary: int = 0,
    config: Config | None = None,
    policy: str | None = None,
    insecure: bool = False,
    join: bool = False,
    wait: float = WAIT,
) -> Iterator[Step]:
    """All steps for what was given, in the order in which a mistake is best mended.

    `join`: also be let in by the server, and leave at once; not while the site's client is running."""
    yield _packages()
    if data is not None:
        yield from _data(data, task, vocabulary, config)
    if policy is not None:
        yield _policy(policy, config)
    if key is not None:
        yield _key(key)
        if ca is not None:
            yield _own_certificate(key, ca, cert)
    if server is not None:
        steps = list[Step]()
        for step in _server(server, ca, key, cert, insecure, wait):
            steps.append(step)
            yield step
        if join and not any(step.state == "failed" for step in steps):
            yield _join(server, ca, key, cert, insecure)


def address(text: str) -> tuple[str, int]:
    """HOST:PORT, as server.example.org:9092, 10.0.0.5:9092 or [::1]:9092."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"--server {text!r}: write HOST:PORT, as server.example.org:9092")
    return host, int(port)


# ---------------------------------------------------------------- this machine


def _packages() -> Step:
    try:
        found = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    except PackageNotFoundError as error:
        return failed("packages", f"{error.name} is not installed", "pip install 'fedkin[deploy]'")
    return Step("packages", "ok", f"{found}, {ssl.OPENSSL_VERSION}")


def _key(key: str) -> Step:
    try:
        from fedkin.deploy.certificates import fingerprint, load_private

        found = fingerprint(load_private(key).public_key())
    except FedKinError as error:
        return failed("key", error, "fedkin keys new-site NAME makes a key; see docs/deploy.md")
    return Step("key", "ok", f"{found}; the authority must have signed this one")


def _own_certificate(key: str, ca: str, cert: str | None) -> Step:
    name = "site's certificate"
    try:
        from fedkin.deploy.certificates import identity_of

        found = identity_of(key, ca, cert).check()
    except FedKinError as error:
        return failed(name, error, SIGN)
    days = int((found.expires.timestamp() - time.time()) // 86400)
    words = f"of {found.name!r}, valid for {days} days more (until {found.expires:%Y-%m-%d})"
    return Step(name, "warning", words, SIGN) if days < SOON else Step(name, "ok", words)


def _data(data: str, task: str | None, vocabulary: int, config: Config | None) -> Iterator[Step]:
    import numpy as np

    from fedkin.data import Preparing, Reading
    from fedkin.data.dataset import encode_labels
    from fedkin.data.own import read_site
    from fedkin.data.targets import WORDS, outputs_of
    from fedkin.tasks import make_task

    try:
        learnt = make_task(task or (config.task if config is not None else None) or "classification")
        targets: Any = learnt.targets
        read = read_site(data, Path(data).stem, Reading(vocabulary=vocabulary, targets=targets))
        own = read.parts[0]
        impute, scale = ("local" if own.lacks else "none", "none") if config is None else (config.impute, config.scale)
        x = read.split(preparing=Preparing.of(impute, scale))[0].x if read.columns else own.x  # type: ignore[arg-type]
    except FedKinError as error:
        yield failed("data", error, "docs/your-data.md shows what a data file looks like")
        return
    held = "" if own.tests is None else f", the last {own.tests} for testing"
    yield Step("data", "ok", f"{len(x)} samples of shape {x.shape[1:]} ({x.dtype}){held}")
    if own.lacks and config is None:
        yield Step("missing", "warning", own.lacks, "the experiment has to say impute = 'local'")
    if targets != "classes":
        yield Step("targets", "ok", f"{WORDS[targets]}, for {learnt.name}")
        yield _fits(x, own.y, outputs_of(targets, own.y, vocabulary), vocabulary, config)
        return
    codes, names = encode_labels(own.y)
    counts = np.bincount(codes, minlength=len(names)).tolist()
    shown = ", ".join(f"{n}: {c}" for n, c in list(zip(names, counts, strict=True))[:20])
    shown += f", ... ({len(names)} in all)" if len(names) > 20 else ""
    if len(names) < 2:
        yield Step("classes", "warning", f"only one class: {shown}", "a model learns nothing from one class alone")
    else:
        yield Step("classes", "ok", shown)
    yield _fits(x, codes, max(2, len(names)), vocabulary, config)


def _policy(policy: str, config: Config | None) -> Step:
    from fedkin.deploy.joining import TASK, TRAVELS
    from fedkin.deploy.policy import Declined, Policy
    from fedkin.methods import METHODS, options_of
    from fedkin.rounds.choices import metrics_of
    from fedkin.tasks import make_task

    try:
        rules = Policy.read(policy, TRAVELS)
        if config is None:
            return Step("policy", "ok", f"{policy} can be kept; --config FILE.toml asks it about an experiment")
        learnt = make_task(config.task or TASK)
        told = [m.name for m in (learnt.metric, *metrics_of(config, learnt))]
        rules.check(config, options_of(METHODS[config.method], config.options, config.method), told)
    except Declined as error:
        return failed("policy", f"the experiment is declined: {error}", "agree with whoever runs the server")
    except FedKinError as error:
        return failed("policy", error, "docs/security.md shows what a policy looks like")
    return Step("policy", "ok", f"{policy} allows the experiment")


def _fits(x: Any, codes: Any, outputs: int, vocabulary: int, config: Config | None) -> Step:
    """One batch through the network that the experiment names (or the usual one for such samples)."""
    import torch

    from fedkin.compute.batches import Source
    from fedkin.compute.layout import Layout
    from fedkin.models import build, default_model

    chosen = (config.model if config else None) or default_model(x.shape[1:], vocabulary)
    try:
        network = build(chosen, x.shape[1:], outputs, vocabulary)
        batch = Source(x[:16], codes[:16], torch.device("cpu")).batch(torch.arange(min(16, len(x))))
        head, buffers = (config.head, config.buffers) if config else (None, "average")
        layout = Layout.of(network, head, buffers, example=batch)
        with torch.no_grad():
            finite = bool(network.eval()(batch).isfinite().all())
    except (FedKinError, RuntimeError, ValueError) as error:
        return failed("model", f"{chosen}: {error}", "choose another with model = ... in the experiment's file")
    if not finite:
        return failed("model", f"{chosen} gives values that are not finite", "scale the features to -1..1")
    megabytes = 4 * layout.size() / 1e6
    return Step("model", "ok", f"{chosen} takes them; {layout.parameters:,} weights, {megabytes:.1f} MB if all travel")


# ---------------------------------------------------------------- the server


def _server(
    server: str, ca: str | None, key: str | None, cert: str | None, insecure: bool, wait: float
) -> Iterator[Step]:
    host, port = address(server)
    try:
        plain = socket.create_connection((host, port), timeout=wait)
    except OSError as error:
        yield _unreachable(host, port, error)
        return
    with closing(plain):
        yield Step("network", "ok", f"{host}:{port} accepts connections")
        if insecure:
            yield Step("TLS", "warning", "not checked (--insecure)", "use certificates for anything but a trial")
            yield _clock(_date(plain, host))
            return
        if ca is None:
            yield Step("TLS", "skipped", "no --ca given", "get ca.crt from whoever runs the server")
            return
        try:
            context = ssl.create_default_context(cafile=str(Path(ca).expanduser()))
        except (OSError, ssl.SSLError) as error:
            reason = getattr(error, "strerror", None) or error
            yield failed("TLS", f"{ca} is no certificate: {reason}", "copy ca.crt from the server's folder")
            return
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        shown = _show(context, key, cert)
        begin = time.time()
        try:
            secured = context.wrap_socket(plain, server_hostname=host)
        except (ssl.SSLError, OSError) as error:
            yield _handshake_failed(host, port, ca, error)
            return
        with closing(secured):
            yield Step("TLS", "ok", f"{secured.version()}, the certificate is good for {host}")
            yield _expiry(secured.getpeercert() or {}, begin)
            if shown:
                yield _clock(_date(secured, host))


def _show(context: ssl.SSLContext, key: str | None, cert: str | None) -> bool:
    """Without its certificate a site is told nothing, not even the time."""
    if key is None:
        return False
    private = Path(key).expanduser()
    try:
        context.load_cert_chain(Path(cert).expanduser() if cert else private.with_suffix(".crt"), private)
    except (OSError, ssl.SSLError):
        return False
    return True


def _join(server: str, ca: str | None, key: str | None, cert: str | None, insecure: bool) -> Step:
    if not insecure and (ca is None or key is None):
        return Step("joining", "skipped", "needs --ca and --key")
    try:
        from fedkin.deploy.certificates import identity_of
        from fedkin.deploy.node import Node

        with Node(server, None if ca is None or key is None else identity_of(key, ca, cert)):
            pass
    except FedKinError as error:
        return failed("joining", error, "is a client running here? On the server: fedkin keys sign DIR NAME.csr")
    return Step("joining", "ok", "the server let the site in")


def _unreachable(host: str, port: int, error: OSError) -> Step:
    known: dict[type[OSError], tuple[str, str]] = {
        socket.gaierror: (f"nobody knows a host {host!r}", "check the name, or use the IP address"),
        TimeoutError: (f"{host}:{port} does not answer", "a firewall may drop it: allow outgoing TCP"),
        ConnectionRefusedError: (f"{host}:{port} refuses", "is `fedkin server` running, and on this port?"),
    }
    other = (f"{host}:{port}: {error}", "check the address and this machine's network")
    return failed("network", *next((words for kind, words in known.items() if isinstance(error, kind)), other))


def _handshake_failed(host: str, port: int, ca: str, error: Exception) -> Step:
    if isinstance(error, ssl.SSLCertVerificationError):
        other = (
            f"{ca} did not sign the server's certificate",
            "get ca.crt from whoever runs the server; if you have it, this is another server",
        )
        host_differs = (f"the certificate is not good for {host}", f"use a name it was made for, or {RENEW}")
        found, fix = {
            9: ("a certificate is not valid yet", "set this machine's clock"),
            10: ("a certificate ran out", f"{RENEW}; or set this machine's clock"),
            62: host_differs,
            64: host_differs,
        }.get(error.verify_code, other)
        return failed("TLS", f"{found}: {error.verify_message}", fix)
    port_of = "is this the port of `fedkin server`"
    if isinstance(error, TimeoutError):
        return failed("TLS", "no answer to the TLS greeting", f"{port_of}?")
    return failed("TLS", f"{host}:{port} does not speak TLS ({error})", f"{port_of}, and was it started with keys?")


def _expiry(peer: Any, now: float) -> Step:
    ends = str(peer.get("notAfter", ""))
    days = int((ssl.cert_time_to_seconds(ends) - now) // 86400)
    words = f"valid for {days} days more (until {ends})"
    return Step("certificate", "warning", words, RENEW) if days < SOON else Step("certificate", "ok", words)


def _date(connection: socket.socket, host: str) -> float | None:
    """Seconds that this machine's clock is ahead of the server's, by the Date of its answer; None if it gives none."""
    try:
        before = time.time()
        connection.sendall(f"HEAD / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("ascii", "replace"))
        answer = connection.recv(8192).decode("latin-1")
        after = time.time()
        if not answer.startswith("HTTP/"):
            return None
        dates = [line[5:].strip() for line in answer.split("\r\n") if line.lower().startswith("date:")]
        theirs = parsedate_to_datetime(dates[0]).timestamp()
    except (OSError, ValueError, IndexError, TypeError):
        return None
    early, late = before - theirs - 1.0, after - theirs  # the server's clock shows whole seconds
    return early if early > 0 else late if late < 0 else 0.0


def _clock(ahead: float | None) -> Step:
    if ahead is None:
        return Step("clock", "skipped", "the server does not tell its time")
    words = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    if abs(ahead) > OFF:
        return Step(
            "clock", "warning", f"this machine's clock is {words}", "set it, by NTP for instance: certificates go by it"
        )
    return Step("clock", "ok", "as the server's" if abs(ahead) < 1 else words)
