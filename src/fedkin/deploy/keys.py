"""Who is who in a deployment: a certificate authority, the server's certificate, and one key pair per site.

The server's folder holds all but the sites' private keys:

    ca.crt, ca.key          the authority; every site has a copy of ca.crt
    server.crt, server.key  what the server shows; good for the host names it was made for
    sites.json              which sites may join: name, fingerprint, public key
    sites/NAME.pub          the same public keys as files, as Flower registers them
    sites/NAME.key          only where the site did not make its own key: hand it over, then delete it

A site's key is ECDSA P-384 in OpenSSH's form, because that is what Flower signs with. Fingerprints are those that
`ssh-keygen -lf` shows. Certificates are read by OpenSSL as well as by this module.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedkin.errors import DataError, UsageError, unknown

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as missing:
    raise UsageError("keys and certificates need the package cryptography: pip install 'fedkin[flower]'") from missing

FORMAT = 1
DAYS = 730
SERVER_DAYS = 825  # clients of some systems refuse server certificates that are valid for longer
EARLIER = timedelta(days=1)  # certificates start this long ago, for sites whose clock is behind
LARGEST = 64 * 1024  # bytes of a key, certificate or fingerprint list
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # the server's own processes reach it this way
NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}")
HOST = re.compile(r"(?=.{1,253}$)(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")


@dataclass(frozen=True)
class Site:
    """A site that may join: `public` is one line, as in its .pub file."""

    name: str
    fingerprint: str
    public: str

    @property
    def pem(self) -> bytes:
        """The public key as Flower's server keeps it."""
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        return _parse_public(self.public).public_bytes(serialization.Encoding.PEM, form)


@dataclass(frozen=True)
class Certificate:
    """What a person wants to know of a certificate."""

    path: Path
    fingerprint: str
    expires: datetime
    hosts: tuple[str, ...]


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
            public = new_site(partial / "sites", name)
            _record(partial, name, public.read_text())
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def new_site(folder: str | Path, name: str) -> Path:
    """A key pair made where it will be used: NAME.key stays here, NAME.pub (returned) goes to the server."""
    folder = Path(folder).expanduser()
    private, public = folder / f"{site_name(name)}.key", folder / f"{name}.pub"
    for path in (private, public):
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} exists already: keys are never overwritten; choose another folder or name")
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(
        private,
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )
    public.write_text(f"{_public_line(key.public_key())} {name}\n", encoding="ascii")
    return public


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
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"FedKin authority {os.urandom(4).hex()}")])
    now = datetime.now(UTC).replace(microsecond=0)
    usage = _usage(sign_certificates=True)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    _write_private(folder / "ca.key", _pem(key))
    (folder / "ca.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))


def _issue_server(folder: Path, hosts: Sequence[str]) -> None:
    ca = _read_certificate(folder / "ca.crt")
    ca_key = _ca_key(folder / "ca.key", ca)
    key = ec.generate_private_key(ec.SECP384R1())
    now = datetime.now(UTC).replace(microsecond=0)
    if ca.not_valid_after_utc <= now:
        raise DataError(f"{folder / 'ca.crt'} ran out on {ca.not_valid_after_utc:%Y-%m-%d}: make a new folder of keys")
    names = [_general_name(host) for host in dict.fromkeys([*hosts, *LOOPBACK])]
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "FedKin server")]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(max(now - EARLIER, ca.not_valid_before_utc))
        .not_valid_after(min(now + timedelta(days=SERVER_DAYS), ca.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    _write_private(folder / "server.key", _pem(key))
    (folder / "server.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))


def _usage(sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates, key_cert_sign=sign_certificates, crl_sign=sign_certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


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


def sign(folder: str | Path, public: str | Path, name: str | None = None, replace: bool = False) -> Site:
    """Let the owner of this public key join under a name (the file's own unless said)."""
    folder, public = _server_folder(folder), Path(public).expanduser()
    name = site_name(name if name is not None else public.stem)
    line = _public_line(load_public(public))
    found = _site(name, line)
    for other in sites(folder).values():
        if other.fingerprint == found.fingerprint and other.name != name:
            raise UsageError(f"{public}: site {other.name!r} has this key already; every site needs a key of its own")
        if other.name.lower() == name.lower() and other.fingerprint != found.fingerprint and not replace:
            raise UsageError(f"site {other.name!r} has another key ({other.fingerprint}); --replace puts {public} in "
                             "its place, and the old one is refused from then on")  # fmt: skip
    _record(folder, name, line)
    return found


def revoke(folder: str | Path, name: str) -> Site:
    """Take a site off the list; the server refuses its key from the next start on."""
    folder = _server_folder(folder)
    known = dict(sites(folder))
    if name not in known:
        raise unknown("site", name, known)
    gone = known.pop(name)
    _write_sites(folder, known)
    (folder / "sites" / f"{name}.pub").unlink(missing_ok=True)
    return gone


def sites(folder: str | Path) -> Mapping[str, Site]:
    """Who may join, by name, in alphabetical order; every line is checked."""
    path = _server_folder(folder) / "sites.json"
    try:
        content = json.loads(_read_small(path, most=16 * 1024 * 1024))
        entries = content["sites"]
        if content["format"] != FORMAT or not isinstance(entries, dict):
            raise DataError(f"{path}: expected format {FORMAT}, found {content.get('format')!r}")
        found = {name: _site(name, str(entry["public"])) for name, entry in sorted(entries.items())}
        stated = {name: entry["fingerprint"] for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, UsageError) as error:
        raise DataError(f"{path} is damaged ({error}): sign the sites' .pub files again") from error
    for name, site in found.items():
        if stated[name] != site.fingerprint:
            raise DataError(f"{path}: the fingerprint of {name!r} does not belong to its key; sign its .pub file again")
    return found


def _site(name: str, line: str) -> Site:
    key = _parse_public(line)
    return Site(site_name(name), fingerprint(key), f"{_public_line(key)} {name}")


def _record(folder: Path, name: str, line: str) -> None:
    found = _site(name, line)
    known = {n: s for n, s in sites(folder).items() if n.lower() != name.lower()}
    _write_sites(folder, {**known, name: found})
    (folder / "sites").mkdir(exist_ok=True)
    (folder / "sites" / f"{name}.pub").write_text(found.public + "\n", encoding="ascii")


def _write_sites(folder: Path, known: Mapping[str, Site]) -> None:
    entries = {s.name: {"fingerprint": s.fingerprint, "public": s.public} for s in known.values()}
    partial = folder / ".sites.json.partial"
    partial.write_text(json.dumps({"format": FORMAT, "sites": entries}, indent=1, sort_keys=True) + "\n")
    os.replace(partial, folder / "sites.json")


def _server_folder(folder: str | Path) -> Path:
    folder = Path(folder).expanduser()
    if not (folder / "sites.json").exists():
        raise UsageError(f"{folder} is no folder of keys (no sites.json): make one with `fedkin keys new {folder}`")
    return folder


# ---------------------------------------------------------------- reading


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """SHA256:..., as `ssh-keygen -lf` shows it."""
    blob = base64.b64decode(_public_line(key).split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def load_private(path: str | Path) -> ec.EllipticCurvePrivateKey:
    """A site's private key; refused where others on this machine can read it."""
    path = Path(path).expanduser()
    check_private(path)
    try:
        key = serialization.load_ssh_private_key(_read_small(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise DataError(f"{path} is no OpenSSH private key without a passphrase ({error}); "
                        "make one with `fedkin keys new-site NAME`") from error  # fmt: skip
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise DataError(f"{path} is not an ECDSA P-384 key; make one with `fedkin keys new-site NAME`")
    return key


def load_public(path: str | Path) -> ec.EllipticCurvePublicKey:
    path = Path(path).expanduser()
    try:
        return _parse_public(_read_small(path).decode("ascii", "replace"))
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


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
        raise UsageError(f"{path} can be read by others (mode {stat.S_IMODE(found.st_mode):03o}): chmod 600 {path}; "
                         "if strangers had access, make a new key")  # fmt: skip


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
    return Certificate(path, pairs, found.not_valid_after_utc, tuple(str(name.value) for name in names))


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


def _parse_public(line: str) -> ec.EllipticCurvePublicKey:
    if "PRIVATE KEY" in line:
        raise DataError("a PRIVATE key; only the .pub file may travel. Make a new key pair, this one is exposed")
    try:
        key = serialization.load_ssh_public_key(line.strip().encode("ascii"))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise DataError(f"no public key in OpenSSH form ({error}); `fedkin keys new-site` makes one") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise DataError("not an ECDSA P-384 public key; `fedkin keys new-site` makes one")
    return key


def _public_line(key: ec.EllipticCurvePublicKey) -> str:
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


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
