"""Keys and certificates: what OpenSSL makes of them, who may join with them, and what is refused."""

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
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from typer.testing import CliRunner

from fedkin.cli.application import app
from fedkin.deploy import authority
from fedkin.deploy import certificates as keys
from fedkin.errors import DataError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return authority.new_folder(tmp_path / "keys", ["server.example.org", "10.0.0.5"], ["siteA", "siteB"])


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
    assert made == [
        "ca.crt",
        "ca.key",
        "server.crt",
        "server.key",
        "sites.json",
        "sites/siteA.crt",
        "sites/siteA.key",
        "sites/siteB.crt",
        "sites/siteB.key",
    ]
    for path in folder.rglob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in folder.parent.iterdir()] == ["keys"]  # nothing half-made is left


@pytest.mark.parametrize("host", ["server.example.org", "10.0.0.5", "localhost", "127.0.0.1"])
def test_the_certificate_is_good_for_its_hosts(folder: Path, host: str) -> None:
    handshake(folder, folder / "ca.crt", host)


def test_but_not_for_others_nor_under_another_authority(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"[Hh]ostname mismatch"):
        handshake(folder, folder / "ca.crt", "elsewhere.example.org")
    other = authority.new_folder(tmp_path / "other", ["server.example.org"])
    with pytest.raises(ssl.SSLCertVerificationError, match=r"self-signed|unable to get"):
        handshake(folder, other / "ca.crt", "server.example.org")


def test_the_servers_key_cannot_sign_certificates(folder: Path) -> None:
    found = keys.read_certificate(folder / "server.crt")
    constraints = found.extensions.get_extension_for_class(keys.x509.BasicConstraints).value
    usage = found.extensions.get_extension_for_class(keys.x509.KeyUsage).value
    assert not constraints.ca
    assert not usage.key_cert_sign


@pytest.mark.parametrize(("days", "server"), [(730, 730), (30, 30), (3650, 825)])
def test_expiry(tmp_path: Path, days: int, server: int) -> None:
    made, now = authority.new_folder(tmp_path / "k", ["localhost"], days=days), datetime.now(UTC)
    for name, expected in (("ca.crt", days), ("server.crt", server)):
        left = keys.certificate(made / name).expires - now
        assert abs(left - timedelta(days=expected)) < timedelta(minutes=1)


@pytest.mark.parametrize(("days", "site"), [(730, 400), (30, 30), (3650, 400)])
def test_a_sites_certificate_ends_with_its_authority_at_the_latest(tmp_path: Path, days: int, site: int) -> None:
    made, now = authority.new_folder(tmp_path / "k", ["localhost"], ["siteA"], days=days), datetime.now(UTC)
    left = keys.certificate(made / "sites" / "siteA.crt").expires - now
    assert abs(left - timedelta(days=site)) < timedelta(minutes=1)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_openssl_agrees(folder: Path, tmp_path: Path) -> None:
    """It verifies what was made for its purpose and no other, and a request that it made can be signed."""

    def openssl(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True)

    for file, purpose, good in (
        ("server.crt", "sslserver", True),
        ("server.crt", "sslclient", False),
        ("sites/siteA.crt", "sslclient", True),
        ("sites/siteA.crt", "sslserver", False),
        ("ca.crt", "sslclient", False),
    ):
        done = openssl("verify", "-x509_strict", "-purpose", purpose, "-CAfile", folder / "ca.crt", folder / file)
        assert (done.returncode == 0) is good, (file, purpose, done.stdout, done.stderr)
    done = openssl(
        "req",
        "-new",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-384",
        "-nodes",
        "-subj",
        "/CN=siteC",
        "-keyout",
        tmp_path / "c.key",
        "-out",
        tmp_path / "c.csr",
    )
    assert done.returncode == 0, done.stderr
    authority.sign(folder, tmp_path / "c.csr")
    shutil.copy(folder / "sites" / "siteC.crt", tmp_path / "c.crt")
    assert keys.identity_of(tmp_path / "c.key", folder / "ca.crt").check().name == "siteC"


def test_nothing_is_overwritten(folder: Path) -> None:
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(UsageError, match="exists already"):
        authority.new_folder(folder, ["localhost"])
    with pytest.raises(UsageError, match=r"siteA\.key exists already"):
        authority.new_site(folder / "sites", "siteA")
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "siteA.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="exists already"):
        authority.new_site(tmp_path, "siteA")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "a b", "x" * 65, "ä", "a\n"])
def test_site_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="site name"):
        authority.new_site(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["", "a b", "server:9092", "http://server", "999.1.1.1", "-a", "*"])
def test_hosts(tmp_path: Path, host: str) -> None:
    with pytest.raises(UsageError, match="host"):
        authority.new_folder(tmp_path / "k", [host])
    with pytest.raises(UsageError, match="no host"):
        authority.new_folder(tmp_path / "k", [])
    assert list(tmp_path.iterdir()) == []


def test_two_sites_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="same name"):
        authority.new_folder(tmp_path / "k", ["localhost"], ["a", "A"])


# ---------------------------------------------------------------- who may join


def test_a_site_makes_its_own_key_and_only_the_public_half_travels(folder: Path, tmp_path: Path) -> None:
    request = authority.new_site(tmp_path / "there", "siteC")
    site = authority.sign(folder, request)
    assert site == keys.sites(folder)["siteC"]
    assert site.fingerprint == keys.fingerprint(keys.load_private(tmp_path / "there" / "siteC.key").public_key())
    assert (folder / "sites" / "siteC.crt").exists()
    assert not (folder / "sites" / "siteC.key").exists()
    assert list(keys.sites(folder)) == ["siteA", "siteB", "siteC"]


def test_a_name_keeps_its_key_and_a_key_its_name(folder: Path, tmp_path: Path) -> None:
    first = keys.sites(folder)["siteA"].fingerprint
    other = authority.new_site(tmp_path, "siteA")
    with pytest.raises(UsageError, match="has another key"):
        authority.sign(folder, other)
    assert keys.sites(folder)["siteA"].fingerprint == first
    replaced = authority.sign(folder, other, replace=True)
    with pytest.raises(UsageError, match="'siteA' has this key already"):
        authority.sign(folder, other, "siteC")
    assert keys.sites(folder)["siteA"] == replaced
    assert replaced.fingerprint != first
    before = keys.certificate(folder / "sites" / "siteA.crt").fingerprint
    authority.sign(folder, other)  # a new certificate of the same key
    assert keys.sites(folder)["siteA"] == replaced
    assert keys.certificate(folder / "sites" / "siteA.crt").fingerprint != before


def test_revoked_sites_are_off_the_list(folder: Path) -> None:
    authority.revoke(folder, "siteA")
    assert list(keys.sites(folder)) == ["siteB"]
    assert not (folder / "sites" / "siteA.crt").exists()
    with pytest.raises(UsageError, match="did you mean 'siteB'"):
        authority.revoke(folder, "site")


def test_renewed_server(folder: Path) -> None:
    before = keys.certificate(folder / "server.crt").fingerprint
    authority.renew_server(folder, ["new.example.org"])
    assert keys.certificate(folder / "server.crt").fingerprint != before
    handshake(folder, folder / "ca.crt", "new.example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(folder, folder / "ca.crt", "server.example.org")
    assert stat.S_IMODE((folder / "server.key").stat().st_mode) == 0o600


def test_a_private_key_sent_by_mistake_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="PRIVATE key"):
        authority.sign(folder, folder / "sites" / "siteA.key", "siteC")


def _request(key: object, name: str = "siteC", **extension: object) -> bytes:
    made = x509.CertificateSigningRequestBuilder().subject_name(authority._subject(name))
    for value in extension.values():
        made = made.add_extension(value, critical=True)  # type: ignore[arg-type]
    how = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return made.sign(key, how).public_bytes(serialization.Encoding.PEM)  # type: ignore[arg-type]


def _forged() -> bytes:
    """A request for somebody else's key: its signature is not by that key."""
    import base64

    lines = _request(ec.generate_private_key(ec.SECP256R1())).decode().splitlines()
    der = bytearray(base64.b64decode("".join(lines[1:-1])))
    der[-3] ^= 1
    return b"\n".join([lines[0].encode(), base64.encodebytes(der).strip(), lines[-1].encode(), b""])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense",
        b"\xff\xfe",
        b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n",
        b"x" * 100_000,
        _request(ed25519.Ed25519PrivateKey.generate()),
        _request(ec.generate_private_key(ec.SECP256K1())),
        _forged(),
    ],
    ids=["empty", "nonsense", "binary", "cut", "large", "ed25519", "curve", "forged"],
)
def test_what_is_no_request(folder: Path, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "siteC.csr"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"siteC\.csr"):
        authority.sign(folder, path)
    assert "siteC" not in keys.sites(folder)


@pytest.mark.parametrize("name", ["../x", "a b", "", "x\ny"])
def test_names_in_requests_are_checked(folder: Path, tmp_path: Path, name: str) -> None:
    if name:
        (tmp_path / "a.csr").write_bytes(_request(ec.generate_private_key(ec.SECP256R1()), name))
    else:
        made = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        signed = made.sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
        (tmp_path / "a.csr").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    with pytest.raises(UsageError, match="site name"):
        authority.sign(folder, tmp_path / "a.csr")
    assert authority.sign(folder, tmp_path / "a.csr", "siteC").name == "siteC"
    assert keys.certificate(folder / "sites" / "siteC.crt").name == "siteC"


def test_a_request_gets_what_sites_get_whatever_it_asks_for(folder: Path, tmp_path: Path) -> None:
    """An authority of its own, the server's purpose, the server's host name: none of it."""
    asked = _request(
        ec.generate_private_key(ec.SECP256R1()),
        ca=x509.BasicConstraints(ca=True, path_length=None),
        purpose=x509.ExtendedKeyUsage([authority.ExtendedKeyUsageOID.SERVER_AUTH]),
        hosts=x509.SubjectAlternativeName([x509.DNSName("server.example.org")]),
    )
    (tmp_path / "siteC.csr").write_bytes(asked)
    authority.sign(folder, tmp_path / "siteC.csr")
    found = keys.read_certificate(folder / "sites" / "siteC.crt").extensions
    assert not found.get_extension_for_class(x509.BasicConstraints).value.ca
    assert list(found.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        authority.ExtendedKeyUsageOID.CLIENT_AUTH
    ]
    with pytest.raises(x509.ExtensionNotFound):
        found.get_extension_for_class(x509.SubjectAlternativeName)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["sites"].update({"../x": c["sites"]["siteA"]}),
        lambda c: c["sites"]["siteA"].update(fingerprint="SHA256:other"),
        lambda c: c["sites"]["siteA"].update(fingerprint=c["sites"]["siteB"]["fingerprint"]),
        lambda c: c["sites"]["siteA"].update(fingerprint=7),
        lambda c: c["sites"].update(siteA="x"),
        lambda c: c["sites"]["siteA"].pop("fingerprint"),
        lambda c: c.update(format=1),
        lambda c: c.update(sites=[]),
    ],
)
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


@pytest.mark.parametrize(
    ("name", "match"), [("ca.crt", "can be read by others"), ("missing", "cannot be read"), ("sites", "is not a file")]
)
def test_what_is_no_private_key(folder: Path, name: str, match: str) -> None:
    with pytest.raises((UsageError, DataError), match=match):
        keys.load_private(folder / name)


def test_a_foreign_authoritys_key_cannot_renew(folder: Path, tmp_path: Path) -> None:
    other = authority.new_folder(tmp_path / "other", ["localhost"])
    shutil.copy2(other / "ca.key", folder / "ca.key")
    before = (folder / "server.crt").read_bytes()
    with pytest.raises(DataError, match="is not the key of"):
        authority.renew_server(folder, ["localhost"])
    assert (folder / "server.crt").read_bytes() == before


def test_a_site_finds_out_by_itself_what_is_wrong_with_its_files(folder: Path, tmp_path: Path) -> None:
    sites, other = folder / "sites", authority.new_folder(tmp_path / "other", ["localhost"], ["siteA"])
    assert keys.identity_of(sites / "siteA.key", folder / "ca.crt").check().name == "siteA"
    with pytest.raises(DataError, match="is not the certificate of"):
        keys.identity_of(sites / "siteA.key", folder / "ca.crt", sites / "siteB.crt").check()
    with pytest.raises(DataError, match=r"was not signed by .* one federation only"):
        keys.identity_of(sites / "siteA.key", other / "ca.crt").check()
    with pytest.raises(UsageError, match="cannot be read"):
        keys.identity_of(sites / "siteA.key", folder / "ca.crt", tmp_path / "none.crt").check()


def test_the_server_says_when_its_certificates_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authority, "_now", lambda real=authority._now: real() - timedelta(days=40))
    old = authority.new_folder(tmp_path / "old", ["localhost"], ["siteA"], days=30)
    soon = authority.new_folder(tmp_path / "soon", ["localhost"], ["siteA"], days=50)
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"ca\.crt ran out on .* no site would talk"):
        keys.check_server(old)
    said = keys.check_server(soon)
    assert ["ca.crt runs out in 9 days" in said[0], "server.crt runs out in 9 days" in said[1]] == [True, True]
    assert keys.check_server(authority.new_folder(tmp_path / "new", ["localhost"])) == []
    done = CliRunner().invoke(app, ["server", "fedavg", "--keys", str(old), "--port", "0"])
    assert done.exit_code == 2
    assert "ran out" in done.output


def test_the_list_is_read_again_when_it_changes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    roll = keys.AdmittedSites(folder)
    known, other = (keys.sites(folder)[name].fingerprint for name in ("siteA", "siteB"))
    assert roll.allows("siteA", known)
    assert not roll.allows("siteB", known)
    assert not roll.allows("siteA", "SHA256:other")
    authority.revoke(folder, "siteA")
    assert not roll.allows("siteA", known)
    keep = (folder / "sites.json").read_text()
    (folder / "sites.json").write_text("{")
    assert not roll.allows("siteB", other)
    assert "nobody is let in" in caplog.text
    (folder / "sites.json").write_text(keep)
    assert roll.allows("siteB", keys.sites(folder)["siteB"].fingerprint)


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
    assert site["fingerprint"] in fedkin("sign", there, str(tmp_path / "siteA.csr"))
    listed = fedkin("show", there)
    assert site["fingerprint"] in listed
    assert shown["authority"]["fingerprint"] in listed
    assert "2" in fedkin("renew", there, "--host", "localhost")
    assert "may no longer join" in fedkin("revoke", there, "siteA")
    assert "no site may join yet" in fedkin("show", there)
    assert "no folder of keys" in fedkin("show", str(tmp_path), code=2)
