"""Who is who in a federation: its certificate authority, the server's certificate, and one certificate for each site.

The server's folder holds all but the sites' private keys:

    ca.crt, ca.key          the authority of this federation alone; every site has a copy of ca.crt
    server.crt, server.key  what the server shows; good for the host names it was made for
    sites.json              which sites may join: name and fingerprint of the key; read again whenever it changes
    sites/NAME.crt          a site's certificate: goes back to the site
    sites/NAME.key          only where the site did not make its own key: hand it over, then delete it

`authority` makes and signs them; here they are read and checked. A certificate says whose it is by its subject, and
what it is for: a site's cannot pose as the server, nor the server's as a site.
A fingerprint is the SHA-256 of a public key, so it stays when a certificate is renewed. Files are ordinary PEM, which
OpenSSL reads as well.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedkin.errors import DataError, FedKinError, UsageError

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes, PrivateKeyTypes
    from cryptography.x509.oid import NameOID
except ImportError as missing:
    raise UsageError("keys and certificates need the package cryptography: pip install 'fedkin[deploy]'") from missing

FORMAT = 2
SOON = timedelta(days=30)  # before a certificate runs out
LARGEST = 64 * 1024  # bytes of a key, certificate or fingerprint list
CURVES = (ec.SECP256R1, ec.SECP384R1)
PRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class KnownSite:
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


# ---------------------------------------------------------------- who may join


def sites(folder: str | Path) -> Mapping[str, KnownSite]:
    """Who may join, by name, in alphabetical order; every line is checked."""
    path = server_folder(folder) / "sites.json"
    try:
        content = json.loads(_read_small(path, most=16 * 1024 * 1024))
        entries = content["sites"]
        if content["format"] != FORMAT or not isinstance(entries, dict):
            raise DataError(
                f"{path}: expected format {FORMAT}, found {content.get('format')!r}: make a new folder "
                "with `fedkin keys new`"
            )
        found = {name: KnownSite(site_name(name), entry["fingerprint"]) for name, entry in sorted(entries.items())}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UsageError) as error:
        raise DataError(f"{path} is damaged ({error}): sign the sites' requests again") from error
    prints = [site.fingerprint for site in found.values()]
    if not all(isinstance(p, str) and PRINT.fullmatch(p) for p in prints) or len(set(prints)) < len(prints):
        raise DataError(f"{path} is damaged (fingerprints that are none, or one of two sites): sign them again")
    return found


class AdmittedSites:
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


def server_folder(folder: str | Path) -> Path:
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
    key = _private_key(Path(path).expanduser(), "; make one with `fedkin keys new-site NAME`")
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, CURVES):
        raise DataError(f"{path} is not a key on P-256 or P-384; make one with `fedkin keys new-site NAME`")
    return key


def load_ca_key(path: Path, ca: x509.Certificate) -> ec.EllipticCurvePrivateKey:
    """The authority's private key, which has to be that of its certificate."""
    key = _private_key(path)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise DataError(f"{path} is not the key of {path.with_suffix('.crt')}: put the pair back together")
    return key


def _private_key(path: Path, fix: str = "") -> PrivateKeyTypes:
    check_private(path)
    try:
        return serialization.load_pem_private_key(_read_small(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise DataError(f"{path} is no private key in PEM form without a passphrase ({error}){fix}") from error


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
        key, made = load_private(self.key), read_certificate(self.certificate)
        ca = read_certificate(self.ca)
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
    folder, now, said = server_folder(folder), datetime.now(UTC), []
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
    return common_name(found.subject), fingerprint(found.public_key())


def common_name(name: x509.Name) -> str:
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
    found = read_certificate(path)
    try:
        names: Iterable[x509.GeneralName] = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = ()
    digest = found.fingerprint(hashes.SHA256()).hex().upper()
    pairs = ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))
    return Certificate(
        path, pairs, found.not_valid_after_utc, tuple(str(name.value) for name in names), common_name(found.subject)
    )


def read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_read_small(path))
    except ValueError as error:
        raise DataError(f"{path} is no certificate in PEM form ({error})") from error


def _read_small(path: Path, most: int = LARGEST) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise DataError(f"{path} is larger than {most} bytes: that is no key, certificate or list of sites")
    return content
