"""Keys and certificates: what OpenSSL, OpenSSH's formats and Flower make of them, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from typer.testing import CliRunner

from fedkin.cli import app
from fedkin.deploy import keys
from fedkin.errors import DataError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return keys.new_folder(tmp_path / "keys", ["server.example.org", "10.0.0.5"], ["siteA", "siteB"])


def handshake(server: Path, ca: Path, host: str) -> None:
    """A TLS handshake in memory; raises what a client would."""
    there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    there.load_cert_chain(server / "server.crt", server / "server.key")
    here = ssl.create_default_context(cafile=str(ca))
    here.verify_flags |= ssl.VERIFY_X509_STRICT
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = here.wrap_bio(a, b, server_hostname=host)
    peer = there.wrap_bio(b, a, server_side=True)
    done: set[str] = set()
    for _ in range(10):
        for name, side in (("client", client), ("peer", peer)):
            try:
                side.do_handshake()
                done.add(name)
            except ssl.SSLWantReadError:
                pass
    assert done == {"client", "peer"}


# ---------------------------------------------------------------- making


def test_new_makes_everything_and_private_keys_are_private(folder: Path) -> None:
    made = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert made == ["ca.crt", "ca.key", "server.crt", "server.key", "sites.json",
                    "sites/siteA.key", "sites/siteA.pub", "sites/siteB.key", "sites/siteB.pub"]  # fmt: skip
    for path in folder.rglob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in folder.parent.iterdir()] == ["keys"]  # nothing half-made is left


@pytest.mark.parametrize("host", ["server.example.org", "10.0.0.5", "localhost", "127.0.0.1"])
def test_the_certificate_is_good_for_its_hosts(folder: Path, host: str) -> None:
    handshake(folder, folder / "ca.crt", host)


def test_but_not_for_others_nor_under_another_authority(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"[Hh]ostname mismatch"):
        handshake(folder, folder / "ca.crt", "elsewhere.example.org")
    other = keys.new_folder(tmp_path / "other", ["server.example.org"])
    with pytest.raises(ssl.SSLCertVerificationError, match=r"self-signed|unable to get"):
        handshake(folder, other / "ca.crt", "server.example.org")


def test_the_servers_key_cannot_sign_certificates(folder: Path) -> None:
    found = keys._read_certificate(folder / "server.crt")
    constraints = found.extensions.get_extension_for_class(keys.x509.BasicConstraints).value
    usage = found.extensions.get_extension_for_class(keys.x509.KeyUsage).value
    assert not constraints.ca
    assert not usage.key_cert_sign


@pytest.mark.parametrize(("days", "server"), [(730, 730), (30, 30), (3650, 825)])
def test_expiry(tmp_path: Path, days: int, server: int) -> None:
    made, now = keys.new_folder(tmp_path / "k", ["localhost"], days=days), datetime.now(UTC)
    for name, expected in (("ca.crt", days), ("server.crt", server)):
        left = keys.certificate(made / name).expires - now
        assert abs(left - timedelta(days=expected)) < timedelta(minutes=1)


def test_flower_reads_the_keys(folder: Path) -> None:
    from argparse import Namespace

    from flwr.cli.supernode.register import try_load_public_key
    from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication

    arguments = Namespace(auth_supernode_private_key=str(folder / "sites/siteA.key"), auth_supernode_public_key=None)
    pair = _try_setup_client_authentication(arguments)
    assert pair is not None
    assert keys.fingerprint(pair[1]) == keys.sites(folder)["siteA"].fingerprint
    assert try_load_public_key(folder / "sites" / "siteA.pub") == keys.sites(folder)["siteA"].pem


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_fingerprints_are_those_of_openssh(folder: Path) -> None:
    shown = subprocess.check_output(["ssh-keygen", "-lf", folder / "sites/siteA.pub"], text=True)
    assert keys.sites(folder)["siteA"].fingerprint in shown


def test_nothing_is_overwritten(folder: Path) -> None:
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(UsageError, match="exists already"):
        keys.new_folder(folder, ["localhost"])
    with pytest.raises(UsageError, match=r"siteA\.key exists already"):
        keys.new_site(folder / "sites", "siteA")
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "siteA.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="exists already"):
        keys.new_site(tmp_path, "siteA")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "a b", "x" * 65, "ä", "a\n"])
def test_site_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="site name"):
        keys.new_site(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["", "a b", "server:9092", "http://server", "999.1.1.1", "-a", "*"])
def test_hosts(tmp_path: Path, host: str) -> None:
    with pytest.raises(UsageError, match="host"):
        keys.new_folder(tmp_path / "k", [host])
    with pytest.raises(UsageError, match="no host"):
        keys.new_folder(tmp_path / "k", [])
    assert list(tmp_path.iterdir()) == []


def test_two_sites_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="same name"):
        keys.new_folder(tmp_path / "k", ["localhost"], ["a", "A"])


# ---------------------------------------------------------------- who may join


def test_a_site_makes_its_own_key_and_only_the_public_half_travels(folder: Path, tmp_path: Path) -> None:
    public = keys.new_site(tmp_path / "there", "siteC")
    site = keys.sign(folder, public)
    assert site == keys.sites(folder)["siteC"]
    assert site.fingerprint == keys.fingerprint(keys.load_private(tmp_path / "there" / "siteC.key").public_key())
    assert (folder / "sites" / "siteC.pub").exists()
    assert not (folder / "sites" / "siteC.key").exists()
    assert list(keys.sites(folder)) == ["siteA", "siteB", "siteC"]


def test_a_name_keeps_its_key_and_a_key_its_name(folder: Path, tmp_path: Path) -> None:
    first = keys.sites(folder)["siteA"].fingerprint
    other = keys.new_site(tmp_path, "siteA")
    with pytest.raises(UsageError, match="has another key"):
        keys.sign(folder, other)
    assert keys.sites(folder)["siteA"].fingerprint == first
    with pytest.raises(UsageError, match="'siteA' has this key already"):
        keys.sign(folder, folder / "sites" / "siteA.pub", "siteC")
    replaced = keys.sign(folder, other, replace=True)
    assert keys.sites(folder)["siteA"] == replaced
    assert replaced.fingerprint != first
    keys.sign(folder, other)  # once more changes nothing
    assert keys.sites(folder)["siteA"] == replaced


def test_revoked_sites_are_off_the_list(folder: Path) -> None:
    keys.revoke(folder, "siteA")
    assert list(keys.sites(folder)) == ["siteB"]
    assert not (folder / "sites" / "siteA.pub").exists()
    with pytest.raises(UsageError, match="did you mean 'siteB'"):
        keys.revoke(folder, "site")


def test_renewed_server(folder: Path) -> None:
    before = keys.certificate(folder / "server.crt").fingerprint
    keys.renew_server(folder, ["new.example.org"])
    assert keys.certificate(folder / "server.crt").fingerprint != before
    handshake(folder, folder / "ca.crt", "new.example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(folder, folder / "ca.crt", "server.example.org")
    assert stat.S_IMODE((folder / "server.key").stat().st_mode) == 0o600


def test_a_private_key_sent_by_mistake_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="PRIVATE key"):
        keys.sign(folder, folder / "sites" / "siteA.key", "siteC")


def _openssh(key: object) -> bytes:
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense", b"\xff\xfe", b"ecdsa-sha2-nistp384 AAAA", b"x" * 100_000,
     _openssh(ed25519.Ed25519PrivateKey.generate().public_key()),
     _openssh(ec.generate_private_key(ec.SECP256R1()).public_key())],
)  # fmt: skip
def test_what_is_no_public_key(folder: Path, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "siteC.pub"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"siteC\.pub"):
        keys.sign(folder, path)
    assert "siteC" not in keys.sites(folder)


@pytest.mark.parametrize(
    "change",
    [lambda c: c["sites"].update({"../x": c["sites"]["siteA"]}),
     lambda c: c["sites"]["siteA"].update(fingerprint="SHA256:other"),
     lambda c: c["sites"]["siteA"].pop("public"),
     lambda c: c.update(format=2), lambda c: c.update(sites=[])],
)  # fmt: skip
def test_a_list_that_was_tampered_with(folder: Path, change: object) -> None:
    path = folder / "sites.json"
    content = json.loads(path.read_text())
    change(content)  # type: ignore[operator]
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"sites\.json"):
        keys.sites(folder)


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_private_keys_that_others_can_read_are_refused(folder: Path, mode: int) -> None:
    path = folder / "sites" / "siteA.key"
    os.chmod(path, mode)
    with pytest.raises(UsageError, match=rf"mode {mode:03o}\): chmod 600"):
        keys.load_private(path)
    os.chmod(path, 0o600)
    keys.load_private(path)


@pytest.mark.parametrize(("name", "match"), [("ca.key", "no OpenSSH private key"), ("missing", "cannot be read"),
                                             ("sites", "is not a file")])  # fmt: skip
def test_what_is_no_private_key(folder: Path, name: str, match: str) -> None:
    with pytest.raises((UsageError, DataError), match=match):
        keys.load_private(folder / name)


def test_a_foreign_authoritys_key_cannot_renew(folder: Path, tmp_path: Path) -> None:
    other = keys.new_folder(tmp_path / "other", ["localhost"])
    shutil.copy2(other / "ca.key", folder / "ca.key")
    before = (folder / "server.crt").read_bytes()
    with pytest.raises(DataError, match="is not the key of"):
        keys.renew_server(folder, ["localhost"])
    assert (folder / "server.crt").read_bytes() == before


# ---------------------------------------------------------------- the commands


def test_commands(tmp_path: Path) -> None:
    def fedkin(*words: str, code: int = 0) -> str:
        outcome = CliRunner().invoke(app, ["keys", *words])
        assert outcome.exit_code == code, outcome.output
        return outcome.output

    there = str(tmp_path / "keys")
    shown = json.loads(fedkin("new", there, "--host", "server.example.org,10.0.0.5", "--json"))
    assert shown["server"]["hosts"][:2] == ["server.example.org", "10.0.0.5"]
    assert shown["sites"] == {}
    assert "exists already" in fedkin("new", there, "--host", "localhost", code=2)
    site = json.loads(fedkin("new-site", "siteA", "--to", str(tmp_path), "--json"))
    assert site["fingerprint"] in fedkin("sign", there, str(tmp_path / "siteA.pub"))
    listed = fedkin("show", there)
    assert site["fingerprint"] in listed
    assert shown["authority"]["fingerprint"] in listed
    assert "2" in fedkin("renew", there, "--host", "localhost")
    assert "may no longer join" in fedkin("revoke", there, "siteA")
    assert "no site may join yet" in fedkin("show", there)
    assert "no folder of keys" in fedkin("show", str(tmp_path), code=2)
