"""One rank of a script under ``torchrun``: a process with virtual devices, which leaves its trace in a file.

usage: python -m gpipe_bench.emulator.rank OUT PROFILE RACES SCRIPT [ARGUMENTS]; the environment is that of torchrun.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import runpy
import signal
import sys
import traceback
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from gpipe_bench.emulator.clocks import HostMessage
from gpipe_bench.emulator.cuda_names import cuda_names
from gpipe_bench.emulator.device_values import keep_values
from gpipe_bench.emulator.handovers import replaced, seen
from gpipe_bench.emulator.library import leave, thread_index
from gpipe_bench.emulator.process_group import Part, groups_replaced
from gpipe_bench.emulator.recording import recording
from gpipe_bench.emulator.rendezvous import Rendezvous, Stopped
from gpipe_bench.emulator.script import Lines, script_traceback, steps_marked, uncompiled
from gpipe_bench.emulator.shapes import load_shapes, updates_priced
from gpipe_bench.machine.profile import Profile
from gpipe_bench.models.torchvision_repair import mend_torchvision
from gpipe_bench.util.garbage import no_collection

_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True)
class RankTrace:
    """What a rank leaves.

    Attributes:
        rows: of the trace, as bytes.
        accesses: likewise.
        names: of the trace.
        parts: of messages.
        main: the thread of the script.
        stopped: whether it would wait for other ranks for ever.
        lines: row -> line of Python, if races are looked for.
        on_host: what messages of CPU tensors do to the host.
        unread: the error of a script that read a value whose message may never come.
    """

    rows: bytes
    accesses: bytes
    names: tuple[str, ...]
    parts: list[Part]
    main: int
    stopped: bool
    lines: dict[int, str]
    on_host: list[HostMessage]
    unread: str = ""


def main(out: str, profile_path: str, races: str, script: str, *arguments: str) -> int:
    """Run the script; the exit status."""
    _end_with_parent()
    profile: Profile = pickle.loads(Path(profile_path).read_bytes())  # noqa: S301 - as above
    rank, size = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, wait_for_workers=False)
    rendezvous = Rendezvous(PrefixStore("emulated", store), rank)
    load_shapes(size, profile)
    keep_values()
    parts: list[Part] = []
    on_host: list[HostMessage] = []
    lines, status, stopped, unread = Lines(), 0, False, ""
    watched: Any = lines.noted() if races == "races" else nullcontext()
    mend_torchvision()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    changes: list[Any] = [steps_marked(), updates_priced(), replaced(torch, "compile", uncompiled), watched]
    changes += [cuda_names(profile), groups_replaced(rendezvous, parts, on_host)]
    with recording() as trace, seen(), no_collection(), ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                sys.stderr.write(f"rank {rank}: {end.code}\n")
        except Stopped:
            stopped = True
        except Exception as error:  # noqa: BLE001 - it is shown as Python shows it
            shown = script_traceback(error, Path(script)) or traceback.format_exc()
            if rendezvous.gave_up and "must be known" in str(error):
                # On GPUs the host waits here; the replay says whether the message comes.
                stopped, unread = True, f"rank {rank} failed:\n{shown}"
            else:
                sys.stderr.write(f"rank {rank} failed:\n{shown}")
                status = 1
    rendezvous.leave()
    left = RankTrace(
        bytes(trace.rows),
        trace.accesses.tobytes(),
        trace.names,
        parts,
        thread_index(),
        stopped,
        lines.of,
        on_host,
        unread,
    )
    Path(out).write_bytes(pickle.dumps(left))
    return status


def _end_with_parent() -> None:
    """Linux kills this process when that of the command ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    # What it leaves must be of this module, not of the main one.
    from gpipe_bench.emulator import rank as _rank  # noqa: PLW0406 - as above

    leave(_rank.main(*sys.argv[1:]))
