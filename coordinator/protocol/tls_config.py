"""Settings of TLS: the files of one port, and those of the processes among themselves."""

from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator


class CellTlsConfig(BaseModel):
    """Mutual TLS between gateways, coordinators and ranks, and encrypted tokens; off without files.

    All processes of all cells of a fleet set it, or none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cert_file: str = ""
    """PEM file with this process's certificate, for servers and clients."""
    key_file: str = ""
    """PEM file with the private key of `cert_file`."""
    ca_file: str = ""
    """PEM file with the authority that signed the certificates of all processes, and of no one
    else."""
    server_name: str = "aileron-cell"
    """DNS name that every coordinator's certificate contains."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        files = {"cert_file": self.cert_file, "key_file": self.key_file, "ca_file": self.ca_file}
        missing = [name for name, file in files.items() if not file]
        if 0 < len(missing) < len(files):
            raise ValueError(
                f"cell_tls.{missing[0]} is missing: set cert_file, key_file and ca_file, or none."
            )
        return self


def check_pair(section: str, cert_file: str, key_file: str) -> None:
    """Raise ValueError if only one of the files is named."""
    if bool(cert_file) != bool(key_file):
        named, missing = "tls_cert_file", "tls_key_file"
        if key_file:
            named, missing = missing, named
        raise ValueError(
            f"{section}.{named} is set without {section}.{missing}: set both, or none."
        )
