"""The authority of a federation: makes its folder of keys, and signs and revokes the certificates of its sites.

`certificates` says what lies in the folder, and reads it. A site makes a key and a request (NAME.csr, which proves
that it has the key); the authority signs it, and says what a certificate is for, whatever the request asks.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedkin.deploy import certificates  # first: it says what to install where cryptography is missing

# isort: split

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedkin.deploy.certificates import Certificate, KnownSite, server_folder, site_name, sites
from fedkin.errors import DataError, UsageError, unknown

DAYS = 730
SITE_DAYS = 400
SERVER_DAYS = 825  # clients of some systems refuse server certificates that are valid for longer
MOST_DAYS = 36500
EARLIER = timedelta(days=1)  # certificates start this long ago, for sites whose clock is behind
CURVE = ec.SECP256R1()  # P-256: a stranger's handshake costs the server little
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # the server's own processes reach it this way
HOST = re.compile(r"(?=.{1,253}$)(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
OTHER_USES = [
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "encipher_only",
    "decipher_only",
]


def new_folder(folder: str | Path, hosts: Sequence[str], sites: Sequence[str] = (), days: int = DAYS) -> Path:
    """A new authority, a server certificate for `hosts`, and keys for `sites`; all of it or nothing.

    Sites named here get their private keys made on this machine; see `new_site` for the better way."""
    folder = Path(folder).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists already: keys are never overwritten; choose another folder")
    _check_hosts(hosts)
    names = [site_name(name) for name in sites]
    if len({name.lower() for name in names}) < len(names):
        raise UsageError(f"sites {', '.join(names)}: two have the same name; upper and lower case do not count")
    _check_days(days, "authority")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _new_authority(partial, days)
        _issue_server(partial, hosts)
        (partial / "sites").mkdir()
        _write_sites(partial, {})
        for name in names:
            request = new_site(partial / "sites", name)
            sign(partial, request)
            request.unlink()
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def new_site(folder: str | Path, name: str) -> Path:
    """A key made where it will be used: NAME.key stays here, the request NAME.csr (returned) goes to be signed."""
    folder = Path(folder).expanduser()
    private, request = folder / f"{site_name(name)}.key", folder / f"{name}.csr"
    for path in (private, request):
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} exists already: keys are never overwritten; choose another folder or name")
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(CURVE)
    made = x509.CertificateSigningRequestBuilder().subject_name(_subject(name)).sign(key, hashes.SHA256())
    _write_private(private, _pem(key))
    request.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return request


def renew_server(folder: str | Path, hosts: Sequence[str]) -> Certificate:
    """A new server certificate and key by the same authority, in place of the old ones; sites notice nothing."""
    folder = server_folder(folder)
    _check_hosts(hosts)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".renew.") as made:
        for name in ("ca.crt", "ca.key"):
            shutil.copy2(folder / name, made)
        _issue_server(Path(made), hosts)
        for name in ("server.key", "server.crt"):
            os.replace(Path(made) / name, folder / name)
    return certificates.certificate(folder / "server.crt")


# ---------------------------------------------------------------- who may join


def sign(
    folder: str | Path, request: str | Path, name: str | None = None, replace: bool = False, days: int = SITE_DAYS
) -> KnownSite:
    """Let the owner of this request's key join under a name (the request's own unless said): sites/NAME.crt."""
    folder, request = server_folder(folder), Path(request).expanduser()
    _check_days(days, "certificate")
    asked = certificates.load_request(request)
    name = site_name(name if name is not None else certificates.common_name(asked.subject))
    key = asked.public_key()
    found = KnownSite(name, certificates.fingerprint(key))
    known = dict(sites(folder))
    for other in known.values():
        if other.fingerprint == found.fingerprint and other.name != name:
            raise UsageError(f"{request}: site {other.name!r} has this key already; every site needs a key of its own")
        if other.name.lower() == name.lower() and other.fingerprint != found.fingerprint and not replace:
            raise UsageError(
                f"site {other.name!r} has another key ({other.fingerprint}); --replace puts {request} in "
                "its place, and the old one is refused from then on"
            )
    made = _issue(folder, name, key, days, ExtendedKeyUsageOID.CLIENT_AUTH)
    (folder / "sites").mkdir(exist_ok=True)
    (folder / "sites" / f"{name}.crt").write_bytes(made)
    _write_sites(folder, {**{n: s for n, s in known.items() if n.lower() != name.lower()}, name: found})
    return found


def revoke(folder: str | Path, name: str) -> KnownSite:
    """Take a site off the list; a server that is running refuses it from then on."""
    folder = server_folder(folder)
    known = dict(sites(folder))
    if name not in known:
        raise unknown("site", name, known)
    gone = known.pop(name)
    _write_sites(folder, known)
    (folder / "sites" / f"{name}.crt").unlink(missing_ok=True)
    return gone


def _write_sites(folder: Path, known: Mapping[str, KnownSite]) -> None:
    entries = {s.name: {"fingerprint": s.fingerprint} for s in known.values()}
    partial = folder / ".sites.json.partial"
    partial.write_text(json.dumps({"format": certificates.FORMAT, "sites": entries}, indent=1, sort_keys=True) + "\n")
    os.replace(partial, folder / "sites.json")


def _check_days(days: int, what: str) -> None:
    if not 1 <= days <= MOST_DAYS:
        raise UsageError(f"days={days}: how long the {what} is valid, 1 to {MOST_DAYS}")


# ---------------------------------------------------------------- certificates


def _new_authority(folder: Path, days: int) -> None:
    key = ec.generate_private_key(CURVE)
    name, now = _subject(f"FedKin authority {os.urandom(4).hex()}"), _now()
    made = _signed(name, name, key.public_key(), key, now - EARLIER, now + timedelta(days=days), ca=True)
    _write_private(folder / "ca.key", _pem(key))
    (folder / "ca.crt").write_bytes(made)


def _issue_server(folder: Path, hosts: Sequence[str]) -> None:
    key = ec.generate_private_key(CURVE)
    names = x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys([*hosts, *LOOPBACK])])
    made = _issue(folder, "FedKin server", key.public_key(), SERVER_DAYS, ExtendedKeyUsageOID.SERVER_AUTH, names)
    _write_private(folder / "server.key", _pem(key))
    (folder / "server.crt").write_bytes(made)


def _issue(
    folder: Path,
    name: str,
    key: CertificatePublicKeyTypes,
    days: int,
    purpose: x509.ObjectIdentifier,
    *more: x509.ExtensionType,
) -> bytes:
    """A certificate by this folder's authority, never valid for longer than that itself."""
    ca, now = certificates.read_certificate(folder / "ca.crt"), _now()
    ca_key = certificates.load_ca_key(folder / "ca.key", ca)
    if ca.not_valid_after_utc <= now:
        raise DataError(f"{folder / 'ca.crt'} ran out on {ca.not_valid_after_utc:%Y-%m-%d}: make a new folder of keys")
    begin = max(now - EARLIER, ca.not_valid_before_utc)
    end = min(now + timedelta(days=days), ca.not_valid_after_utc)
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    use = x509.ExtendedKeyUsage([purpose])
    return _signed(_subject(name), ca.subject, key, ca_key, begin, end, use, by, *more, ca=False)


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    key: CertificatePublicKeyTypes,
    signer: ec.EllipticCurvePrivateKey,
    begin: datetime,
    end: datetime,
    *more: x509.ExtensionType,
    ca: bool,
) -> bytes:
    """A certificate in PEM form: of an authority, which signs others, or of one who shows it."""
    made = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), begin, end)
    usage = {"digital_signature": not ca, "key_cert_sign": ca, "crl_sign": ca, **dict.fromkeys(OTHER_USES, False)}
    for extension in (
        x509.BasicConstraints(ca=ca, path_length=0 if ca else None),
        x509.KeyUsage(**usage),
        x509.SubjectKeyIdentifier.from_public_key(key),
        *more,
    ):
        critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage | x509.ExtendedKeyUsage)
        made = made.add_extension(extension, critical)
    return made.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _check_hosts(hosts: Sequence[str]) -> None:
    if not hosts:
        raise UsageError("no host: say under which names or addresses the sites reach the server, --host NAME[,NAME]")
    for host in hosts:
        _general_name(host)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not HOST.fullmatch(host) or host.replace(".", "").isdigit():
        raise UsageError(f"host {host!r} is no host name or IP address; write it without port, as server.example.org")
    return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_private(path: Path, content: bytes) -> None:
    """Readable by its owner alone from the first moment on."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
