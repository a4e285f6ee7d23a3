"""Remembers on disk which ops of a graph share a kernel, for later processes on this machine."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from tilewright.options import Options
from tilewright.target import Target

from .cache import ContentStore, digest
from .code_identity import DECIDING, code_identity

LOG = logging.getLogger("tilewright")
FILE = "decision.json"


class Decisions:
    """The `DecisionCache` of a store, for one machine, one set of options and typical sizes, and one version of the
    compiler."""

    def __init__(
        self, target: Target, store: ContentStore, options: Options, sizes: Mapping[str, int]
    ) -> None:
        self.store = store
        self.identity = digest(
            target.digest(), options.digest(), repr(sorted(sizes.items())), code_identity(DECIDING)
        )
        self._clocked = digest(target.digest(), options.clock_digest(), repr(sorted(sizes.items())))

    def get(self, task: str) -> object | None:
        """What an earlier process decided; None for an entry that cannot be read."""
        folder = self.store.get(self._key(task))
        if folder is None:
            return None
        try:
            return json.loads((folder / FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            LOG.info("no decision is taken from %s: %s", folder, error)
            return None

    def put(self, task: str, decision: object) -> None:
        """Store a decision."""
        self.store.put(self._key(task), {FILE: json.dumps(decision, indent=1).encode()})

    def drop(self, task: str) -> None:
        """Forget a decision."""
        self.store.remove(self._key(task))

    def clock_key(self, task: str) -> str:
        """What a tuning file keeps a clock's decision under: it holds for one version, but for any time that was given
        to tuning."""
        return digest("clock", self._clocked, task)

    def _key(self, task: str) -> str:
        return digest("cover", self.identity, task)
