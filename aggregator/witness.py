"""What the aggregator remembers of the sites' privacy ledgers: each one's last signed head.

A site that restored a backup, or a copy of it that ran on elsewhere, cannot tell by
itself; it can when it is shown a head it signed and no longer has. The aggregator
learns nothing from a head but how many rows a ledger has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from common.errors import ConfigError, TransportError, TrustError
from common.identity import canonical, replace_file
from common.update import LedgerHead


class Witness:
    """The last heads by the sites' public keys, in one JSON file.

    A site that enrols again has a new key, and starts without a witness.

    Raises:
        ConfigError: the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._heads = _read(path)

    def head(self, public: bytes) -> str:
        """The last head of the site with this key, encoded; empty where there is none."""
        head = self._heads.get(public)
        return head.encode() if head else ""

    def remember(self, heads: Mapping[bytes, LedgerHead]) -> None:
        """Keep verified heads by public key; one that is not further than the last is ignored.

        Raises:
            TransportError: the disk did not take them; the earlier ones stand.
        """
        newer = {
            public: head
            for public, head in heads.items()
            if public not in self._heads or head.sequence > self._heads[public].sequence
        }
        if not newer:
            return
        after = {**self._heads, **newer}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, canonical({public.hex(): head.encode() for public, head in after.items()}))
        except OSError as error:
            raise TransportError(
                f"the witness {self._path} was not written: {error}; free the disk and go on"
            ) from error
        self._heads = after


def _read(path: Path) -> dict[bytes, LedgerHead]:
    try:
        found = {
            bytes.fromhex(public): LedgerHead.parse(head) for public, head in json.loads(path.read_bytes()).items()
        }
        for public, head in found.items():
            head.verify(public)
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError, OSError, TrustError) as error:
        raise ConfigError(
            f"the witness {path} is damaged ({error}); restore it from its backup: "
            "without it no site can notice that its ledger went back"
        ) from error
    return found
