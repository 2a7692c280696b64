"""`tailrace` as users run it, noting when each step's outputs arrive from the core.

python -m async_engine.bench.server STAMPS_FILE serve null ...
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, ClassVar

from async_engine import cli, core_source
from async_engine.bench.stamps import StampWriter
from async_engine.core_client import CoreClient
from protos.child_process import die_with_parent

if TYPE_CHECKING:
    from protos.messages import EngineCoreOutputs


class StampedCore(CoreClient):
    """Costs a system call per step: next to nothing per token."""

    stamps: ClassVar[StampWriter]

    async def outputs(self) -> EngineCoreOutputs:
        outputs = await super().outputs()
        if outputs.handles:
            self.stamps.stamp()
        return outputs


if __name__ == "__main__":
    die_with_parent()
    StampedCore.stamps = StampWriter(sys.argv[1])
    vars(core_source)["CoreClient"] = StampedCore
    sys.exit(cli.main(sys.argv[2:]))
