"""Certificates for tests: an authority, and files with what it signs."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates for 127.0.0.1 and localhost. `ca` is the file with its own."""

    def __init__(self, directory, name="authority"):
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), critical=True)
        self.ca = directory / f"{name}.pem"
        self._write(self.ca, builder.sign(self._key, hashes.SHA256()))

    def issue(self, name, expired=False):
        """Files with a new certificate and its key, replaced at once if they are there; days from now if `expired`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key, expired)
        cert, path = self._directory / f"{name}.crt", self._directory / f"{name}.key"
        self._write(cert, builder.sign(self._key, hashes.SHA256()))
        self._replace(
            path,
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )
        return cert, path

    def _builder(self, subject, key, expired=False):
        now = datetime.datetime.now(datetime.UTC)
        end = now - DAY if expired else now + DAY
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(end - 10 * DAY)
            .not_valid_after(end)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
        )

    def _write(self, path, certificate):
        self._replace(path, certificate.public_bytes(serialization.Encoding.PEM))

    @staticmethod
    def _replace(path, data):
        new = path.with_suffix(".new")
        new.write_bytes(data)
        new.replace(path)


def encrypted(key):
    """A private key in PEM, under a password."""
    loaded = serialization.load_pem_private_key(key, None)
    encryption = serialization.BestAvailableEncryption(b"word")
    return loaded.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
