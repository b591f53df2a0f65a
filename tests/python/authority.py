"""Certificates for tests, made by openssl as the documentation makes them."""

import subprocess
from pathlib import Path

EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc")


def openssl(*arguments: str | Path) -> None:
    """Run it; its complaints are the test's."""
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


class Authority:
    """Gives certificates, for an hour or so of tests."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.cert, self.key = directory / "ca.crt", directory / "ca.key"
        openssl(
            "req", "-x509", *EC, "-days", "2", "-subj", f"/CN={directory.name}",
            "-keyout", self.key, "-out", self.cert,
        )  # fmt: skip

    def admit(self, name: str, *addresses: str) -> Path:
        """A directory with a certificate, its key and the authority: of an engine, or of a server at these IP
        addresses."""
        made = self.directory / name
        made.mkdir()
        request, usage = made / "request", made / "usage"
        names = ",".join(f"IP:{address}" for address in addresses)
        usage.write_text(
            "extendedKeyUsage=serverAuth,clientAuth\n" + (f"subjectAltName={names}\n" if names else "")
        )
        openssl("req", *EC, "-subj", f"/CN={name}", "-keyout", made / "tls.key", "-out", request)
        openssl(
            "x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self.key, "-CAcreateserial",
            "-days", "1", "-extfile", usage, "-out", made / "tls.crt",
        )  # fmt: skip
        (made / "ca.crt").write_bytes(self.cert.read_bytes())
        return made
