"""Who is who in a federation: its certificate authority, the server's certificate, and one certificate for each site.

The server's folder holds all but the sites' private keys:

    ca.crt, ca.key          the authority of this federation alone; every site has a copy of ca.crt
    server.crt, server.key  what the server shows; good for the host names it was made for
    sites.json              which sites may join: name and fingerprint of the key; read again whenever it changes
    sites/NAME.crt          a site's certificate: goes back to the site
    sites/NAME.key          only where the site did not make its own key: hand it over, then delete it

A site makes a key and a request (NAME.csr, which proves that it has the key); the authority signs it. A certificate
says whose it is by its subject, and what it is for: a site's cannot pose as the server, nor the server's as a site.
A fingerprint is the SHA-256 of a public key, so it stays when a certificate is renewed. Files are ordinary PEM, which
OpenSSL reads as well.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedkin.errors import DataError, FedKinError, UsageError, unknown

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as missing:
    raise UsageError("keys and certificates need the package cryptography: pip install 'fedkin[deploy]'") from missing

FORMAT = 2
DAYS = 730
SITE_DAYS = 400
SERVER_DAYS = 825  # clients of some systems refuse server certificates that are valid for longer
SOON = timedelta(days=30)  # before a certificate runs out
EARLIER = timedelta(days=1)  # certificates start this long ago, for sites whose clock is behind
LARGEST = 64 * 1024  # bytes of a key, certificate or fingerprint list
CURVE, CURVES = ec.SECP256R1(), (ec.SECP256R1, ec.SECP384R1)  # P-256: a stranger's handshake costs the server little
PRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # the server's own processes reach it this way
NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}")
HOST = re.compile(r"(?=.{1,253}$)(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")


@dataclass(frozen=True)
class Site:
    """A site that may join, by the fingerprint of its key."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class Certificate:
    """What a person wants to know of a certificate."""

    path: Path
    fingerprint: str
    expires: datetime
    hosts: tuple[str, ...]
    name: str  # of whom it is


def site_name(name: str) -> str:
    """The name itself if it may be a site's; names become file names and lines of logs."""
    if not NAME.fullmatch(name):
        raise UsageError(f"site name {name!r}: use 1 to 64 letters, digits, '.', '_' or '-'")
    return name


# ---------------------------------------------------------------- making


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
    if not 1 <= days <= 36500:
        raise UsageError(f"days={days}: how long the authority is valid, 1 to 36500")
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
    folder = _server_folder(folder)
    _check_hosts(hosts)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".renew.") as made:
        for name in ("ca.crt", "ca.key"):
            shutil.copy2(folder / name, made)
        _issue_server(Path(made), hosts)
        for name in ("server.key", "server.crt"):
            os.replace(Path(made) / name, folder / name)
    return certificate(folder / "server.crt")


def _new_authority(folder: Path, days: int) -> None:
    key = ec.generate_private_key(CURVE)
    name = _subject(f"FedKin authority {os.urandom(4).hex()}")
    now = _now()
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_private(folder / "ca.key", _pem(key))
    (folder / "ca.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))


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
    hosts: x509.SubjectAlternativeName | None = None,
) -> bytes:
    """A certificate by this folder's authority, never valid for longer than that itself."""
    ca = _read_certificate(folder / "ca.crt")
    ca_key = _ca_key(folder / "ca.key", ca)
    now = _now()
    if ca.not_valid_after_utc <= now:
        raise DataError(f"{folder / 'ca.crt'} ran out on {ca.not_valid_after_utc:%Y-%m-%d}: make a new folder of keys")
    made = (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(ca.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(max(now - EARLIER, ca.not_valid_before_utc))
        .not_valid_after(min(now + timedelta(days=days), ca.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    if hosts is not None:
        made = made.add_extension(hosts, critical=False)
    return made.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _usage(sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


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


# ---------------------------------------------------------------- who may join


def sign(
    folder: str | Path, request: str | Path, name: str | None = None, replace: bool = False, days: int = SITE_DAYS
) -> Site:
    """Let the owner of this request's key join under a name (the request's own unless said): sites/NAME.crt."""
    folder, request = _server_folder(folder), Path(request).expanduser()
    if not 1 <= days <= 36500:
        raise UsageError(f"days={days}: how long the certificate is valid, 1 to 36500")
    asked = load_request(request)
    name = site_name(name if name is not None else _common_name(asked.subject))
    key = asked.public_key()
    found = Site(name, fingerprint(key))
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


def revoke(folder: str | Path, name: str) -> Site:
    """Take a site off the list; a server that is running refuses it from then on."""
    folder = _server_folder(folder)
    known = dict(sites(folder))
    if name not in known:
        raise unknown("site", name, known)
    gone = known.pop(name)
    _write_sites(folder, known)
    (folder / "sites" / f"{name}.crt").unlink(missing_ok=True)
    return gone


def sites(folder: str | Path) -> Mapping[str, Site]:
    """Who may join, by name, in alphabetical order; every line is checked."""
    path = _server_folder(folder) / "sites.json"
    try:
        content = json.loads(_read_small(path, most=16 * 1024 * 1024))
        entries = content["sites"]
        if content["format"] != FORMAT or not isinstance(entries, dict):
            raise DataError(
                f"{path}: expected format {FORMAT}, found {content.get('format')!r}: make a new folder "
                "with `fedkin keys new`"
            )
        found = {name: Site(site_name(name), entry["fingerprint"]) for name, entry in sorted(entries.items())}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UsageError) as error:
        raise DataError(f"{path} is damaged ({error}): sign the sites' requests again") from error
    prints = [site.fingerprint for site in found.values()]
    if not all(isinstance(p, str) and PRINT.fullmatch(p) for p in prints) or len(set(prints)) < len(prints):
        raise DataError(f"{path} is damaged (fingerprints that are none, or one of two sites): sign them again")
    return found


class Roll:
    """Who may join, now: `sites.json` as it is, looked at again whenever it has changed. A list that cannot be read
    lets nobody in."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._seen, self._names = folder, (0, 0, 0), dict[str, str]()
        self.refresh()

    def refresh(self) -> None:
        try:
            found = (self._folder / "sites.json").stat()
            seen = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            seen = (-1, -1, -1)
        if seen != self._seen:
            self._seen = seen
            try:
                self._names = {site.fingerprint: site.name for site in sites(self._folder).values()}
            except FedKinError as error:
                self._names = {}
                logging.getLogger("fedkin").warning("nobody is let in: %s", error)

    def allows(self, name: str, key: str) -> bool:
        self.refresh()
        return self._names.get(key) == name


def _write_sites(folder: Path, known: Mapping[str, Site]) -> None:
    entries = {s.name: {"fingerprint": s.fingerprint} for s in known.values()}
    partial = folder / ".sites.json.partial"
    partial.write_text(json.dumps({"format": FORMAT, "sites": entries}, indent=1, sort_keys=True) + "\n")
    os.replace(partial, folder / "sites.json")


def _server_folder(folder: str | Path) -> Path:
    folder = Path(folder).expanduser()
    if not (folder / "sites.json").exists():
        raise UsageError(f"{folder} is no folder of keys (no sites.json): make one with `fedkin keys new {folder}`")
    return folder


# ---------------------------------------------------------------- reading


def fingerprint(key: CertificatePublicKeyTypes) -> str:
    """SHA256:... of a public key; what is read over the telephone."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    digest = hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def load_private(path: str | Path) -> ec.EllipticCurvePrivateKey:
    """A site's private key; refused where others on this machine can read it."""
    path = Path(path).expanduser()
    check_private(path)
    try:
        key = serialization.load_pem_private_key(_read_small(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise DataError(
            f"{path} is no private key in PEM form without a passphrase ({error}); "
            "make one with `fedkin keys new-site NAME`"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, CURVES):
        raise DataError(f"{path} is not a key on P-256 or P-384; make one with `fedkin keys new-site NAME`")
    return key


def load_request(path: str | Path) -> x509.CertificateSigningRequest:
    """What a site wants signed. Only its key and its name are looked at: the authority says what a certificate is for,
    whatever the request asks."""
    path = Path(path).expanduser()
    content = _read_small(path)
    if b"PRIVATE KEY" in content:
        raise DataError(f"{path}: a PRIVATE key; only the .csr file may travel. Make a new key, this one is exposed")
    try:
        asked = x509.load_pem_x509_csr(content)
        key, sound = asked.public_key(), asked.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise DataError(f"{path} is no certificate request ({error}); `fedkin keys new-site` makes one") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, CURVES):
        raise DataError(f"{path}: its key is not on P-256 or P-384; `fedkin keys new-site` makes one that is")
    if not sound:
        raise DataError(f"{path}: whoever made it does not have the key; `fedkin keys new-site` makes one")
    return asked


@dataclass(frozen=True)
class Identity:
    """How a site proves itself: its key, the certificate of it, and the authority that signed both ends."""

    key: Path
    certificate: Path
    ca: Path

    def check(self) -> Certificate:
        """What can be wrong is found here and named: in a handshake the server says no more than no."""
        key, made = load_private(self.key), _read_certificate(self.certificate)
        ca = _read_certificate(self.ca)
        if made.public_key() != key.public_key():
            raise DataError(f"{self.certificate} is not the certificate of {self.key}: put the pair back together")
        try:
            made.verify_directly_issued_by(ca)
        except (ValueError, TypeError, InvalidSignature):
            raise DataError(
                f"{self.certificate} was not signed by {self.ca}: a certificate serves one federation "
                "only; get both from whoever runs this one"
            ) from None
        found = certificate(self.certificate)
        if found.expires <= datetime.now(UTC):
            raise DataError(f"{self.certificate} ran out on {found.expires:%Y-%m-%d}: have its .csr signed again")
        return found


def identity_of(key: str | Path, ca: str | Path, cert: str | Path | None = None) -> Identity:
    """Of these files; the certificate lies beside the key unless said."""
    private = Path(key).expanduser()
    return Identity(private, Path(cert).expanduser() if cert else private.with_suffix(".crt"), Path(ca).expanduser())


def check_server(folder: str | Path) -> list[str]:
    """What to say of a server's certificates before it starts; `DataError` where no site could talk to it."""
    folder, now, said = _server_folder(folder), datetime.now(UTC), []
    check_private(folder / "server.key")
    for file, fix in (
        ("ca.crt", "make a new folder with `fedkin keys new`, and new certificates for the sites"),
        ("server.crt", f"fedkin keys renew {folder} --host NAME"),
    ):
        found = certificate(folder / file)
        if found.expires <= now:
            raise DataError(
                f"{folder / file} ran out on {found.expires:%Y-%m-%d}: no site would talk to this server; {fix}"
            )
        if found.expires - now < SOON:
            said.append(f"{folder / file} runs out in {(found.expires - now).days} days; {fix}")
    return said


def peer(der: bytes) -> tuple[str, str]:
    """The name in a certificate that TLS has found good, and the fingerprint of its key."""
    found = x509.load_der_x509_certificate(der)
    return _common_name(found.subject), fingerprint(found.public_key())


def _common_name(name: x509.Name) -> str:
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if len(found) == 1 else ""


def check_private(path: str | Path) -> None:
    """A private key file must be a plain file that nobody else can read."""
    path = Path(path).expanduser()
    try:
        found = path.stat()
    except OSError as error:
        raise UsageError(f"private key {path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"private key {path} is not a file")
    if os.name == "posix" and found.st_mode & 0o077:
        raise UsageError(
            f"{path} can be read by others (mode {stat.S_IMODE(found.st_mode):03o}): chmod 600 {path}; "
            "if strangers had access, make a new key"
        )


def certificate(path: str | Path) -> Certificate:
    """Fingerprint, expiry and hosts of a certificate file."""
    path = Path(path).expanduser()
    found = _read_certificate(path)
    try:
        names: Iterable[x509.GeneralName] = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = ()
    digest = found.fingerprint(hashes.SHA256()).hex().upper()
    pairs = ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))
    return Certificate(
        path, pairs, found.not_valid_after_utc, tuple(str(name.value) for name in names), _common_name(found.subject)
    )


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_read_small(path))
    except ValueError as error:
        raise DataError(f"{path} is no certificate in PEM form ({error})") from error


def _ca_key(path: Path, ca: x509.Certificate) -> ec.EllipticCurvePrivateKey:
    check_private(path)
    try:
        key = serialization.load_pem_private_key(_read_small(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise DataError(f"{path} is no private key in PEM form ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise DataError(f"{path} is not the key of {path.with_suffix('.crt')}: put the pair back together")
    return key


def _read_small(path: Path, most: int = LARGEST) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise DataError(f"{path} is larger than {most} bytes: that is no key, certificate or list of sites")
    return content


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_private(path: Path, content: bytes) -> None:
    """Readable by its owner alone from the first moment on."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
