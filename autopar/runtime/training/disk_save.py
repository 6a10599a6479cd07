"""A save into the folder of a run, on a file system that all ranks share: a file per rank, then the manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.files import write_synced
from autopar.runtime.checkpoint.checkpoint_dir import CheckpointDir, read_shown
from autopar.runtime.checkpoint.staging import StagedFile
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.training.async_save import manifest_of


class DiskSave:
    """The share of one rank. ``told``: its part of the manifest. ``common``: what is equal on all ranks."""

    optional = False

    def __init__(
        self,
        groups: Groups,
        run: CheckpointDir,
        draft: Path,
        staged: StagedFile,
        told: Mapping[str, Any],
        common: Mapping[str, Any],
        keep: int | None,
    ) -> None:
        self._groups, self._run, self._draft, self._staged = groups, run, draft, staged
        self._told, self._common, self._keep = told, common, keep
        self.folder, self.staged = draft.parent / draft.name.removeprefix(".saving-"), staged.staged

    def write(self) -> None:
        self._staged.run()
        told = {**self._told, "sums": self._staged.sums.found}
        write_synced(self._draft / _report(self._groups.rank), json.dumps(told))

    def publish(self) -> None:
        names = [_report(rank) for rank in range(self._groups.mesh.world_size)]
        manifest = manifest_of([read_shown(self._draft / name) for name in names], self._common)
        for name in names:
            (self._draft / name).unlink()
        self._run.publish(manifest, self._keep)

    def discard(self) -> None:
        self._run.discard()

    def close(self) -> None:
        self._staged.close()
        self._run.close()

    def completed(self) -> None:
        """The folder says so itself."""


def _report(rank: int) -> str:
    return f"rank-{rank:05d}.json"
